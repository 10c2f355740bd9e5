"""Simulates the host and NVMe tiers of all nodes: where each state is, and how long moves take.

Each node keeps versions in host memory and evicts to NVMe the one with the latest expected use, by
the StateManager's own policy (`store.tiers.eviction.policy`) and the scheduler's predictions of
next uses. Differences from the StateManager:

- A version moves as a whole and takes its device bytes, even if ranks share parts. Nearly full
  tiers may refuse a version that StateManagers could place rank by rank.
- Background copies to NVMe are modelled by time: a version counts as copied, and leaves host memory
  at no cost, once it has been idle for as long as the node's NVMe needs to write all of its host
  memory in use, provided that host memory is at least `DRAIN_FROM` full. Copies take no space.
- Concurrent moves do not slow each other down.

Invariants, asserted by `check`: no tier exceeds its capacity; every version is in exactly one tier
of each of its nodes; only unreleased deployments have versions. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from plexrl.ids import DeploymentId, NodeId
from plexrl.scheduler.rules.switch_cost import HOST, NVME
from plexrl.scheduler.state.messages.events import StateMoved, StateReported, StateResidency
from plexrl.sim.state.move_costs import MoveCosts
from plexrl.sim.workload.scenario import NodeType
from plexrl.statemanager.store.tiers.eviction.policy import (
    EvictionCandidate,
    TierName,
    TierUsage,
    expected_use,
    plan_eviction,
)

DRAIN_FROM = 0.5
"""Part of host memory in use from which the StateManager copies to NVMe in the background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The result of a load or an offload."""

    took_s: float
    moved: StateMoved
    reports: tuple[StateReported, ...] = ()
    """Reports to the scheduler afterwards: evicted versions, and this version if its nodes keep it
    in different tiers."""


@dataclass(slots=True)
class _State:
    """The state of one deployment."""

    deployment: DeploymentId
    state_bytes: int
    node_type: str
    rank_bytes: Mapping[NodeId, int] = field(default_factory=dict)
    """Bytes by node, for the nodes of its ranks."""
    gpus: int = 1
    stored_bytes: dict[NodeId, int] = field(default_factory=dict)
    """Bytes of the newest version by node, for the nodes that have a part."""
    on_nvme: set[NodeId] = field(default_factory=set)
    """Nodes that keep their part on NVMe."""
    next_use: float | None = None
    """Predicted time of the next use."""
    last_use: float = 0.0
    tick: int = 0
    """Logical time of the last use."""
    in_place: bool = False
    """Whether the newest version is in host memory on exactly the nodes of its ranks."""
    host_load: Move | None = None
    host_offload: Move | None = None


@dataclass(slots=True)
class _Tiers:
    """The tiers of one node."""

    node_type: NodeType
    residents: dict[DeploymentId, _State] = field(default_factory=dict)
    host_bytes: int = 0
    nvme_bytes: int = 0
    prefetching: dict[DeploymentId, float] = field(default_factory=dict)
    """Completion times of the prefetches in progress."""

    def prefetching_bytes(self, node: NodeId) -> int:
        """Host memory that is reserved for prefetches."""
        return sum(self.residents[name].stored_bytes[node] for name in self.prefetching)


class VirtualState:
    """The StateManagers of all nodes."""

    def __init__(self, costs: MoveCosts) -> None:
        self._costs = costs
        self._nodes: dict[NodeId, _Tiers] = {}
        self._states: dict[DeploymentId, _State] = {}
        self._tick = 0

    def add_node(self, node: NodeId, node_type: NodeType) -> None:
        """Add a node with empty tiers."""
        self._nodes[node] = _Tiers(node_type)

    def launched(self, deployment: DeploymentId, state_bytes: int, nodes: Sequence[NodeId]) -> None:
        """Record a deployment's GPUs; `nodes`: the node of each rank."""
        known = self._states.get(deployment)
        if known is None:
            known = self._states[deployment] = _State(deployment, state_bytes, "")
        known.node_type = self._nodes[nodes[0]].node_type.name
        known.gpus = len(nodes)
        counts: dict[NodeId, int] = {}
        for node in nodes:
            counts[node] = counts.get(node, 0) + 1
        known.rank_bytes = {
            node: known.state_bytes * count // len(nodes) for node, count in counts.items()
        }
        kind, gpus = known.node_type, known.gpus
        moved = StateMoved(bytes_moved=state_bytes, tier=HOST)
        load_s = self._costs.load_s(kind, state_bytes, gpus)
        offload_s = self._costs.offload_s(kind, state_bytes, gpus)
        known.host_load = Move(took_s=load_s, moved=moved)
        known.host_offload = Move(took_s=offload_s, moved=moved)
        self._update_in_place(known)

    def knows(self, deployment: DeploymentId) -> bool:
        """Whether the deployment has not ended."""
        return deployment in self._states

    def build(self, deployment: DeploymentId) -> Move:
        """The first load, of initial weights; assumed to take as long as one from host memory."""
        built = self._states[deployment].host_load
        assert built is not None, f"{deployment} loads without GPUs"
        return built

    def load(self, deployment: DeploymentId, now: float) -> Move | None:
        """Begin a load of the newest version; None: a node lacks its part and the state is lost."""
        known = self._states[deployment]
        self._used(known, now)
        if known.in_place:
            return known.host_load
        if any(node not in known.stored_bytes for node in known.rank_bytes):
            return None
        for node in known.rank_bytes:
            # The load replaces a prefetch in progress and reads from NVMe.
            self._nodes[node].prefetching.pop(deployment, None)
        if not any(node in known.on_nvme for node in known.rank_bytes):
            return known.host_load
        took_s = self._costs.load_s(known.node_type, known.state_bytes, known.gpus, NVME)
        return Move(took_s=took_s, moved=StateMoved(bytes_moved=known.state_bytes, tier=NVME))

    def offload(
        self, deployment: DeploymentId, next_use_s: float | None, now: float
    ) -> Move | None:
        """Begin an offload or a snapshot of a new version; None: a node cannot hold it, and nothing
        has changed except evictions."""
        known = self._states[deployment]
        self._used(known, now)
        known.next_use = None if next_use_s is None else now + next_use_s
        if known.in_place:
            # The new version replaces the old one of the same size.
            return known.host_offload
        reports: list[StateReported] = []
        spill_s = 0.0
        for node, nbytes in known.rank_bytes.items():
            found = self._keep(known, node, nbytes, now)
            if found is None:
                return None
            victims, spilled_bytes = found
            spill_s = max(spill_s, self._costs.nvme_s(known.node_type, spilled_bytes))
            if victims:
                reports.append(StateReported(node=node, states=tuple(victims)))
        for node in [node for node in known.stored_bytes if node not in known.rank_bytes]:
            # Parts on nodes of former GPUs.
            self._drop(known, node)
        self._update_in_place(known)
        tier = NVME if known.on_nvme else HOST
        if known.on_nvme and known.on_nvme != set(known.rank_bytes):
            reports += [self._report(known, node) for node in known.rank_bytes]
        took_s = self._costs.offload_s(known.node_type, known.state_bytes, known.gpus, tier)
        return Move(
            took_s=took_s + spill_s,
            moved=StateMoved(bytes_moved=known.state_bytes, tier=tier),
            reports=tuple(reports),
        )

    def overlap(self, leaving: DeploymentId, load: Move, deployment: DeploymentId) -> Move:
        """A load of `deployment` right after the offload of `leaving`, which ended now: what
        found free GPU memory was copied during it."""
        ours, theirs = self._states[leaving], self._states[deployment]
        assert theirs.host_load is not None, f"{deployment} loads without GPUs"
        if load.moved.tier != HOST or ours.host_offload is None:
            return load
        kind = theirs.node_type
        part = self._costs.prefetched_part(
            kind, ours.state_bytes / ours.gpus, theirs.state_bytes / theirs.gpus
        )
        copied_s = part * max(0.0, load.took_s - self._costs.fixed_s(kind))
        copied_s = min(copied_s, ours.host_offload.took_s)
        if not copied_s:
            return load
        moved = StateMoved(
            bytes_moved=load.moved.bytes_moved,
            tier=HOST,
            prefetched_bytes=round(part * load.moved.bytes_moved),
            prefetch_s=copied_s,
        )
        return Move(took_s=load.took_s - copied_s, moved=moved)

    def prefetch(
        self,
        deployment: DeploymentId,
        nodes: Iterable[NodeId],
        next_use_s: float | None,
        now: float,
    ) -> list[tuple[float, NodeId]]:
        """Begin to copy the newest version to host memory where there is space; returns the
        completion time of each node, at which the caller calls `prefetched`."""
        known = self._states.get(deployment)
        if known is None:
            return []
        if next_use_s is not None:
            known.next_use = now + next_use_s
        started = []
        for node in nodes:
            tiers = self._nodes[node]
            if node not in known.on_nvme or deployment in tiers.prefetching:
                continue
            nbytes = known.stored_bytes[node]
            free_bytes = tiers.node_type.host_memory_bytes - tiers.host_bytes
            if nbytes + tiers.prefetching_bytes(node) > free_bytes:
                continue
            done_at = now + self._costs.nvme_s(tiers.node_type.name, nbytes)
            tiers.prefetching[deployment] = done_at
            started.append((done_at, node))
        return started

    def prefetched(
        self, deployment: DeploymentId, node: NodeId, now: float
    ) -> StateReported | None:
        """Complete a prefetch that ends now; None: it was cancelled meanwhile."""
        tiers = self._nodes[node]
        if tiers.prefetching.get(deployment) != now:
            return None
        del tiers.prefetching[deployment]
        known = self._states[deployment]
        nbytes = known.stored_bytes[node]
        tiers.nvme_bytes -= nbytes
        tiers.host_bytes += nbytes
        known.on_nvme.discard(node)
        self._update_in_place(known)
        return self._report(known, node)

    def migrate(
        self, deployment: DeploymentId, nodes: Sequence[NodeId], now: float
    ) -> list[tuple[float, NodeId, bool]]:
        """Copy the newest version to nodes; returns time, node and whether the node can hold it."""
        known = self._states[deployment]
        self._used(known, now)
        kind = self._nodes[nodes[0]].node_type
        took_s = self._costs.migrate_s(kind.name, known.state_bytes, known.gpus)
        nbytes = known.state_bytes * min(known.gpus, kind.gpus) // known.gpus
        known.in_place = False
        return [
            (now + took_s, node, self._keep(known, node, nbytes, now) is not None) for node in nodes
        ]

    def release(self, deployment: DeploymentId, nodes: Iterable[NodeId]) -> None:
        """Drop a deployment's versions from nodes."""
        known = self._states.get(deployment)
        if known is None:
            return
        for node in nodes:
            self._drop(known, node)
        self._update_in_place(known)

    def forget(self, deployment: DeploymentId) -> None:
        """Drop all versions of an ended deployment."""
        known = self._states.get(deployment)
        if known is not None:
            for node in list(known.stored_bytes):
                self._drop(known, node)
            del self._states[deployment]

    def node_lost(self, node: NodeId, survives: bool) -> None:
        """Lose a node. Its NVMe remains; its host memory remains only if it `survives`."""
        tiers = self._nodes[node]
        tiers.prefetching.clear()
        if survives:
            return
        for known in list(tiers.residents.values()):
            if node not in known.on_nvme:
                self._drop(known, node)
                known.in_place = False

    def states_on(self, node: NodeId) -> tuple[DeploymentId, ...]:
        """Deployments with a version on the node."""
        return tuple(sorted(self._nodes[node].residents))

    def refusal_s(self, deployment: DeploymentId) -> float:
        """Seconds until a failed move is reported."""
        known = self._states[deployment]
        return self._costs.load_s(known.node_type, 0, known.gpus)

    def check(self) -> None:
        """Assert the invariants above."""
        for name, tiers in self._nodes.items():
            host = nvme = 0
            for deployment, known in tiers.residents.items():
                assert self._states[deployment] is known, f"{name} keeps unknown {deployment}"
                on_nvme = name in known.on_nvme
                host += 0 if on_nvme else known.stored_bytes[name]
                nvme += known.stored_bytes[name] if on_nvme else 0
            assert (host, nvme) == (tiers.host_bytes, tiers.nvme_bytes), f"{name} has wrong sums"
            assert host <= tiers.node_type.host_memory_bytes, f"{name}'s host memory overflows"
            assert nvme <= tiers.node_type.nvme_bytes, f"{name}'s NVMe overflows"
        for deployment, known in self._states.items():
            assert known.on_nvme <= set(known.stored_bytes), (
                f"{deployment} is on NVMe of a node without it"
            )
            held = {n for n, t in self._nodes.items() if deployment in t.residents}
            assert held == set(known.stored_bytes), f"{deployment} has wrong nodes"
            if known.in_place:
                assert not known.on_nvme, f"{deployment} is not in host memory everywhere"
                assert dict(known.rank_bytes) == known.stored_bytes, (
                    f"{deployment} is on other nodes than its ranks"
                )

    def _used(self, known: _State, now: float) -> None:
        self._tick += 1
        known.tick = self._tick
        known.last_use = now
        if known.next_use is not None and known.next_use <= now:
            # The predicted use has happened.
            known.next_use = None

    def _update_in_place(self, known: _State) -> None:
        known.in_place = not known.on_nvme and known.stored_bytes == known.rank_bytes

    def _report(self, known: _State, node: NodeId) -> StateReported:
        nbytes, on_nvme = known.stored_bytes[node], node in known.on_nvme
        where = StateResidency(
            deployment=known.deployment,
            host_bytes=0 if on_nvme else nbytes,
            nvme_bytes=nbytes if on_nvme else 0,
        )
        return StateReported(node=node, states=(where,))

    def _keep(
        self, known: _State, node: NodeId, nbytes: int, now: float
    ) -> tuple[list[StateResidency], int] | None:
        """Store a new version of `known` on a node in place of the old one; returns the evicted
        versions and the bytes written for that. None: the node cannot hold it."""
        tiers = self._nodes[node]
        kind = tiers.node_type
        tiers.prefetching.pop(known.deployment, None)
        victims: list[StateResidency] = []
        written_bytes = 0
        tier = TierName.HOST
        if tiers.host_bytes + nbytes > kind.host_memory_bytes:
            # Stored versions take precedence over prefetches.
            tiers.prefetching.clear()
            host = TierUsage(used_bytes=tiers.host_bytes, bytes_max=kind.host_memory_bytes)
            nvme = TierUsage(used_bytes=tiers.nvme_bytes, bytes_max=kind.nvme_bytes)
            # Of the versions on NVMe only the old one can be dropped.
            candidates = [
                self._candidate(resident, node, known, now)
                for resident in tiers.residents.values()
                if resident is known or node not in resident.on_nvme
            ]
            placement = plan_eviction(nbytes, candidates, host, nvme)
            if placement is None:
                return None
            tier = placement.tier
            for name in placement.spill:
                victim = tiers.residents[DeploymentId(name)]
                written_bytes += (
                    0 if self._is_copied(victim, tiers, now) else victim.stored_bytes[node]
                )
                victims.append(self._spill(victim, node))
        elif tiers.prefetching:
            free_bytes = kind.host_memory_bytes - tiers.host_bytes - nbytes
            if tiers.prefetching_bytes(node) > free_bytes:
                tiers.prefetching.clear()
        self._drop(known, node)
        tiers.residents[known.deployment] = known
        known.stored_bytes[node] = nbytes
        if tier == TierName.HOST:
            tiers.host_bytes += nbytes
        else:
            tiers.nvme_bytes += nbytes
            known.on_nvme.add(node)
        return victims, written_bytes

    def _candidate(
        self, known: _State, node: NodeId, incoming: _State, now: float
    ) -> EvictionCandidate:
        return EvictionCandidate(
            name=known.deployment,
            tier=TierName.NVME if node in known.on_nvme else TierName.HOST,
            nbytes=known.stored_bytes[node],
            last_use=known.tick,
            next_use=expected_use(known.next_use, known.last_use, now),
            superseded=known is incoming,
        )

    def _is_copied(self, known: _State, tiers: _Tiers, now: float) -> bool:
        kind = tiers.node_type
        if tiers.host_bytes < DRAIN_FROM * kind.host_memory_bytes:
            return False
        return now - known.last_use >= self._costs.nvme_s(kind.name, tiers.host_bytes)

    def _spill(self, known: _State, node: NodeId) -> StateResidency:
        tiers = self._nodes[node]
        nbytes = known.stored_bytes[node]
        tiers.host_bytes -= nbytes
        tiers.nvme_bytes += nbytes
        known.on_nvme.add(node)
        known.in_place = False
        return StateResidency(deployment=known.deployment, host_bytes=0, nvme_bytes=nbytes)

    def _drop(self, known: _State, node: NodeId) -> None:
        tiers = self._nodes[node]
        tiers.prefetching.pop(known.deployment, None)
        if tiers.residents.pop(known.deployment, None) is None:
            return
        nbytes = known.stored_bytes.pop(node)
        if node in known.on_nvme:
            known.on_nvme.discard(node)
            tiers.nvme_bytes -= nbytes
        else:
            tiers.host_bytes -= nbytes
