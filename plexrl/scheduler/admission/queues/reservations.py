"""Reservations of starving jobs: others may run meanwhile, if that delays no reservation.

The first deployment of the order that starves, and its gang, has a reservation: the time at which
enough GPUs are free if all running jobs end as expected (`expected_ends`; EASY backfilling, Lifka
1995). A job behind it may take GPUs if its own expected end is no later, or if the gang has its
GPUs at that time nevertheless. Of those that can use no common node type each first one has a
reservation.

Running jobs may last longer than expected. A reservation whose time comes without the GPUs is
renewed, `RENEWALS_MAX` times. After that no job behind takes GPUs that the gang might get, until
the gang has its own: so no job starves because expected lengths are wrong.
"""

from collections.abc import Collection, Iterable, Sequence

from plexrl.ids import DeploymentId
from plexrl.scheduler.admission.fit.fit_bounds import free_gpus_needed
from plexrl.scheduler.admission.queues.expected_ends import expected_end
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.needs import node_types_compatible
from plexrl.scheduler.placement.capacity.node_pool import NodeKind
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.fit.feasibility import fit_as_placed, gang_of
from plexrl.scheduler.placement.waiting.units import Size
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.state.records import Deployment, Group, Job, ReservedStart

RENEWALS_MAX = 8
"""Jobs of shared groups last a little longer than alone, so few renewals suffice."""


class ReservedCapacity:
    """What is free at the time of a reservation. It lives for one pass."""

    def __init__(self, cluster: Cluster, name: DeploymentId, now: float) -> None:
        self._cluster = cluster
        self._gang = gang_of(cluster.queues, cluster.state.deployment(name))
        self.at = cluster.state.reservations[name].at
        self._free = dict(cluster.capacity.inventory.in_service())
        for ends_at, group in _ends(cluster, now):
            if ends_at > self.at:
                _subtract(cluster.capacity, self._free, group)
        self._is_kept_beside: dict[int, bool] = {}

    def is_kept_beside(self, sizes: Sequence[Size]) -> bool:
        """Whether the gang has its GPUs in time although deployments of these sizes, which end
        later, take free GPUs now. In doubt True: `left_after` is exact."""
        # Each that shares with nobody takes GPUs of some kind. Those that share may all be on GPUs
        # of others, or of one of them.
        divides = self._cluster.settings.divides_groups
        alone = [size.workers for size in sizes if not size.shares]
        least = [free_gpus_needed(size, sizes, divides=divides) for size in sizes]
        gpus = max(alone) if alone else min(least)
        found = self._is_kept_beside.get(gpus)
        if found is None:
            found = self._is_kept_beside[gpus] = self._is_kept_without(gpus)
        return found

    def left_after(
        self, gang: Sequence[Deployment], ends_at: float, now: float
    ) -> dict[NodeKind, int] | None:
        """What is free at the time if a gang that was placed now ends at `ends_at`; None: the
        reservation would be delayed."""
        if ends_at <= self.at:
            return self._free
        cluster, left = self._cluster, dict(self._free)
        names = {each.deployment for each in gang}
        for name in {group: None for each in gang for group in each.placement.groups}:
            group = cluster.state.groups[name]
            if _end_of(cluster, group, now, without=names) <= self.at:
                _subtract(cluster.capacity, left, group)
        is_kept = left == self._free or fit_as_placed(cluster.capacity, left, self._gang)
        return left if is_kept else None

    def count(self, left: dict[NodeKind, int]) -> None:
        """Keep what `left_after` returned, because the gang keeps its place."""
        if left != self._free:
            self._free = left
            self._is_kept_beside.clear()

    def _is_kept_without(self, gpus: int) -> bool:
        """Whether the gang has its GPUs in time without so many free GPUs of some kind."""
        for kind, free in self._free.items():
            if free >= gpus:
                left = {**self._free, kind: free - gpus}
                if fit_as_placed(self._cluster.capacity, left, self._gang):
                    return True
        return False


class Reservations:
    """The reservations of one admission pass."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._gangs: list[list[Deployment]] = []
        """The gangs of the first deployments that starve."""
        self.coming: list[ReservedCapacity] = []
        """The reservations whose time is still to come."""
        settings = cluster.settings
        self._is_on = settings.config.reservations and settings.policy.backfills

    def add(self, deployment: Deployment, now: float) -> bool:
        """Give the first deployment that starves a reservation; False: it has none to come, so that
        its requests have to block others."""
        if not self._is_on:
            return False
        self._gangs.append(gang_of(self._cluster.queues, deployment))
        if not reserve(self._cluster, deployment, now):
            return False
        self.coming.append(ReservedCapacity(self._cluster, deployment.deployment, now))
        return True

    def cover(self, node_types: Sequence[str]) -> bool:
        """Whether a deployment ahead that starves may want GPUs of these node types."""
        return any(is_rival_of(gang, node_types) for gang in self._gangs)

    def count_passed(self, job: Job, now: float) -> int:
        """Number of reservations by whose time the job would not have ended."""
        ends_at = expected_end(self._cluster.state, job, now)
        return len([each for each in self.coming if ends_at > each.at])


def reserve(cluster: Cluster, deployment: Deployment, now: float) -> bool:
    """Give the first deployment that starves a reservation, unless it has one that is to come;
    False: it has had too many, or its time is now."""
    reservations, name = cluster.state.reservations, deployment.deployment
    known = reservations.get(name)
    if known is not None and (now < known.at or known.renewals >= RENEWALS_MAX):
        return now < known.at
    at = earliest_start(cluster.capacity, gang_of(cluster.queues, deployment), now)
    if known is None:
        reservations[name] = ReservedStart(at=at)
    elif at > now:
        known.at = at
        known.renewals += 1
    return now < at


def is_rival_of(gang: Sequence[Deployment], node_types: Iterable[str]) -> bool:
    """Whether deployments of these node types may want GPUs of the gang's node types."""
    for wanted in node_types:
        for each in gang:
            if node_types_compatible(each.spec.node_type, wanted):
                return True
    return False


def earliest_start(capacity: Capacity, gang: Sequence[Deployment], now: float) -> float:
    """When the gang has GPUs by expected lengths; now if the nodes in service never have enough."""
    ends = _ends(capacity, now)
    free = dict(capacity.inventory.in_service())
    for _, group in ends:
        _subtract(capacity, free, group)
    low, high = 0, len(ends) + 1
    while low < high:
        middle = (low + high) // 2
        left = dict(free)
        for _, group in ends[:middle]:
            _subtract(capacity, left, group, -1)
        if fit_as_placed(capacity, left, gang):
            high = middle
        else:
            low = middle + 1
    return ends[low - 1][0] if 0 < low <= len(ends) else now


def _ends(situation: Situation, now: float) -> list[tuple[float, Group]]:
    """The groups and their expected ends, earliest first."""
    ends = [(_end_of(situation, group, now), group) for group in situation.state.groups.values()]
    ends.sort(key=lambda each: (each[0], each[1].serial))
    return ends


def _end_of(
    situation: Situation, group: Group, now: float, without: Collection[DeploymentId] = ()
) -> float:
    """When the last member of a group ends; now if it has none."""
    state, latest = situation.state, now
    for name in group.members:
        if name not in without:
            latest = max(latest, expected_end(state, state.job(state.deployment(name).job), now))
    return latest


def _subtract(capacity: Capacity, free: dict[NodeKind, int], group: Group, sign: int = 1) -> None:
    for kind, gpus in capacity.inventory.gpus_in_service(group).items():
        free[kind] -= sign * gpus
