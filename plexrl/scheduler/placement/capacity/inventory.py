"""The free capacity of the cluster, derived from the state: capacity index, GPU pool, memory.

The state determines all of it: `Inventory(config, policy, state)` rebuilds it after a restart, and
`check` compares the two.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plexrl.ids import DeploymentId, GroupId, NodeId
from plexrl.scheduler.placement.capacity.index import CapacityIndex, CapacityShape
from plexrl.scheduler.placement.capacity.needs import Need, kept_bytes, need_of
from plexrl.scheduler.placement.capacity.node_pool import (
    NodeKind,
    NodePool,
    is_in_service,
    kind_of,
    speed_of,
)
from plexrl.scheduler.placement.capacity.unions import Unions
from plexrl.scheduler.placement.rendezvous import may_span
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.rules.limits import TOTAL_MAX
from plexrl.scheduler.rules.policies import PlacementPolicy
from plexrl.scheduler.state.demand.trace import DemandTrace, Footprint, project, whole_ring
from plexrl.scheduler.state.records import Deployment, Group, Node, State
from plexrl.wire.messages import RankPlacement

Turns = Sequence[tuple[tuple[Deployment, ...], bool]]
"""Deployments of a job, and whether it is worthwhile that they take turns."""


class Inventory:
    """The capacity index, the pool of free GPUs, and the state kept on each node."""

    def __init__(self, config: SchedulerConfig, policy: PlacementPolicy, state: State) -> None:
        self._config = config
        self._policy = policy
        self._state = state
        self.index = CapacityIndex(config.horizon_slots)
        self.unions = Unions()
        self.pool = NodePool()
        self.draining: dict[NodeId, None] = {}
        """Nodes that operators drain."""
        self.unsettled: dict[NodeId, None] = {}
        """Nodes that deployments may have to leave: lost, drained, or with less than before."""
        self.holds: dict[Need, bool] = {}
        """Whether the nodes in service have these GPUs."""
        self.holds_gangs: dict[tuple[object, ...], tuple[bool, Turns]] = {}
        """The same for gangs of jobs without GPUs, with the turns on which it rests."""
        self._sizes: dict[NodeKind, tuple[int, int]] | None = None
        self._speeds: dict[tuple[str, int, str], float] | None = None
        self._in_service: dict[NodeKind, int] | None = None
        self._spills: dict[GroupId, bool] = {}
        self._groups_on: dict[NodeId, dict[GroupId, None]] = {}
        self._parts_of: dict[GroupId, dict[NodeId, _Part]] = {}
        self._demands: dict[DeploymentId, _Demand] = {}
        """The last projected trace of each member."""
        self._kept: dict[NodeId, int] = {}
        """Bytes of state of the members of shared groups, by node."""
        for node in state.nodes.values():
            self.node_changed(node)
        for group in state.groups.values():
            self.pool.take(group.gpus)
            self._enter(group)
        self._update_unions(state.groups.values())
        for group in state.groups.values():
            self._update_capacity(group)
        for node in state.nodes.values():
            self._note_unsettled(node, [state.groups[name] for name in self.groups_on(node.node)])

    def node_changed(self, node: Node) -> None:
        """Update after a node joined, returned with other sizes, died, or is drained or not."""
        self._sizes = self._in_service = self._speeds = None
        self.holds.clear()
        self.holds_gangs.clear()
        if node.is_draining:
            self.draining[node.node] = None
        else:
            self.draining.pop(node.node, None)
        self.pool.remove(node.node)
        taken = [
            gpu.gpu
            for name in self._groups_on.get(node.node, ())
            for gpu in self._state.groups[name].gpus
            if gpu.node == node.node
        ]
        kind = kind_of(node)
        self.pool.add(node.node, kind, node.block, node.gpus, taken)
        if not is_in_service(node):
            self.pool.close(node.node)
        groups = [self._state.groups[name] for name in self._groups_on.get(node.node, ())]
        for group in groups:
            self._update_capacity(group)
        self._note_unsettled(node, groups)

    def _note_unsettled(self, node: Node, groups: Iterable[Group]) -> None:
        """Note whether deployments may have to leave the node, which has these groups."""
        self.unsettled.pop(node.node, None)
        names = [name for group in groups for name in (*group.members, *group.fillers)]
        if (
            (node.lost_at is not None or node.is_draining)
            or any(self._parts_of[group.group][node.node].gpus[-1] >= node.gpus for group in groups)
            or not all(may_span(self._state, self._state.deployments[name]) for name in names)
        ):
            self.unsettled[node.node] = None

    def node_removed(self, node: NodeId) -> None:
        """Forget a node without groups."""
        assert not self._groups_on.get(node), f"{node} has groups"
        self._sizes = self._in_service = self._speeds = None
        self.holds.clear()
        self.holds_gangs.clear()
        self.draining.pop(node, None)
        self.unsettled.pop(node, None)
        self.pool.remove(node)
        self._groups_on.pop(node, None)
        self._kept.pop(node, None)

    def add_group(self, group: Group) -> None:
        """Add a group formed of free GPUs."""
        self.pool.take(group.gpus)
        self._enter(group)

    def remove_group(self, group: Group) -> None:
        """Remove a group without members and free its GPUs."""
        self.leave(group)
        self.pool.give_back(group.gpus)

    def leave(self, group: Group) -> None:
        """Forget a group whose GPUs stay in use: `enter_again` follows."""
        for name in (*group.members, *group.fillers):
            self._keep(group, self._state.deployments[name], -1)
            self.unions.leave(name)
        self.index.remove_group(group.group)
        self._spills.pop(group.group, None)
        for node in self._parts_of.pop(group.group):
            del self._groups_on[node][group.group]

    def enter_again(self, groups: Sequence[Group]) -> None:
        """Add groups formed of the GPUs, and with the residents, of those that have left."""
        for group in groups:
            self._enter(group)
        self._update_unions(groups)
        for group in groups:
            self.refresh(group)

    def _update_unions(self, groups: Iterable[Group]) -> None:
        """Update the unions of all members of these groups."""
        for name in dict.fromkeys([name for group in groups for name in group.members]):
            of_member = self._state.groups_of(self._state.deployments[name])
            if len(of_member) > 1:
                union = [each for each in of_member if not rolls_out(self._state, each)]
                self.unions.enter(name, [self.index.slots(each.group) for each in union])

    def _enter(self, group: Group) -> None:
        self.index.add_group(group.group, shape_of(group), group.serial)
        parts = self._parts_of[group.group] = _parts(group)
        for node in parts:
            self._groups_on.setdefault(node, {})[group.group] = None
        residents = [self._state.deployments[name] for name in group.members]
        if residents:
            self.index.fill(
                group.group,
                {each.deployment: (self.footprint(each), self.duty(each)) for each in residents},
            )
        fillers = [self._state.deployments[name] for name in group.fillers]
        for each in (*residents, *fillers):
            self._keep(group, each, +1)

    def reserve(self, deployment: Deployment, *, strict: bool) -> None:
        """Reserve the deployment's slots in its groups, unless it is a filler, and memory for its
        state.

        Raises:
            CapacityError: `strict`, and a group is busy in one of the slots; nothing changed.
        """
        groups, name = self._state.groups_of(deployment), deployment.deployment
        if not deployment.spec.preemptible:
            footprint, duty = self.footprint(deployment), self.duty(deployment)
            if strict:
                for group in groups:
                    self.index.check_free(group.group, name, footprint)
            for group in groups:
                self.index.reserve(group.group, name, footprint, duty)
            if len(groups) > 1 or deployment.spec.kind == "rollout":
                self._update_unions(groups)
        for group in groups:
            self._keep(group, deployment, +1)
        for group in groups:
            self.refresh(group)

    def release(self, deployment: Deployment) -> None:
        """Undo `reserve`, after the deployment was removed from the groups' members."""
        groups = self._state.groups_of(deployment)
        if not deployment.spec.preemptible:
            for group in groups:
                self.index.release(group.group, deployment.deployment)
            self.unions.leave(deployment.deployment)
            if deployment.spec.kind == "rollout":
                self._update_unions(groups)
        self._demands.pop(deployment.deployment, None)
        for group in groups:
            self._keep(group, deployment, -1)
        for group in groups:
            self.refresh(group)

    def resize(self, deployment: Deployment, state_bytes: int) -> None:
        """Change the size of the deployment's state."""
        groups = self._state.groups_of(deployment)
        for group in groups:
            self._keep(group, deployment, -1)
        deployment.spec.resize(state_bytes)
        for group in groups:
            self._keep(group, deployment, +1)
        for group in groups:
            self.refresh(group)

    def replace_reservation(
        self, deployment: Deployment, trace: DemandTrace | None, shift: float
    ) -> None:
        """Replace the deployment's slots in its groups; None: the whole ring."""
        if trace is None:
            footprint, duty = whole_ring(self._config.horizon_slots), self._equal_duty
        else:
            demand = self._demand(deployment, trace)
            footprint, duty = demand.footprint.at(shift), demand.duty
        for group in deployment.placement.groups:
            self.index.replace(group, deployment.deployment, footprint, duty)

    def refresh(self, group: Group) -> None:
        """Update the capacity of all groups on the nodes of `group`, which has changed."""
        touched = {
            name: None for node in self._parts_of[group.group] for name in self._groups_on[node]
        }
        for name in touched:
            self._update_capacity(self._state.groups[name])

    def sizes(self) -> dict[NodeKind, tuple[int, int]]:
        """(GPUs, bytes of the host and NVMe tiers) in total, by kind of node. Includes lost nodes
        that may come back."""
        if self._sizes is None:
            self._sizes = {}
            for node in self._state.nodes.values():
                if node.lost_at is not None and not self._config.lost_nodes_return:
                    continue
                kind = kind_of(node)
                gpus, tiers = self._sizes.get(kind, (0, 0))
                more = node.host_memory_bytes + node.nvme_bytes
                self._sizes[kind] = (gpus + node.gpus, tiers + more)
        return self._sizes

    def in_service(self) -> dict[NodeKind, int]:
        """GPUs on nodes in service, free or not, by kind."""
        if self._in_service is None:
            self._in_service = {}
            for node in self._state.nodes.values():
                if is_in_service(node):
                    kind = kind_of(node)
                    self._in_service[kind] = self._in_service.get(kind, 0) + node.gpus
        return self._in_service

    def speeds(self) -> list[float]:
        """The speeds of all nodes, fastest first."""
        return sorted(set(self._speed_by_type().values()), reverse=True)

    def speed(self, shape: CapacityShape) -> float | None:
        """The speed of groups of this shape; None if no node is of their type any more."""
        return self._speed_by_type().get((shape.node_type, shape.gpu_memory_bytes, shape.gpu_kind))

    def _speed_by_type(self) -> dict[tuple[str, int, str], float]:
        if self._speeds is None:
            self._speeds = {}
            for node in self._state.nodes.values():
                key = (node.node_type, node.gpu_memory_bytes, node.gpu_kind)
                # Nodes of one type may differ: none is slower than its type.
                self._speeds[key] = min(speed_of(node), self._speeds.get(key, math.inf))
        return self._speeds

    def gpus_in_service(self, group: Group) -> dict[NodeKind, int]:
        """The group's GPUs on nodes in service, by kind."""
        found: dict[NodeKind, int] = {}
        for name, part in self._parts_of[group.group].items():
            node = self._state.nodes[name]
            if is_in_service(node):
                kind, gpus = kind_of(node), bisect_left(part.gpus, node.gpus)
                found[kind] = found.get(kind, 0) + gpus
        return found

    def groups_on(self, node: NodeId) -> list[GroupId]:
        """The groups with GPUs on that node, oldest first."""
        groups = self._state.groups
        return sorted(self._groups_on.get(node, ()), key=lambda name: groups[name].serial)

    def footprint(self, deployment: Deployment) -> Footprint:
        """The footprint of the deployment's reservation."""
        reservation = deployment.placement.reservation
        if reservation is None or reservation.trace is None:
            return whole_ring(self._config.horizon_slots)
        return self._demand(deployment, reservation.trace).footprint.at(reservation.shift)

    def duty(self, deployment: Deployment) -> float:
        """The part of a group's time that a member uses; an equal share without a profile."""
        reservation = deployment.placement.reservation
        if reservation is not None and reservation.trace is not None:
            return self._demand(deployment, reservation.trace).duty
        return self._equal_duty

    def duty_when_placed(self, deployment: Deployment) -> float:
        """The duty that a waiting deployment will have."""
        trace = deployment.demand.trace
        return self.duty(deployment) if trace is None else trace.duty

    @property
    def _equal_duty(self) -> float:
        return self._config.load_max / self._config.residents_max

    def _demand(self, deployment: Deployment, trace: DemandTrace) -> "_Demand":
        """The projected trace, cached because shifts change far more often than traces."""
        name, config = deployment.deployment, self._config
        found = self._demands.get(name)
        if found is None or found.trace is not trace:
            footprint = project(trace, config.horizon_slots, config.period_tolerance)
            found = self._demands[name] = _Demand(trace, footprint, trace.duty)
        return found

    def state_bytes_free(self, group: Group) -> tuple[int, int]:
        """(in host memory, with NVMe): the largest state of one more member, in bytes."""
        host, total = [], []
        for node, part in self._parts_of[group.group].items():
            known, kept = self._state.nodes[node], self._kept.get(node, 0)
            scale = len(group.gpus) / len(part.gpus)
            host.append(int((known.host_memory_bytes - kept) * scale))
            total.append(int((known.host_memory_bytes + known.nvme_bytes - kept) * scale))
        # The index stores 64-bit integers.
        return max(-TOTAL_MAX, min(TOTAL_MAX, *host)), max(-TOTAL_MAX, min(TOTAL_MAX, *total))

    def device_bytes(self, group: Group) -> tuple[int, int]:
        """(bytes that all members and fillers keep on each GPU, the most that one of them needs
        besides what it keeps)."""
        kept = most = 0
        for name in (*group.members, *group.fillers):
            each = self._state.deployments[name]
            stays = kept_bytes(each)
            kept += stays
            most = max(most, need_of(each).device_bytes - stays)
        return kept, most

    def fits_on_device(self, group: Group, deployment: Deployment) -> bool:
        """Whether each GPU of the group holds what all keep there, with what any one of them and
        `deployment` needs to work. Always so for virtual GPUs."""
        if not group.gpu_kind:
            return True
        kept, most = self.device_bytes(group)
        stays = kept_bytes(deployment)
        alone = need_of(deployment).device_bytes - stays
        return kept + stays + max(most, alone) <= group.gpu_memory_bytes

    def find_gpus(
        self,
        deployment: Deployment,
        speed: float | None = None,
        count: int | None = None,
        beside: Group | None = None,
    ) -> tuple[RankPlacement, ...] | None:
        """Free GPUs for a new group of the deployment, of nodes of this speed only if one is given;
        None if there are none. `count`: for so many of its ranks, on nodes like those of the group
        `beside`.

        If the policy keeps states in host memory, the deployment must fit into the host memory of
        its nodes with the states there. A deployment alone on its nodes is never offloaded, so its
        state may be larger.
        """
        need = need_of(deployment)
        only = None if beside is None else kind_of(self._state.nodes[beside.gpus[0].node])
        wanted = (count or need.workers, need.node_type, need.gpu_memory_bytes)
        if not self._policy.keeps_in_host or deployment.spec.exclusive:
            return self.pool.find(
                *wanted,
                device_bytes_min=need.device_bytes,
                by_speed=need.by_speed,
                speed=speed,
                only=only,
            )

        def fits(node: NodeId, ranks: int) -> bool:
            kept = self._kept.get(node, 0)
            more = deployment.spec.state_bytes * ranks // deployment.spec.workers
            return not kept or kept + more <= self._state.nodes[node].host_memory_bytes

        return self.pool.find(
            *wanted,
            fits,
            device_bytes_min=need.device_bytes,
            by_speed=need.by_speed,
            speed=speed,
            only=only,
        )

    def spills(self, group: Group) -> bool:
        """Whether the states on the group's nodes exceed host memory."""
        return self._spills[group.group]

    def check(self) -> None:
        """Assert that the inventory equals one rebuilt from the state."""
        rebuilt = Inventory(self._config, self._policy, self._state)
        assert self.pool.snapshot() == rebuilt.pool.snapshot(), (
            "the pool of free GPUs differs from the state"
        )
        kept = [
            {node: kept for node, kept in each._kept.items() if kept} for each in (self, rebuilt)
        ]
        assert kept[0] == kept[1], f"the states on the nodes are {kept[0]}, not {kept[1]}"
        self.index.check_equal(rebuilt.index)
        self.unions.check_equal(rebuilt.unions)

    def _keep(self, group: Group, deployment: Deployment, sign: int) -> None:
        """Add (+1) or subtract (-1) a member's state on its group's nodes."""
        if not group.shared:
            return
        for node, part in self._parts_of[group.group].items():
            nbytes = deployment.spec.state_bytes * len(part.gpus) // deployment.spec.workers
            self._kept[node] = self._kept.get(node, 0) + sign * nbytes

    def _update_capacity(self, group: Group) -> None:
        host, total = self.state_bytes_free(group)
        self._spills[group.group] = host < 0
        self.index.update_capacity(
            group.group,
            is_open=self.is_open(group),
            host_bytes_free=host,
            state_bytes_free=total,
        )
        if group.gpu_kind:
            self.index.update_device(group.group, *self.device_bytes(group))

    def takes_members(self, group: Group) -> bool:
        """Whether the group may have more members."""
        if not group.shared or group.is_closed:
            return False
        for name, part in self._parts_of[group.group].items():
            node = self._state.nodes[name]
            if not is_in_service(node) or part.gpus[-1] >= node.gpus:
                return False
        return True

    def is_open(self, group: Group) -> bool:
        """Whether searches may add members to the group."""
        if not group.members or not self.takes_members(group):
            return False
        if not self._policy.repacks:
            return True
        # A member is profiled alone (PlexRL §4.3.2, cold start), unless that takes too long.
        for name in group.members:
            member = self._state.deployments[name]
            reservation = member.placement.reservation
            has_profile = reservation is not None and reservation.trace is not None
            if not has_profile and not member.demand.cycles.is_overdue:
                return False
        return True


def shape_of(group: Group) -> CapacityShape:
    """The shape of a group."""
    return CapacityShape(group.node_type, group.gpu_memory_bytes, len(group.gpus), group.gpu_kind)


def rolls_out(state: State, group: Group) -> bool:
    """Whether a member of the group is a rollout."""
    return any(state.deployments[name].spec.kind == "rollout" for name in group.members)


@dataclass(frozen=True, slots=True)
class _Demand:
    """A member's trace, projected onto the ring."""

    trace: DemandTrace
    footprint: Footprint
    """At shift 0."""
    duty: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The part of a group on one node."""

    gpus: list[int]
    """Indexes of its GPUs on the node, ascending."""


def _parts(group: Group) -> dict[NodeId, _Part]:
    """The parts of a group by node, sorted by name."""
    indexes: dict[NodeId, list[int]] = {}
    for gpu in group.gpus:
        indexes.setdefault(gpu.node, []).append(gpu.gpu)
    return {node: _Part(gpus=sorted(gpus)) for node, gpus in sorted(indexes.items())}
