"""A slow oracle of admission and placement under the policies `isolated` and `pack`.

It reads the records of the state and shares no code with the scheduler: no queues, no bounds, no
index and no pool. It assumes what the tests generate: each node is the only one of its type, groups
lie on one node, and every waiting deployment is possible on the nodes in service.
"""

import math
from dataclasses import dataclass, field

from plexrl.ids import TenantId
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.state.records import Deployment, Job, State

HALF_LIFE_S = 7 * 24 * 3600.0
HELD_NOW_S = 3600.0
UNKNOWN_LENGTH_S = 2048.0
"""The largest power of two up to the default length of an hour."""


@dataclass
class SlowGroup:
    """A group of GPUs on one node."""

    node_type: str
    gpus: int
    shared: bool
    serial: int
    members: list[Deployment] = field(default_factory=list)


class SlowAdmission:
    """A copy of the cluster's capacity, on which waiting deployments are placed one by one."""

    def __init__(self, config: SchedulerConfig, state: State, now: float) -> None:
        self.config, self.state, self.now = config, state, now
        self.free = {node.node_type: node.gpus for node in state.nodes.values()}
        self.memory = {
            node.node_type: node.host_memory_bytes + node.nvme_bytes
            for node in state.nodes.values()
        }
        self.groups: list[SlowGroup] = []
        for group in state.groups.values():
            self.free[group.node_type] -= len(group.gpus)
            members = [state.deployments[name] for name in group.members]
            self.groups.append(
                SlowGroup(group.node_type, len(group.gpus), group.shared, group.serial, members)
            )
        self.held: dict[str, int] = {}
        for slow in self.groups:
            for member in slow.members:
                tenant = state.jobs[member.job].tenant
                self.held[tenant] = self.held.get(tenant, 0) + member.spec.workers
        self.held_before = dict(self.held)
        self.is_tied = False
        """The last digits of two tenants' shares decided, which differ from the scheduler's."""

    def run(self, waiting: list[Deployment]) -> set[str]:
        """The names of the deployments that get GPUs."""
        left = list(waiting)
        placed: set[str] = set()
        blocking: list[tuple[str, int]] = []
        while left:
            first = min(left, key=self._key)
            job = self.state.jobs[first.job]
            self.is_tied |= any(self._is_tie(job, self.state.jobs[each.job]) for each in left)
            gang = [each for each in left if each.job == first.job] if job.gang else [first]
            left = [each for each in left if each not in gang]
            if len(job.deployments) < job.gang or self._exceeds_quota(job.tenant, gang):
                continue
            if self._place_gang(gang, blocking):
                placed.update(each.deployment for each in gang)
                gpus = sum(each.spec.workers for each in gang)
                self.held[job.tenant] = self.held.get(job.tenant, 0) + gpus
            elif self.now - first.created_at >= self.config.starvation_bound_s:
                blocking += [(each.spec.node_type, each.spec.workers) for each in gang]
        return placed

    def _key(self, deployment: Deployment) -> tuple[object, ...]:
        job = self.state.jobs[deployment.job]
        waited_s = self.now - deployment.created_at
        ratio = 1.0 + waited_s / UNKNOWN_LENGTH_S
        if waited_s >= self.config.starvation_bound_s:
            ratio = math.inf
        share = self._share(job.tenant)
        return -job.priority, share, -ratio, deployment.created_at, deployment.serial

    def _is_tie(self, one: Job, other: Job) -> bool:
        if one.tenant == other.tenant or one.priority != other.priority:
            return False
        shares = self._share(one.tenant), self._share(other.tenant)
        return any(shares) and math.isclose(*shares, rel_tol=1e-9)

    def _share(self, tenant: TenantId) -> float:
        weight = self.state.tenants[tenant].weight
        gpus = self.held.get(tenant, 0)
        record = self.state.held.get(tenant)
        used = 0.0
        if record is not None:
            rate = math.log(2.0) / HALF_LIFE_S
            decay = 0.5 ** ((self.now - record.at) / HALF_LIFE_S)
            # What is placed in this pass is held from now on.
            used = record.gpu_seconds * decay
            used += self.held_before.get(tenant, 0) * (1.0 - decay) / rate
        return (used / HELD_NOW_S + gpus) / weight

    def _exceeds_quota(self, tenant: TenantId, gang: list[Deployment]) -> bool:
        most = self.state.tenants[tenant].gpus_max
        wanted = sum(each.spec.workers for each in gang)
        return most is not None and self.held.get(tenant, 0) + wanted > most

    def _place_gang(self, gang: list[Deployment], blocking: list[tuple[str, int]]) -> bool:
        free, groups = dict(self.free), [(each, list(each.members)) for each in self.groups]
        for each in sorted(gang, key=lambda d: (-d.spec.workers, d.serial)):
            if not self._place(each, blocking):
                self.free = free
                self.groups = [group for group, _ in groups]
                for group, members in groups:
                    group.members = members
                return False
        return True

    def _place(self, deployment: Deployment, blocking: list[tuple[str, int]]) -> bool:
        wanted = deployment.spec.node_type
        rivals = [gpus for kind, gpus in blocking if "" in (kind, wanted) or kind == wanted]
        if deployment.spec.workers in rivals:
            return False
        if self.config.policy == "pack" and not deployment.spec.exclusive:
            fitting = [group for group in self.groups if self._may_join(group, deployment)]
            if fitting:
                best = min(fitting, key=lambda g: (-len(g.members), -self._load(g), g.serial))
                best.members.append(deployment)
                return True
        if rivals:
            return False
        for node_type in sorted(self.free):
            if wanted in ("", node_type) and self.free[node_type] >= deployment.spec.workers:
                self.free[node_type] -= deployment.spec.workers
                serial = max([group.serial for group in self.groups], default=0) + 1
                is_shared = not deployment.spec.exclusive
                self.groups.append(
                    SlowGroup(node_type, deployment.spec.workers, is_shared, serial, [deployment])
                )
                return True
        return False

    def _may_join(self, group: SlowGroup, deployment: Deployment) -> bool:
        kept = sum(
            member.spec.state_bytes
            for other in self.groups
            if other.shared and other.node_type == group.node_type
            for member in other.members
        )
        return (
            group.shared
            and group.gpus == deployment.spec.workers
            and deployment.spec.node_type in ("", group.node_type)
            and len(group.members) < self.config.residents_max
            and kept + deployment.spec.state_bytes <= self.memory[group.node_type]
            and self._load(group) + self._duty(deployment) <= self.config.load_max + 1e-9
        )

    def _load(self, group: SlowGroup) -> float:
        """Sum of the duties that the members have reserved."""
        share = self.config.load_max / self.config.residents_max
        return math.fsum(self._duty(each) if each.demand.trace else share for each in group.members)

    def _duty(self, deployment: Deployment) -> float:
        if deployment.demand.trace is None:
            return self.config.load_max / self.config.residents_max
        busy_s = sum(segment.duration_s for segment in deployment.demand.trace.segments)
        return busy_s / deployment.demand.trace.period_s
