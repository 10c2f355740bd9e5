"""One pass of the admission: who waits is looked at in the order of turns, and placed if possible.

Not everybody is looked at. Of a line only the first is, and the next once that one is placed; of a
file only who there may be room for, one after the other (`waiting`). All queues of one owner that
want the same sizes are opened when the owner's turn comes, so that a pass costs little for those
whose turn does not come. Where others must not be let past, the first of each wish stands for all
that wish the same.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.admission.fair_shares import tenant_share
from plexrl.scheduler.admission.fit.bound import NOTHING, FitBound
from plexrl.scheduler.admission.fit.bound_cache import FitBoundCache
from plexrl.scheduler.admission.fit.feasibility import gang_of, is_possible
from plexrl.scheduler.admission.order import (
    AdmissionKey,
    admission_key,
    blocks_others,
    response_ratio,
)
from plexrl.scheduler.admission.queues.gangs import (
    BlockingRequest,
    allowed_modes,
    equivalence_key,
    place_all,
    why_not_yet,
)
from plexrl.scheduler.admission.queues.queue_heads import Head
from plexrl.scheduler.admission.queues.waiting import Owner, QueueKey, Size, Sizes, Unit, size_of
from plexrl.scheduler.admission.scarcity import is_rival, node_types_compatible
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.placement.placement import modes
from plexrl.scheduler.placement.policies import PlacementMode
from plexrl.scheduler.state.records import Deployment

if TYPE_CHECKING:
    from plexrl.scheduler.admission.queues.waiting import Queue


class _Bundle(NamedTuple):
    """All queues of one owner that want the same sizes: not opened before the turn of the first."""

    is_wish: bool
    """Its blocking_requests, else its files."""
    sizes: Sizes
    owner: Owner
    first: tuple[float, float, DeploymentId]
    """The end of the earliest turn in it, whether or not there is room for whose it is."""


class _Spot(NamedTuple):
    """A file among all."""

    sizes: Sizes
    owner: Owner
    file: QueueKey


class AdmissionPass:
    """One look at those who wait."""

    def __init__(
        self, context: Context, now: float, newcomers: Sequence[DeploymentId] | None
    ) -> None:
        self._context = context
        self._now = now
        if newcomers is None:
            context.state.searches.clear()
        self._newcomers = None if newcomers is None else set(newcomers)
        """Who alone may be placed; None: everybody."""
        self._rooms = FitBoundCache(context)
        self._turns: list[tuple[AdmissionKey, int]] = []
        """A heap: the second is the number of what has that turn."""
        self._numbered: list[tuple[Owner | _Bundle | DeploymentId, bool]] = []
        """With whether it is a candidate: who stands for a wish is none."""
        self._bundles: dict[Owner, list[tuple[bool, Sizes]]] = {}
        """(is a wish, sizes) of each owner whose turn has not come yet."""
        self._candidates = 0
        """Deployments in the heap that may be placed, and bundles that may hold some."""
        self._heads: dict[DeploymentId, tuple[_Spot, Head]] = {}
        """Whose turn it is of each file."""
        self._passed: dict[_Spot, Head] = {}
        """The last of each file whose turn it was."""
        self._ended: dict[_Spot, None] = {}
        """Files of which there was room for nobody any more."""
        self._unopened: dict[Sizes, int] = {}
        """How many bundles of files are still to be opened."""
        self._closed: dict[Sizes, None] = {}
        """Sizes for which there is no room, so that their bundles need not be opened."""
        self._skipped: dict[Sizes, list[Owner]] = {}
        """Whose bundles of files were not opened, for their sizes were closed."""
        self._at: AdmissionKey | None = None
        """Whose turn it is."""
        self._wishes: dict[DeploymentId, tuple[Sizes, Owner]] = {}
        self._seen: set[DeploymentId] = set()
        self._ahead: set[BlockingRequest] = set()
        self._failed: set[tuple[object, ...]] = set()
        self._gang_searches = 0
        """Gangs that were searched for in vain."""
        self._shares: dict[TenantId, float] = {}
        self._placed: list[Deployment] = []

    def run(self) -> list[Deployment]:
        """Who was placed."""
        self._line_up()
        while self._candidates:
            turn, number = heapq.heappop(self._turns)
            what, is_candidate = self._numbered[number]
            turn_now = self._turn_of(what)
            if turn_now > turn:
                # What was placed meanwhile counts against its tenant.
                heapq.heappush(self._turns, (turn_now, number))
                continue
            if isinstance(what, Owner):
                self._open_owner(what)
                continue
            if isinstance(what, _Bundle):
                self._open(what.is_wish, what.sizes, what.owner)
                continue
            self._candidates -= is_candidate
            if what not in self._seen:
                self._at = turn
                self._take_turn(what)
        return self._placed

    def _take_turn(self, name: DeploymentId) -> None:
        context = self._context
        found, wish = self._heads.pop(name, None), self._wishes.pop(name, None)
        if found is not None:
            self._passed[found[0]] = found[1]
            if not self._holds(*found):
                # Its room is for those ahead of it now, or gone.
                self._next_of_file(found[0])
                found = None
                if wish is None:
                    return
        deployment = context.deployment(name)
        is_placed = self._look_at(deployment, is_tried=found is not None)
        if found is not None and (is_placed or why_not_yet(context, deployment) is None):
            self._next_of_file(found[0])
        if is_placed and wish is not None:
            self._next_of_wish(*wish)

    def _line_up(self) -> None:
        waiting = self._context.waiting
        sizes: set[Size] = set()
        """For which there may be room."""
        if self._newcomers is None:
            for each, owners in waiting.files.items():
                if not self._rooms.of_all(each).is_nothing:
                    sizes.update(each)
                    self._unopened[each] = len(owners)
                    self._candidates += len(owners)
                    for owner in owners:
                        self._bundles.setdefault(owner, []).append((False, each))
            for name in waiting.of_partial_jobs:
                self._push(name)
        else:
            for name in self._newcomers:
                unit = waiting.unit_of(name)
                if unit is None:
                    if name in waiting.of_partial_jobs:
                        self._push(name)
                        sizes.add(size_of(self._context.deployment(name)))
                elif self._holds(_spot_of(unit), unit.head):
                    self._push(unit.head.name)
                    sizes.update(unit.sizes)
            for name in waiting.of_partial_jobs if self._candidates else ():
                if blocks_others(self._context, self._context.deployment(name), self._now):
                    self._push(name, is_candidate=False)
        if not self._candidates:
            return
        # Who only stands for a wish keeps others from groups of that size, and from free GPUs.
        any_free = any(self._rooms.of(size).free_state_bytes != NOTHING for size in sizes)
        for each, blocking_requests in waiting.blocking_requests.items():
            if any_free or waiting.of_partial_jobs or any(is_rival(size, sizes) for size in each):
                for owner in blocking_requests:
                    self._bundles.setdefault(owner, []).append((True, each))
        for owner in self._bundles:
            self._push(owner, is_candidate=False)

    def _first_unpassable(
        self, queues: "Mapping[float, Queue]"
    ) -> tuple[float, float, DeploymentId] | None:
        """The end of the earliest turn of those that have waited long enough, whether or not they
        could ever have GPUs."""
        first = self._earliest([(expected_s, queue[0]) for expected_s, queue in queues.items()])
        if first is None or not self._context.policy.backfills or first[0] == -math.inf:
            return first
        return None

    def _earliest(
        self, firsts: Sequence[tuple[float, tuple[float, DeploymentId]]]
    ) -> tuple[float, float, DeploymentId] | None:
        """The end of the earliest turn of one owner, given the first of each expected length."""
        found = None
        for expected_s, (created_at, name) in firsts:
            ratio = response_ratio(self._context, created_at, expected_s, self._now)
            turn = -ratio, created_at, name
            if found is None or turn < found:
                found = turn
        return found

    def _push(self, what: Owner | _Bundle | DeploymentId, *, is_candidate: bool = True) -> None:
        heapq.heappush(self._turns, (self._turn_of(what), len(self._numbered)))
        self._numbered.append((what, is_candidate))
        self._candidates += is_candidate

    def _turn_of(self, what: Owner | _Bundle | DeploymentId) -> AdmissionKey:
        """Of an owner or a bundle the earliest that one of its units may have."""
        if isinstance(what, Owner):
            return True, -what.priority, self._share(what.tenant), -math.inf, -math.inf, ""
        if isinstance(what, _Bundle):
            tenant, priority = what.owner
            return True, -priority, self._share(tenant), *what.first
        deployment = self._context.deployment(what)
        share = self._share(self._context.job(deployment.job).tenant)
        return admission_key(self._context, deployment, share, self._now)

    def _share(self, tenant: TenantId) -> float:
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = tenant_share(self._context, tenant, self._now)
        return share

    def _open_owner(self, owner: Owner) -> None:
        waiting = self._context.waiting
        for is_wish, sizes in self._bundles.pop(owner):
            if is_wish and self._is_ahead(sizes):
                continue
            if is_wish:
                blocking_requests = waiting.blocking_requests.get(sizes, {}).get(owner, {})
                first = self._first_unpassable(blocking_requests)
            elif sizes in self._closed or self._is_nothing_for(sizes):
                self._unopened[sizes] -= 1
                self._skipped.setdefault(sizes, []).append(owner)
                continue
            else:
                files = waiting.files.get(sizes, {}).get(owner, {})
                first = self._earliest(
                    [(file.expected_s, heads.least) for file, heads in files.items()]
                )
            if first is not None:
                self._push(_Bundle(is_wish, sizes, owner, first), is_candidate=False)

    def _open(self, is_wish: bool, sizes: Sizes, owner: Owner) -> None:
        if is_wish:
            self._next_of_wish(sizes, owner)
            return
        is_closed = sizes in self._closed or self._is_nothing_for(sizes)
        self._unopened[sizes] -= 1
        if is_closed:
            self._skipped.setdefault(sizes, []).append(owner)
            return
        self._candidates -= 1
        for file in self._context.waiting.files.get(sizes, {}).get(owner, ()):
            self._next_of_file(_Spot(sizes, owner, file))

    def _is_nothing_for(self, sizes: Sizes) -> bool:
        """Whether nobody who wants these sizes waits any more, or has room: close them."""
        least = self._context.waiting.least.get(sizes)
        is_open = least is not None and self._rooms.of_all(sizes).holds(*least)
        if is_open and not self._is_blocked(sizes):
            return False
        self._closed[sizes] = None
        self._candidates -= self._unopened[sizes]
        return True

    def _is_blocked(self, sizes: Sizes) -> bool:
        """Whether somebody ahead, whom nobody may pass, waits for GPUs as these sizes want them."""
        return bool(self._ahead) and any(
            size.workers == workers and node_types_compatible(kind, size.node_type)
            for kind, workers in self._ahead
            for size in sizes
        )

    def _next_of_file(self, spot: _Spot) -> None:
        """It is the turn of the next of a file for whom there may be room."""
        sizes, owner, file = spot
        heads = self._context.waiting.files.get(sizes, {}).get(owner, {}).get(file)
        room = self._room(spot)
        if heads is None or room is None:
            return
        head = heads.first(room, self._passed.get(spot))
        while head is not None and not self._is_next(spot, head):
            head = heads.first(room, head)
        if head is None:
            self._ended[spot] = None
        else:
            self._heads[head.name] = spot, head
            self._push(head.name)

    def _is_next(self, spot: _Spot, head: Head) -> bool:
        """Whether there may be room for the head of a line whose turn is still to come."""
        if head.name in self._seen or not self._holds(spot, head):
            return False
        return self._at is None or self._turn_of(head.name) > self._at

    def _offer(self, node_type: str, workers: int) -> None:
        """There is a new group that others may join, too: those that had no room have some now."""

        def suits(sizes: Sizes) -> bool:
            return any(
                size.shares
                and size.workers == workers
                and node_types_compatible(size.node_type, node_type)
                for size in sizes
            )

        for sizes in [each for each in self._closed if suits(each)]:
            del self._closed[sizes]
            self._candidates += self._unopened[sizes]
            for owner in self._skipped.pop(sizes, ()):
                for file in self._context.waiting.files.get(sizes, {}).get(owner, ()):
                    self._next_of_file(_Spot(sizes, owner, file))
        for spot in [each for each in self._ended if suits(each.sizes)]:
            del self._ended[spot]
            self._next_of_file(spot)

    def _room(self, spot: _Spot) -> FitBound | None:
        """What there is for a file behind those who may not be passed, and after so many searches;
        None: nothing that they are not waiting for themselves."""
        sizes, bound = spot.sizes, self._context.config.searches_max
        if len(sizes) > 1 and self._gang_searches >= bound:
            return None
        takes_free = [True] * len(sizes)
        for kind, workers in self._ahead:
            for at, size in enumerate(sizes):
                if node_types_compatible(kind, size.node_type):
                    if workers == size.workers:
                        return None
                    takes_free[at] = False
        if len(sizes) > 1:
            return self._rooms.of_gang(sizes, tuple(takes_free))
        searches = self._context.state.searches.get(_size_key(sizes[0]), 0)
        joins = not spot.file.has_profile or searches < bound
        return self._rooms.of(sizes[0], takes_free=takes_free[0], joins=joins)

    def _holds(self, spot: _Spot, head: Head) -> bool:
        """Whether there may be room for the head of a line."""
        room = self._room(spot)
        if room is None or not room.holds(head.duty, head.state_bytes):
            return False
        if spot.file.has_profile or head.state_bytes <= room.free_state_bytes:
            return True
        context = self._context
        return modes(context, context.deployment(head.name), self._now) != (
            PlacementMode.DEDICATED,
        )

    def _is_ahead(self, sizes: Sizes) -> bool:
        """Whether others that wish the same are ahead already, and keep these from GPUs, too."""
        return all((size.node_type, size.workers) in self._ahead for size in sizes)

    def _next_of_wish(self, sizes: Sizes, owner: Owner) -> None:
        """The next of those of one owner that wish the same stands for all of them."""
        if self._is_ahead(sizes):
            return
        context = self._context
        found: list[tuple[AdmissionKey, DeploymentId]] = []
        for queue in context.waiting.blocking_requests.get(sizes, {}).get(owner, {}).values():
            for _, name in queue:
                deployment = context.deployment(name)
                if blocks_others(context, deployment, self._now):
                    found.append((self._turn_of(name), name))
                    break
                if is_possible(context, deployment):
                    # Those behind it have waited less.
                    break
        if found:
            _, name = min(found)
            self._wishes[name] = sizes, owner
            self._push(name, is_candidate=False)

    def _look_at(self, deployment: Deployment, *, is_tried: bool) -> bool:
        """Place it and its gang; False: not now. One that only stands for its wish is not tried,
        because there is no room for it."""
        context, now = self._context, self._now
        gang = gang_of(context, deployment)
        self._seen.update(each.deployment for each in gang)
        if why_not_yet(context, deployment) is not None:
            return False
        if is_tried or self._may_try(gang):
            only = allowed_modes(context, gang, self._ahead, now)
            equivalence = tuple(equivalence_key(each, only[each.deployment]) for each in gang)
            if equivalence not in self._failed and self._failed.isdisjoint(
                (e,) for e in equivalence
            ):
                if place_all(context, gang, only, now):
                    self._note_placed(gang)
                    return True
                self._failed.add(equivalence)
                self._note_search(gang, only[deployment.deployment])
        if blocks_others(context, deployment, now):
            self._ahead.update((each.node_type, each.workers) for each in gang)
        return False

    def _note_placed(self, gang: Sequence[Deployment]) -> None:
        context = self._context
        self._placed += gang
        self._rooms.forget()
        job = context.job(gang[0].job)
        for each in gang if self._rooms.anybody_shares else ():
            group = context.group_of(each)
            if group is not None and group.shared and len(group.members) == 1:
                self._offer(group.node_type, each.workers)
        # By now, for whose turn has passed does not get another one by it.
        self._shares.pop(job.tenant, None)
        # Now that their job has GPUs, it is the turn of its other deployments.
        for other in job.deployments:
            if other in context.waiting and other not in self._seen:
                if self._newcomers is None or other in self._newcomers:
                    self._push(other)
                elif blocks_others(context, context.deployment(other), self._now):
                    self._push(other, is_candidate=False)

    def _note_search(self, gang: Sequence[Deployment], only: tuple[PlacementMode, ...]) -> None:
        """Groups were searched for it, and free GPUs, in vain."""
        if len(gang) > 1:
            self._gang_searches += 1
            return
        size = size_of(gang[0])
        if PlacementMode.DEDICATED in only:
            self._rooms.refused(size, gang[0].state_bytes)
        if gang[0].trace is not None:
            searches, key = self._context.state.searches, _size_key(size)
            searches[key] = searches.get(key, 0) + 1

    def _may_try(self, gang: Sequence[Deployment]) -> bool:
        """Whether one of them is new, or its job has GPUs, and there may be room."""
        first, context = gang[0], self._context
        if self._newcomers is None:
            if first.deployment not in context.waiting.of_partial_jobs:
                return False
        elif not any(each.deployment in self._newcomers for each in gang):
            return False
        unit = context.waiting.unit_of(first.deployment)
        if unit is not None:
            return self._holds(_spot_of(unit), unit.head)
        if len(gang) > 1:
            return True
        size = size_of(first)
        searches = context.state.searches.get(_size_key(size), 0)
        if first.trace is None or searches < context.config.searches_max:
            return True
        return first.state_bytes <= self._rooms.of(size, joins=False).free_state_bytes


def _spot_of(unit: Unit) -> _Spot:
    return _Spot(unit.sizes, unit.owner, unit.file)


def _size_key(size: Size) -> str:
    return f"{size.node_type}/{size.workers}"
