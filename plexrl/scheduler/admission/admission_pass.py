"""One admission pass: considers waiting deployments in the order of `order`, and places them.

A pass skips most waiting deployments. It considers the head of a queue, and the next one once the
head is placed. In an index of heads it considers only those that may fit, one after the other
(`queues.waiting`). A priority class stays closed until it is reached, then each of its owners, then
all queues of one owner with the same sizes: what is not reached costs little. If deployments must
not be passed, the first of each group of equal blocking requests stands for all of them.

A pass may be interrupted after any number of steps and continued in a later event. The order is
that of its beginning. Deployments that left the queues meanwhile are skipped; capacity that became
free meanwhile is the cause of another pass. What decides is the state and `PassProgress`, which a
snapshot holds: so no step may depend on the order of a set, or on that of a table of the queues.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.admission.fair_shares import tenant_share
from plexrl.scheduler.admission.fit.bound import NO_FIT, FitBound
from plexrl.scheduler.admission.fit.bound_cache import FitBoundCache
from plexrl.scheduler.admission.fit.feasibility import gang_of, is_possible
from plexrl.scheduler.admission.order import AdmissionKey, admission_key, blocks_others, earliest
from plexrl.scheduler.admission.queues.gangs import (
    allowed_modes,
    equivalence_key,
    place_all,
    why_not_yet,
)
from plexrl.scheduler.admission.queues.pass_entries import (
    OWNERS_AT_ONCE,
    SEARCH_STEPS,
    UNKNOWN,
    Closed,
    Entry,
    IndexId,
    OwnerEntry,
    PriorityClass,
    index_of,
    size_key,
)
from plexrl.scheduler.admission.queues.pass_progress import PassProgress
from plexrl.scheduler.admission.queues.queue_heads import Head
from plexrl.scheduler.admission.queues.reservations import Reservations
from plexrl.scheduler.admission.queues.waiting import Owner, Size, Sizes, size_of
from plexrl.scheduler.admission.scarcity import is_covered, is_rival, may_join
from plexrl.scheduler.context.cluster import Cluster
from plexrl.scheduler.placement.capacity.needs import node_types_compatible
from plexrl.scheduler.placement.placement import modes
from plexrl.scheduler.placement.policies import PlacementMode
from plexrl.scheduler.state.records import Deployment

if TYPE_CHECKING:
    from plexrl.scheduler.admission.queues.waiting import Queue


class AdmissionPass:
    """Goes on with a pass, whose state is `progress`: a snapshot holds that, and nothing else."""

    def __init__(self, cluster: Cluster, progress: PassProgress) -> None:
        self._cluster = cluster
        self.progress = progress
        self._now = progress.began_at
        self._bounds = FitBoundCache(cluster, progress.refused)
        self._placed: list[Deployment] = []
        self._placed_at, self._steps = progress.began_at, 0
        self._reservations = Reservations(cluster, progress.reserved)

    @classmethod
    def begin(
        cls,
        cluster: Cluster,
        now: float,
        newcomers: Sequence[DeploymentId] | None,
        *,
        has_begun_again: bool = False,
    ) -> "AdmissionPass":
        """A new pass over the `newcomers`; None: over all. `has_begun_again`: it replaces an
        interrupted one."""
        if newcomers is None:
            cluster.state.searches.clear()
        some = None if newcomers is None else dict.fromkeys(newcomers)
        progress = PassProgress(began_at=now, newcomers=some, has_begun_again=has_begun_again)
        return cls(cluster, progress)

    def run(self, now: float, steps_max: int | None = None) -> list[Deployment]:
        """Go on for about `steps_max` steps, or until `is_over`; returns what it placed."""
        waiting = self._cluster.waiting
        self._placed, self._placed_at, self._steps = [], now, 0
        self._reservations.resume(now)
        if not self.progress.has_begun:
            self.progress.has_begun = True
            self._fill_heap()
        else:
            # A restored pass has no bounds yet, and must find those that this one finds.
            self._bounds.invalidate()
            if waiting.has_changed:
                self.progress.shares.clear()
                self.progress.candidates = UNKNOWN
        while self.progress.candidates > 0 and self.progress.heap:
            if steps_max is not None and self._steps >= steps_max:
                waiting.has_changed = False
                return self._placed
            self._steps += 1
            key, number = heapq.heappop(self.progress.heap)
            entry, is_candidate = self.progress.entries[number]
            if isinstance(entry, str) and entry not in waiting:
                self.progress.candidates -= is_candidate
                self._skip_departed(entry)
                continue
            key_now = self._key_of(entry)
            if key_now > key:
                # Deployments placed in this pass have raised the tenant's share.
                heapq.heappush(self.progress.heap, (key_now, number))
                continue
            if isinstance(entry, PriorityClass):
                self._open_class(entry)
            elif isinstance(entry, OwnerEntry):
                self._open_owner(entry.owner)
            elif isinstance(entry, Closed):
                self._open(entry.is_blocking, entry.sizes, entry.owner)
            else:
                self.progress.candidates -= is_candidate
                if entry not in self.progress.seen:
                    self.progress.reached = key
                    self._consider(entry)
        self.progress.is_over = True
        return self._placed

    def _skip_departed(self, name: DeploymentId) -> None:
        """Go on behind a deployment that left the queues while the pass was interrupted."""
        if name in self.progress.heads and name not in self.progress.seen:
            self._push_next_head(self.progress.heads.pop(name)[0])
        if name in self.progress.blockers and name not in self.progress.seen:
            self._push_next_blocker(*self.progress.blockers.pop(name))

    def _consider(self, name: DeploymentId) -> None:
        cluster = self._cluster
        head, blocker = self.progress.heads.pop(name, None), self.progress.blockers.pop(name, None)
        if head is not None:
            self.progress.passed[head[0]] = head[1]
            if not self._may_fit(*head):
                # The capacity is reserved for deployments ahead, or gone.
                self._push_next_head(head[0])
                head = None
                if blocker is None:
                    return
        deployment = cluster.state.deployment(name)
        is_placed = self._try_to_place(deployment, is_tried=head is not None)
        if head is not None and (is_placed or why_not_yet(cluster, deployment) is None):
            self._push_next_head(head[0])
        if is_placed and blocker is not None:
            self._push_next_blocker(*blocker)

    def _fill_heap(self) -> None:
        waiting = self._cluster.waiting
        self._steps += len(waiting.heads)
        sizes: set[Size] = set()
        """Sizes that may fit."""
        if self.progress.newcomers is None:
            for each, owners in waiting.heads.items():
                if not self._bounds.of_unit(each).is_empty:
                    sizes.update(each)
                    self.progress.unopened[each] = len(owners)
                    self.progress.candidates += len(owners)
            for name in sorted(waiting.of_partial_jobs):
                self._push(name)
        else:
            for name in self.progress.newcomers:
                unit = waiting.unit_of(name)
                if unit is None:
                    if name in waiting.of_partial_jobs:
                        self._push(name)
                        sizes.add(size_of(self._cluster.state.deployment(name)))
                elif self._may_fit(index_of(unit), unit.head):
                    self._push(unit.head.name)
                    sizes.update(unit.sizes)
            for name in sorted(waiting.of_partial_jobs) if self.progress.candidates else ():
                if blocks_others(self._cluster, self._cluster.state.deployment(name), self._now):
                    self._push(name, is_candidate=False)
        if not self.progress.candidates:
            return
        # A blocking request keeps others from groups of its size, and from free GPUs; a reservation
        # also keeps them from groups that end before it.
        any_free = self._cluster.settings.config.reservations or any(
            self._bounds.of(size).free_state_bytes != NO_FIT for size in sizes
        )
        if any_free or waiting.of_partial_jobs:
            self.progress.blocking_sizes = None
        else:
            self.progress.blocking_sizes = {
                each: None
                for each in waiting.blocking_requests
                if any(is_rival(size, sizes) for size in each)
            }
        for priority in sorted(waiting.blocking_sizes.priorities):
            self._push(PriorityClass(priority), is_candidate=False)

    def _first_blocking(self, queues: "Mapping[float, Queue]") -> tuple[float, float, int] | None:
        """The last three criteria of the lowest key of those that have waited long enough, whether
        or not they could ever get GPUs."""
        firsts = [(expected_s, queue[0][:2]) for expected_s, queue in queues.items()]
        first = earliest(self._cluster.settings, firsts, self._now)
        if first is None or not self._cluster.settings.policy.backfills or first[0] == -math.inf:
            return first
        return None

    def _push(
        self,
        entry: Entry,
        *,
        is_candidate: bool = True,
    ) -> None:
        heapq.heappush(self.progress.heap, (self._key_of(entry), len(self.progress.entries)))
        self.progress.entries.append((entry, is_candidate))
        self.progress.candidates += is_candidate

    def _key_of(self, entry: Entry) -> AdmissionKey:
        """The key of a deployment; for what is closed, the lowest possible key."""
        if isinstance(entry, PriorityClass):
            return True, -entry.priority, -math.inf, -math.inf, -math.inf, 0
        if isinstance(entry, OwnerEntry):
            tenant, priority = entry.owner
            share = self._share(tenant)
            return True, -priority, share, -math.inf, -math.inf, 0
        if isinstance(entry, Closed):
            tenant, priority = entry.owner
            return True, -priority, self._share(tenant), *entry.first
        deployment = self._cluster.state.deployment(entry)
        share = self._share(self._cluster.state.job(deployment.job).tenant)
        return admission_key(
            self._cluster.state, self._cluster.settings, deployment, share, self._now
        )

    def _share(self, tenant: TenantId) -> float:
        share = self.progress.shares.get(tenant)
        if share is None:
            share = self.progress.shares[tenant] = tenant_share(self._cluster, tenant, self._now)
        return share

    def _open_class(self, reached: PriorityClass) -> None:
        # Whoever has a head has a request, which may block others once it has waited long enough.
        known = self._cluster.waiting.blocking_sizes.priorities.get(reached.priority, {})
        owners = self.progress.unopened_owners.pop(reached.priority, None)
        owners = owners or sorted(known, reverse=True)
        for _ in range(min(OWNERS_AT_ONCE, len(owners))):
            self._push(OwnerEntry(owners.pop()), is_candidate=False)
            self._steps += 1
        if owners:
            # The next entry of the heap again, so that the pass may be interrupted here.
            self.progress.unopened_owners[reached.priority] = owners
            self._push(reached, is_candidate=False)

    def _closed_sizes(self, owner: Owner) -> list[tuple[bool, Sizes]]:
        """(is blocking, sizes) of the owner's closed queues that matter in this pass."""
        waiting, blocking = self._cluster.waiting, self.progress.blocking_sizes
        unopened = self.progress.unopened
        heads = [each for each in sorted(waiting.head_sizes.of(owner)) if each in unopened]
        requests = sorted(waiting.blocking_sizes.of(owner))
        if blocking is not None:
            requests = [each for each in requests if each in blocking]
        return [(False, each) for each in heads] + [(True, each) for each in requests]

    def _open_owner(self, owner: Owner) -> None:
        waiting = self._cluster.waiting
        closed = self._closed_sizes(owner)
        self._steps += len(closed)
        for is_blocking, sizes in closed:
            if is_blocking and self._is_covered(sizes):
                continue
            if is_blocking:
                requests = waiting.blocking_requests.get(sizes, {}).get(owner, {})
                first = self._first_blocking(requests)
            elif sizes in self.progress.full or self._mark_if_full(sizes):
                self.progress.unopened[sizes] -= 1
                self.progress.skipped.setdefault(sizes, []).append(owner)
                continue
            else:
                indexes = waiting.heads.get(sizes, {}).get(owner, {})
                firsts = [(key.expected_s, index.least) for key, index in indexes.items()]
                first = earliest(self._cluster.settings, firsts, self._now)
            if first is not None:
                self._push(Closed(is_blocking, sizes, owner, first), is_candidate=False)

    def _open(self, is_blocking: bool, sizes: Sizes, owner: Owner) -> None:
        if is_blocking:
            self._push_next_blocker(sizes, owner)
            return
        is_full = sizes in self.progress.full or self._mark_if_full(sizes)
        self.progress.unopened[sizes] -= 1
        if is_full:
            self.progress.skipped.setdefault(sizes, []).append(owner)
            return
        self.progress.candidates -= 1
        for key in sorted(self._cluster.waiting.heads.get(sizes, {}).get(owner, ())):
            self._push_next_head(IndexId(sizes, owner, key))

    def _mark_if_full(self, sizes: Sizes) -> bool:
        """Whether no deployment of these sizes waits or may fit; if so, mark the sizes as full."""
        least = self._cluster.waiting.least_demand(sizes)
        may_fit = least is not None and self._bounds.of_unit(sizes).may_fit(*least)
        if may_fit and not self._is_blocked(sizes):
            return False
        self.progress.full[sizes] = None
        self.progress.candidates -= self.progress.unopened[sizes]
        return True

    def _is_blocked(self, sizes: Sizes) -> bool:
        """Whether a blocking request ahead asks for the same GPUs as these sizes."""
        return bool(self.progress.blocking) and any(
            size.workers == workers and node_types_compatible(kind, size.node_type)
            for kind, workers in self.progress.blocking
            for size in sizes
        )

    def _push_next_head(self, where: IndexId) -> None:
        """Push the next head of an index that may fit."""
        sizes, owner, key = where
        index = self._cluster.waiting.heads.get(sizes, {}).get(owner, {}).get(key)
        bound = self._bound(where)
        if index is None or bound is None:
            return
        head = index.first(bound, self.progress.passed.get(where))
        while head is not None and not self._is_next(where, head):
            self._steps += 1
            head = index.first(bound, head)
        if head is None:
            self.progress.exhausted[where] = None
        else:
            self.progress.heads[head.name] = where, head
            self._push(head.name)

    def _is_next(self, where: IndexId, head: Head) -> bool:
        """Whether a head may fit and has not been reached yet."""
        if head.name in self.progress.seen or not self._may_fit(where, head):
            return False
        return self.progress.reached is None or self._key_of(head.name) > self.progress.reached

    def _reopen(self, node_type: str, workers: int) -> None:
        """Consider queues again that were full, because there is a new group to join."""
        for sizes in [each for each in self.progress.full if may_join(each, node_type, workers)]:
            del self.progress.full[sizes]
            self.progress.candidates += self.progress.unopened[sizes]
            for owner in self.progress.skipped.pop(sizes, ()):
                for key in sorted(self._cluster.waiting.heads.get(sizes, {}).get(owner, ())):
                    self._push_next_head(IndexId(sizes, owner, key))
        exhausted = self.progress.exhausted
        for where in [each for each in exhausted if may_join(each.sizes, node_type, workers)]:
            del exhausted[where]
            self._push_next_head(where)

    def _bound(self, where: IndexId) -> FitBound | None:
        """The fit bound of an index, given the blocking requests and the searches so far; None:
        nothing fits."""
        sizes, searches_max = where.sizes, self._cluster.settings.config.searches_max
        if len(sizes) > 1 and self.progress.gang_searches >= searches_max:
            return None
        takes_free = [True] * len(sizes)
        for kind, workers in self.progress.blocking:
            for at, size in enumerate(sizes):
                if node_types_compatible(kind, size.node_type):
                    if workers == size.workers:
                        return None
                    takes_free[at] = False
        # All units of an index last at least so long, except those that have had GPUs before.
        is_least = not self._cluster.waiting.displaced
        for each in self._reservations.coming if is_least else ():
            if self._now + where.key.expected_s > each.at and not each.is_kept_beside(sizes):
                takes_free = [False] * len(sizes)
        if len(sizes) > 1:
            return self._bounds.of_gang(sizes, tuple(takes_free))
        searches = self._cluster.state.searches.get(size_key(sizes[0]), 0)
        joins = not where.key.has_profile or searches < searches_max
        return self._bounds.of(sizes[0], takes_free=takes_free[0], joins=joins)

    def _may_fit(self, where: IndexId, head: Head) -> bool:
        """Whether the head of a queue may fit."""
        bound = self._bound(where)
        if bound is None or not bound.may_fit(head.duty, head.state_bytes):
            return False
        if where.key.has_profile or head.state_bytes <= bound.free_state_bytes:
            return True
        cluster = self._cluster
        allowed = modes(cluster, cluster.state.deployment(head.name), self._now)
        return allowed != (PlacementMode.DEDICATED,)

    def _push_next_blocker(self, sizes: Sizes, owner: Owner) -> None:
        """Push the first deployment of one owner that blocks others; it stands for all with equal
        requests."""
        if self._is_covered(sizes):
            return
        cluster = self._cluster
        found: list[tuple[AdmissionKey, DeploymentId]] = []
        for queue in cluster.waiting.blocking_requests.get(sizes, {}).get(owner, {}).values():
            for _, _, name in queue:
                deployment = cluster.state.deployment(name)
                if blocks_others(cluster, deployment, self._now):
                    found.append((self._key_of(name), name))
                    break
                if is_possible(cluster, deployment):
                    # The deployments behind it have waited less.
                    break
        if found:
            _, name = min(found)
            self.progress.blockers[name] = sizes, owner
            self._push(name, is_candidate=False)

    def _try_to_place(self, deployment: Deployment, *, is_tried: bool) -> bool:
        """Place the deployment and its gang; False: not possible now. `is_tried` is False for a
        deployment that only blocks others, because it cannot fit."""
        cluster, now = self._cluster, self._now
        gang = gang_of(cluster, deployment)
        self.progress.seen.update(dict.fromkeys([each.deployment for each in gang]))
        if why_not_yet(cluster, deployment) is not None:
            return False
        if is_tried or self._may_try(gang):
            allowed = allowed_modes(cluster, gang, self.progress.blocking, now)
            job = cluster.state.job(deployment.job)
            late = self._reservations.count_passed(job, now)
            keys = tuple(
                [equivalence_key(d, job, allowed[d.deployment], passes=late) for d in gang]
            )
            failed = self.progress.failed
            if keys not in failed and not any((key,) in failed for key in keys):
                self._steps += SEARCH_STEPS
                coming = self._reservations.coming
                if place_all(cluster, gang, allowed, coming, self._placed_at):
                    self._note_placed(gang)
                    return True
                failed[keys] = None
                self._note_failed_search(gang, allowed[deployment.deployment])
        if (
            blocks_others(cluster, deployment, now)
            and not self._reservations.cover([each.node_type for each in gang])
            and not self._reservations.add(deployment, now)
        ):
            requests = [(each.node_type, each.workers) for each in gang]
            self.progress.blocking.update(dict.fromkeys(requests))
        return False

    def _is_covered(self, sizes: Sizes) -> bool:
        """Whether no request of these sizes needs to block others, because others do."""
        if is_covered(sizes, self.progress.blocking):
            return True
        return self._reservations.cover([size.node_type for size in sizes])

    def _note_placed(self, gang: Sequence[Deployment]) -> None:
        cluster = self._cluster
        self._placed += gang
        self._bounds.invalidate()
        job = cluster.state.job(gang[0].job)
        for each in gang if self._bounds.policy_shares else ():
            group = cluster.state.group_of(each)
            if group is not None and group.shared and len(group.members) == 1:
                self._reopen(group.node_type, each.workers)
        # After `_reopen`, so that deployments already passed are not considered again.
        self.progress.shares.pop(job.tenant, None)
        # The job has GPUs, so its other deployments move ahead in the order.
        for other in job.deployments:
            if other in cluster.waiting and other not in self.progress.seen:
                if self.progress.newcomers is None or other in self.progress.newcomers:
                    self._push(other)
                elif blocks_others(cluster, cluster.state.deployment(other), self._now):
                    self._push(other, is_candidate=False)

    def _note_failed_search(
        self, gang: Sequence[Deployment], allowed: tuple[PlacementMode, ...]
    ) -> None:
        if len(gang) > 1:
            self.progress.gang_searches += 1
            return
        size = size_of(gang[0])
        if PlacementMode.DEDICATED in allowed and gang[0].memory is None:
            # With a known need a smaller state may need more of a GPU than a larger one.
            self._bounds.note_refusal(size, gang[0].state_bytes)
        if gang[0].trace is not None:
            searches, key = self._cluster.state.searches, size_key(size)
            searches[key] = searches.get(key, 0) + 1

    def _may_try(self, gang: Sequence[Deployment]) -> bool:
        """Whether the gang may be placed in this pass, and may fit: one of it is new, or its job
        has GPUs already."""
        first, cluster = gang[0], self._cluster
        if self.progress.newcomers is None:
            if first.deployment not in cluster.waiting.of_partial_jobs:
                return False
        elif not any(each.deployment in self.progress.newcomers for each in gang):
            return False
        unit = cluster.waiting.unit_of(first.deployment)
        if unit is not None:
            return self._may_fit(index_of(unit), unit.head)
        if len(gang) > 1:
            return True
        size = size_of(first)
        searches = cluster.state.searches.get(size_key(size), 0)
        if first.trace is None or searches < cluster.settings.config.searches_max:
            return True
        return first.state_bytes <= self._bounds.of(size, joins=False).free_state_bytes
