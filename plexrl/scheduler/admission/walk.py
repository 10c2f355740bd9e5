"""One admission pass: a walk over the waiting deployments in the order of `order`.

The rule is short: take the first deployment that is left, try to place its gang, and if that fails
and it blocks others, keep what it may need from those behind it. The walk leaves out what cannot
change the outcome: units that cannot fit by `FitBounds`, units equal to one that did not fit, and
units that ask for what is kept from others already. It ends when nothing behind it can fit. So a
backlog of any length costs a few operations on the columns of `UnitTable`, and Python only for the
units that may fit or block.

A placement may begin a group that others join, raises its tenant's share and makes other
deployments of the job partial. So the walk goes on behind it in a new order. Nothing outlasts a
pass but placements, reservations and `State.searches`.
"""

import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from plexrl.ids import DeploymentId
from plexrl.scheduler.accounting.fair_shares import tenant_share
from plexrl.scheduler.admission.fit.fit_bounds import NO_FIT, FitBounds, GroupBound
from plexrl.scheduler.admission.order import (
    AdmissionKey,
    admission_key,
    blocks_others,
    have_starved,
    waiting_ratios,
)
from plexrl.scheduler.admission.queues.gangs import (
    BlockingRequest,
    EquivalenceKey,
    allowed_modes,
    equivalence_key,
    place_all,
    why_not_yet,
)
from plexrl.scheduler.admission.queues.reservations import Reservations
from plexrl.scheduler.placement.capacity.needs import node_types_compatible
from plexrl.scheduler.placement.choice.scarcity import is_covered
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.fit.feasibility import gang_of, is_possible
from plexrl.scheduler.placement.waiting.units import Size, Sizes, size_of
from plexrl.scheduler.rules.policies import PlacementMode
from plexrl.scheduler.state.records import Deployment, Group

Rows = NDArray[np.intp]
Mask = NDArray[np.bool_]

ROWS_AT_ONCE = 1024
"""Rows of the order of which it is looked up at once whether they matter."""

Alike = tuple[int, int, int, float]
"""(tenant, sizes, priority, expected length) of units that are in the order of their creation."""


class AdmissionWalk:
    """One pass over the `newcomers`, or over all waiting deployments. It lives for one call."""

    def __init__(
        self, cluster: Cluster, now: float, newcomers: Sequence[DeploymentId] | None
    ) -> None:
        """`newcomers`: the only deployments that may be placed; None: all."""
        self._cluster, self._now = cluster, now
        self._newcomers = None if newcomers is None else dict.fromkeys(newcomers)
        self._table = cluster.queues.waiting.table
        self._bounds = FitBounds(cluster.capacity)
        self._reservations = Reservations(cluster)
        self._blocking: dict[BlockingRequest, None] = {}
        """Requests that no deployment behind them may pass."""
        self._partial: list[tuple[AdmissionKey, DeploymentId]] = []
        """Deployments of partial jobs, which come before all units: a heap."""
        self._candidates: Mask = np.zeros(self._table.is_used.size, bool)
        """Rows of the units that may fit and have not had their turn."""
        self._left = 0
        """Number of candidates."""
        self._is_passed: Mask = np.zeros(self._table.is_used.size, bool)
        """Rows of the units that came before the unit that was placed last."""
        self._placed: list[Deployment] = []
        self._shares: NDArray[np.float64] = np.full(len(self._table.tenants.values), math.nan)
        """The share of each tenant by its number; nan: not needed yet."""
        self.tried: set[DeploymentId] = set()
        """Deployments that were considered one by one."""
        self._failed: set[tuple[EquivalenceKey, ...]] = set()
        """Gangs that did not fit since the newest group began; likewise `_failed_kinds`."""
        self._failed_kinds: set[int] = set()
        self._over_quota: set[tuple[int, int]] = set()
        """(tenant, sizes) that a quota does not allow."""
        self._asked: set[Alike] = set()
        """Units of which the first possible one was asked whether it blocks others. Those behind it
        have waited less."""
        self._covered: dict[int, bool] = {}
        """What `_is_covered` has found, by the number of the sizes."""
        self._gang_searches = 0
        """Number of gangs whose search failed."""

    def run(self) -> list[Deployment]:
        """Place what can be placed; returns it in the order of admission."""
        if self._newcomers is None:
            self._cluster.state.searches.clear()
        self._add_candidates(self._asked_for())
        partial = sorted(self._cluster.queues.waiting.of_partial_jobs)
        if self._left or any(self._is_asked_for(name) for name in partial):
            for name in partial:
                self._push_partial(name)
        rows = self._order()
        while True:
            if self._partial:
                is_placed = self._consider_partial()
            else:
                row = next(rows, None)
                if row is None:
                    return self._placed
                is_placed = self._consider(row)
            if is_placed:
                rows = self._order()

    def _asked_for(self) -> Rows:
        """The rows of units that may be placed in this pass."""
        table, waiting = self._table, self._cluster.queues.waiting
        if self._newcomers is None:
            return np.flatnonzero(table.is_used)
        units = [waiting.unit_of(name) for name in self._newcomers if name in waiting]
        heads = {unit.head.name: None for unit in units if unit is not None}
        return np.array([table.row(name) for name in heads], np.intp)

    def _add_candidates(self, rows: Rows) -> None:
        """Make candidates of the units that may fit and have not had their turn."""
        self._candidates[rows] = ~self._is_passed[rows]
        self._drop_candidates()

    def _drop_candidates(self) -> None:
        """Drop the candidates that cannot fit any more."""
        rows = np.flatnonzero(self._candidates & self._table.is_used)
        if not rows.size:
            self._left = 0
            return
        may_fit = self._may_fit(rows)
        self._candidates[rows] = may_fit
        self._left = int(may_fit.sum())

    def _may_fit(self, rows: Rows) -> Mask:
        """Whether units may fit, given what blocks and the searches so far."""
        table, bounds = self._table, self._bounds
        numbers, count = table.sizes[rows], len(table.all_sizes.values)
        free_bytes, late_bytes = np.full(count, NO_FIT), np.full(count, NO_FIT)
        late_from = np.full(count, math.inf)
        groups: list[tuple[int, Size, GroupBound]] = []
        for number in np.flatnonzero(np.bincount(numbers, minlength=count)).tolist():
            sizes = table.all_sizes.values[number]
            assert sizes is not None, "its number is in use"
            takes_free = self._takes_free(sizes)
            if takes_free is None:
                continue
            late_from[number] = self._late_from(sizes)
            if len(sizes) > 1:
                if bounds.gang_may_fit(sizes, takes_free):
                    free_bytes[number] = 0
                is_any_late = late_from[number] < math.inf
                if is_any_late and bounds.gang_may_fit(sizes, (False,) * len(sizes)):
                    late_bytes[number] = 0
                continue
            if takes_free[0]:
                free_bytes[number] = bounds.free_state_bytes(sizes[0])
            found = bounds.groups(sizes[0])
            if found is not None:
                groups.append((number, sizes[0], found))
        is_late = self._now + table.expected_s[rows] > late_from[numbers]
        free = np.where(is_late, late_bytes[numbers], free_bytes[numbers])
        may_fit: Mask = free >= table.state_bytes[rows]
        for number, size, bound in groups:
            at = np.flatnonzero((numbers == number) & ~may_fit)
            some = rows[at]
            joins = bound.may_join(table.duty[some], table.state_bytes[some])
            may_fit[at] = joins & np.where(
                table.has_profile[some], self._may_search(size), self._join_unprofiled(some)
            )
        return may_fit

    def _takes_free(self, sizes: Sizes) -> tuple[bool, ...] | None:
        """Which deployments of a unit may take free GPUs; None: the unit cannot fit."""
        if len(sizes) > 1 and self._gang_searches >= self._cluster.settings.config.searches_max:
            return None
        found = [True] * len(sizes)
        for kind, workers in self._blocking:
            for at, size in enumerate(sizes):
                if node_types_compatible(kind, size.node_type):
                    if workers == size.workers:
                        return None
                    found[at] = False
        return tuple(found)

    def _late_from(self, sizes: Sizes) -> float:
        """A unit that ends later may not take free GPUs, which a reservation needs."""
        if self._cluster.queues.waiting.displaced:
            # The others last at least as long as their declared length, rounded down.
            return math.inf
        coming = self._reservations.coming
        return min((each.at for each in coming if not each.is_kept_beside(sizes)), default=math.inf)

    def _may_search(self, size: Size) -> bool:
        """Whether the groups' time may be searched for one more deployment of this size."""
        searches = self._cluster.state.searches.get(size_key(size), 0)
        return searches < self._cluster.settings.config.searches_max

    def _join_unprofiled(self, rows: Rows) -> Mask:
        """Whether these may join a group without a profile."""
        config, policy = self._cluster.settings.config, self._cluster.settings.policy
        is_over = self._table.created_at[rows] + config.cold_start_patience_s <= self._now
        may, may_later = (
            policy.modes(has_profile=False, is_patience_over=over, is_scarce=False)
            != (PlacementMode.DEDICATED,)
            for over in (False, True)
        )
        return np.where(is_over, may_later, may)

    def _order(self) -> Iterator[int]:
        """The rows of candidates, and of units that may block others, in their order up to the last
        candidate. A priority class is sorted when the walk comes to it."""
        table = self._table
        relevant = self._candidates | (self._may_block() & ~self._is_passed)
        rows = np.flatnonzero(table.is_used & relevant)
        while rows.size and self._left:
            priority = table.priority[rows]
            is_first = priority == priority.max()
            # What does not matter now will not matter later: a sort of the rest takes less time.
            of_class = rows[is_first]
            ordered = self._sort(of_class[self._do_matter(of_class)])
            for begin in range(0, ordered.size, ROWS_AT_ONCE):
                some = ordered[begin : begin + ROWS_AT_ONCE]
                for row in some[self._do_matter(some)].tolist():
                    if not self._left:
                        return
                    yield row
            rows = rows[~is_first]

    def _do_matter(self, rows: Rows) -> Mask:
        """Whether units may fit, or ask for what is not kept from others already."""
        numbers, is_candidate = self._table.sizes[rows], self._candidates[rows]
        is_covered = np.zeros(len(self._table.all_sizes.values), bool)
        is_asked = np.bincount(numbers[~is_candidate], minlength=is_covered.size) > 0
        for number in is_asked.nonzero()[0].tolist():
            is_covered[number] = self._is_covered(number)
        matter: Mask = is_candidate | ~is_covered[numbers]
        return matter

    def _may_block(self) -> Mask:
        created_at = self._table.created_at
        if not self._cluster.settings.policy.backfills:
            return np.ones(created_at.size, bool)
        return have_starved(self._cluster.settings, created_at, self._now)

    def _sort(self, rows: Rows) -> Rows:
        """Rows of one priority class in their order."""
        table = self._table
        order = np.lexsort(
            (table.serial[rows], table.created_at[rows], -self._ratios(rows), self._shares_of(rows))
        )
        return rows[order]

    def _pass_by(self, key: AdmissionKey) -> None:
        """Units with a lower key have had their turn."""
        table, (_, priority_negated, *others) = self._table, key
        self._is_passed |= -table.priority < priority_negated
        rows = np.flatnonzero(table.is_used & (-table.priority == priority_negated))
        columns = (
            self._shares_of(rows),
            -self._ratios(rows),
            table.created_at[rows],
            table.serial[rows],
        )
        is_before, is_equal = np.zeros(rows.size, bool), np.ones(rows.size, bool)
        for column, bound in zip(columns, others, strict=True):
            is_before |= is_equal & (column < bound)
            is_equal &= column == bound
        self._is_passed[rows] |= is_before

    def _ratios(self, rows: Rows) -> NDArray[np.float64]:
        created_at, expected_s = self._table.created_at[rows], self._table.expected_s[rows]
        return waiting_ratios(self._cluster.settings, created_at, expected_s, self._now)

    def _shares_of(self, rows: Rows) -> NDArray[np.float64]:
        numbers, shares = self._table.tenant[rows], self._shares
        if np.isnan(shares[numbers]).any():
            is_needed = np.bincount(numbers, minlength=shares.size) > 0
            for number in np.flatnonzero(is_needed & np.isnan(shares)).tolist():
                tenant = self._table.tenants.values[number]
                assert tenant is not None, "its number is in use"
                shares[number] = tenant_share(self._cluster.holdings, tenant, self._now)
        found: NDArray[np.float64] = shares[numbers]
        return found

    def _key(self, deployment: Deployment) -> AdmissionKey:
        cluster = self._cluster
        tenant = cluster.state.job(deployment.job).tenant
        share = tenant_share(cluster.holdings, tenant, self._now)
        return admission_key(cluster, deployment, share, self._now)

    def _consider(self, row: int) -> bool:
        """Try to place a unit, or let it block those behind it; returns whether it was placed."""
        table, cluster = self._table, self._cluster
        kind, sizes = int(table.kind[row]), int(table.sizes[row])
        is_candidate = bool(self._candidates[row])
        if is_candidate:
            self._candidates[row] = False
            self._left -= 1
        of_tenant = int(table.tenant[row]), sizes
        is_tried = is_candidate and kind not in self._failed_kinds
        alike = (*of_tenant, int(table.priority[row]), float(table.expected_s[row]))
        if of_tenant in self._over_quota:
            return False
        if not is_tried and (alike in self._asked or self._is_covered(sizes)):
            return False
        unit = table.units[row]
        assert unit is not None, "placements end the iteration"
        deployment = cluster.state.deployment(unit.head.name)
        if why_not_yet(cluster, deployment) is not None:
            self._over_quota.add(of_tenant)
            return False
        gang = gang_of(cluster.queues, deployment)
        if is_tried:
            key = self._key(deployment)
            if self._place(gang):
                # By the shares before the placement.
                self._pass_by(key)
                self._note_placed(gang)
                return True
            self._failed_kinds.add(kind)
        if is_possible(cluster, deployment):
            self._asked.add(alike)
            self._block(gang, deployment)
        return False

    def _is_covered(self, number: int) -> bool:
        """Whether units of the sizes with this number ask for what is kept from others already."""
        known = self._covered.get(number)
        if known is None:
            sizes = self._table.all_sizes.values[number]
            assert sizes is not None, "its number is in use"
            types = [size.node_type for size in sizes]
            known = is_covered(sizes, self._blocking) or self._reservations.cover(types)
            self._covered[number] = known
        return known

    def _block(self, gang: Sequence[Deployment], deployment: Deployment) -> None:
        """If the gang blocks others, reserve its GPUs or keep free GPUs for it."""
        cluster, now = self._cluster, self._now
        if self._reservations.cover([each.spec.node_type for each in gang]):
            return
        if not blocks_others(cluster, deployment, now):
            return
        if not self._reservations.add(deployment, now):
            self._blocking.update(dict.fromkeys([(d.spec.node_type, d.spec.workers) for d in gang]))
        self._covered.clear()
        self._drop_candidates()

    def _place(self, gang: list[Deployment]) -> bool:
        cluster, now = self._cluster, self._now
        self.tried.update([each.deployment for each in gang])
        allowed = allowed_modes(cluster, gang, self._blocking, now)
        job = cluster.state.job(gang[0].job)
        late = self._reservations.count_passed(job, now)
        keys = tuple([equivalence_key(d, job, allowed[d.deployment], passes=late) for d in gang])
        if keys in self._failed or any((key,) in self._failed for key in keys):
            return False
        if place_all(cluster, gang, allowed, self._reservations.coming, now):
            return True
        self._failed.add(keys)
        self._note_failed_search(gang, allowed[gang[0].deployment])
        return False

    def _note_placed(self, gang: Sequence[Deployment]) -> None:
        cluster = self._cluster
        self._placed += gang
        self._bounds.invalidate()
        job = cluster.state.job(gang[0].job)
        number = self._table.tenants.number(job.tenant)
        if number is not None:
            self._shares[number] = tenant_share(cluster.holdings, job.tenant, self._now)
        groups = [group for each in gang for group in cluster.state.groups_of(each)]
        names = {each.deployment for each in gang}
        new = {len(group.gpus) for group in groups if _is_new(group, names)}
        if new and cluster.settings.anybody_shares:
            self._failed.clear()
            self._failed_kinds.clear()
            may_join = [
                sizes is not None and any(size.shares and size.workers in new for size in sizes)
                for sizes in self._table.all_sizes.values
            ]
            rows = self._asked_for()
            rows = rows[np.array(may_join, bool)[self._table.sizes[rows]]]
        else:
            rows = np.zeros(0, np.intp)
        self._add_candidates(rows)
        for name in job.deployments:
            if name in cluster.queues.waiting and name not in self.tried:
                self._push_partial(name)

    def _note_failed_search(
        self, gang: Sequence[Deployment], allowed: tuple[PlacementMode, ...]
    ) -> None:
        if len(gang) > 1:
            self._gang_searches += 1
        else:
            size, searches = size_of(gang[0]), self._cluster.state.searches
            if PlacementMode.DEDICATED in allowed and gang[0].demand.memory is None:
                # With a known need a smaller state may need more of a GPU than a larger one.
                self._bounds.note_refusal(size, gang[0].spec.state_bytes)
            if gang[0].demand.trace is not None:
                searches[size_key(size)] = searches.get(size_key(size), 0) + 1
        self._drop_candidates()

    def _push_partial(self, name: DeploymentId) -> None:
        """Put a deployment of a partial job before all units, if it may be placed or may block
        others."""
        deployment = self._cluster.state.deployment(name)
        if self._is_asked_for(name) or blocks_others(self._cluster, deployment, self._now):
            heapq.heappush(self._partial, (self._key(deployment), name))

    def _is_asked_for(self, name: DeploymentId) -> bool:
        return self._newcomers is None or name in self._newcomers

    def _consider_partial(self) -> bool:
        """As `_consider`, for the first deployment of a partial job."""
        cluster = self._cluster
        key, name = heapq.heappop(self._partial)
        if name not in cluster.queues.waiting or name in self.tried:
            return False
        deployment = cluster.state.deployment(name)
        key_now = self._key(deployment)
        if key_now > key:
            # Placements have raised the tenant's share.
            heapq.heappush(self._partial, (key_now, name))
            return False
        gang = gang_of(cluster.queues, deployment)
        self.tried.update([each.deployment for each in gang])
        if why_not_yet(cluster, deployment) is not None:
            return False
        is_asked_for = any(self._is_asked_for(each.deployment) for each in gang)
        if is_asked_for and self._may_try_partial(gang) and self._place(gang):
            self._note_placed(gang)
            return True
        self._block(gang, deployment)
        return False

    def _may_try_partial(self, gang: Sequence[Deployment]) -> bool:
        if len(gang) > 1 or gang[0].demand.trace is None or self._may_search(size_of(gang[0])):
            return True
        return gang[0].spec.state_bytes <= self._bounds.free_state_bytes(size_of(gang[0]))


def _is_new(group: Group, placed: set[DeploymentId]) -> bool:
    """Whether others may join the group, and only deployments that were placed now are in it."""
    return group.shared and placed.issuperset(group.members)


def size_key(size: Size) -> str:
    """The key of `State.searches` for deployments of this size."""
    return f"{size.node_type}/{size.workers}"
