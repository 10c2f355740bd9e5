"""Who gets GPUs next: quotas, priorities, weighted fairness and response ratio (PlexRL §5.2.3).

Those who wait are looked at in the order of their turns (`turns`). A job that asked for a gang gets
GPUs for all its deployments at once or for none. One that waits beyond the starvation bound is
passed by nobody behind it who would take free GPUs that it might be waiting for; where the policy
does not backfill, nobody is passed. Who could not have GPUs even if all other jobs ended
(`feasibility`) holds nobody up.
"""

import heapq
from collections.abc import Sequence

from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.context import Context
from plexrl.scheduler.fair_shares import begin_to_wait, tenant_share
from plexrl.scheduler.feasibility import gang_of, is_possible
from plexrl.scheduler.line_heads import Head
from plexrl.scheduler.placement import leave, patience_ends_at, place, shares, ways
from plexrl.scheduler.policies import Way
from plexrl.scheduler.room import NOTHING, Room
from plexrl.scheduler.rooms import Rooms
from plexrl.scheduler.scarcity import alike, is_rival, over_quota
from plexrl.scheduler.state import Deployment
from plexrl.scheduler.tenant_record import Tenant
from plexrl.scheduler.turns import Turn, is_partial, is_unpassable, turn_of
from plexrl.scheduler.waiting import File, Rank, Size

_Wish = tuple[str, int]
"""(node type, workers) of a deployment that nobody may pass."""


def enqueue_deployment(context: Context, deployment: Deployment) -> None:
    """A deployment was created: it waits for GPUs until the end of this event at least."""
    begin_to_wait(context, context.job(deployment.job).tenant, deployment.created_at)
    context.wait(deployment)
    context.newcomers.append(deployment.deployment)
    _wake_when_patience_ends(context, deployment)


def wake_patient(context: Context) -> None:
    """The settings are others: whoever waits may share at a time at which it could not before."""
    for name in context.waiting:
        _wake_when_patience_ends(context, context.deployment(name))


def _wake_when_patience_ends(context: Context, deployment: Deployment) -> None:
    if context.policy.repacks and shares(deployment):
        # By then it may share where it could not before.
        context.wake(patience_ends_at(context, deployment), "placement:")


def admit(context: Context, now: float) -> list[Deployment]:
    """Place whoever can be placed now; returns the placed, in the order of their turn.

    Everybody is looked at when capacity has come free. Else only newcomers are: those who waited
    before them failed on the same capacity.
    """
    everybody = context.place_waiting
    context.place_waiting = False
    newcomers, context.newcomers = context.newcomers, []
    here = [name for name in newcomers if name in context.waiting]
    if not (context.waiting if everybody else here):
        return []
    return _Pass(context, now, None if everybody else here).run()


class _Pass:
    """One look at those who wait, in the order of their turns.

    Not everybody is looked at: of a line only the first, and the next once that one is placed; of a
    file of lines only who there may be room for, one after the other. Where others must not be let
    past, the first of each wish stands for all that wish the same.
    """

    def __init__(
        self, context: Context, now: float, newcomers: Sequence[DeploymentId] | None
    ) -> None:
        self._context = context
        self._now = now
        if newcomers is None:
            context.state.searches.clear()
        self._newcomers = None if newcomers is None else set(newcomers)
        """Who alone may be placed; None: everybody."""
        self._rooms = Rooms(context)
        self._turns: list[tuple[Turn, DeploymentId]] = []
        self._heads: dict[DeploymentId, tuple[Size, File, Head]] = {}
        """Whose turn it is of each file."""
        self._passed: dict[tuple[Size, File], Head] = {}
        """The last of each file whose turn it was."""
        self._ended: dict[tuple[Size, File], None] = {}
        """Files of which there was room for nobody any more."""
        self._at: Turn | None = None
        """Whose turn it is."""
        self._wishes: dict[DeploymentId, tuple[Size, Rank]] = {}
        self._seen: set[DeploymentId] = set()
        self._ahead: set[_Wish] = set()
        self._failed: set[tuple[object, ...]] = set()
        self._shares: dict[TenantId, float] = {}
        self._placed: list[Deployment] = []

    def run(self) -> list[Deployment]:
        """Who was placed."""
        context = self._context
        self._line_up()
        while self._turns:
            turn, name = heapq.heappop(self._turns)
            if name in self._seen:
                continue
            deployment = context.deployment(name)
            turn_now = self._turn(deployment)
            if turn_now > turn:
                # What was placed meanwhile counts against its tenant.
                heapq.heappush(self._turns, (turn_now, name))
                continue
            self._at = turn
            found, wish = self._heads.pop(name, None), self._wishes.pop(name, None)
            if found is not None:
                self._passed[found[0], found[1]] = found[2]
            if found is not None and not self._holds(*found):
                # Its room is for those ahead of it now, or gone.
                self._next_of_file(found[0], found[1])
                found = None
                if wish is None:
                    continue
            ahead = len(self._ahead)
            is_placed = self._look_at(deployment, is_tried=found is not None)
            if len(self._ahead) > ahead and self._is_nobody_else_to_pass():
                break
            if found is not None and (is_placed or why_not_yet(context, deployment) is None):
                self._next_of_file(found[0], found[1])
            if is_placed and wish is not None:
                self._next_of_wish(*wish)
        return self._placed

    def _line_up(self) -> None:
        waiting = self._context.waiting
        sizes: set[Size] = set()
        """For which there may be room."""
        if self._newcomers is None:
            for size, files in waiting.files.items():
                if not self._rooms.of(size).is_nothing:
                    before = len(self._turns)
                    for file in files:
                        self._next_of_file(size, file)
                    if len(self._turns) > before:
                        sizes.add(size)
            for name in waiting.singles:
                self._push(name)
        else:
            for name in self._newcomers:
                if self._is_worth_a_try(name):
                    self._push(name)
                    sizes.add(_size_of(self._context.deployment(name)))
            if self._turns:
                for name in waiting.singles:
                    if is_unpassable(self._context, self._context.deployment(name), self._now):
                        self._push(name)
        if not self._turns:
            return
        # Who only stands for a wish keeps others from groups of that size, and from free GPUs.
        any_free = any(self._rooms.of(size).free_state_bytes != NOTHING for size in sizes)
        for size, wishes in waiting.wishes.items():
            if any_free or waiting.singles or is_rival(size, sizes):
                for rank in wishes:
                    self._next_of_wish(size, rank)

    def _is_worth_a_try(self, name: DeploymentId) -> bool:
        """Whether there may be room for a newcomer."""
        found = self._context.waiting.place_of(name)
        return found is None or self._holds(*found)

    def _push(self, name: DeploymentId) -> None:
        turn = self._turn(self._context.deployment(name))
        heapq.heappush(self._turns, (turn, name))

    def _turn(self, deployment: Deployment) -> Turn:
        tenant = self._context.job(deployment.job).tenant
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = tenant_share(self._context, tenant, self._now)
        return turn_of(self._context, deployment, share, self._now)

    def _next_of_file(self, size: Size, file: File) -> None:
        """It is the turn of the next of a file for whom there may be room."""
        heads = self._context.waiting.files.get(size, {}).get(file)
        room = self._room(size, file)
        if heads is None or room is None:
            return
        head = heads.first(room, self._passed.get((size, file)))
        while head is not None and not self._is_next(size, file, head):
            head = heads.first(room, head)
        if head is None:
            self._ended[size, file] = None
        else:
            self._heads[head.name] = size, file, head
            self._push(head.name)

    def _is_next(self, size: Size, file: File, head: Head) -> bool:
        """Whether there may be room for the head of a line whose turn is still to come."""
        if head.name in self._seen or not self._holds(size, file, head):
            return False
        return self._at is None or self._turn(self._context.deployment(head.name)) > self._at

    def _offer(self, node_type: str, workers: int) -> None:
        """There is a new group that others may join, too: those that had no room have some now."""
        for size, file in list(self._ended):
            if size.shares and size.workers == workers and alike(size.node_type, node_type):
                del self._ended[size, file]
                self._next_of_file(size, file)

    def _room(self, size: Size, file: File) -> Room | None:
        """What there is for a file behind those who may not be passed, and after so many searches;
        None: nothing that they are not waiting for themselves."""
        takes_free = True
        for kind, workers in self._ahead:
            if alike(kind, size.node_type):
                if workers == size.workers:
                    return None
                takes_free = False
        searches = self._context.state.searches.get(_size_key(size), 0)
        joins = not file.has_profile or searches < self._context.config.searches_max
        return self._rooms.of(size, takes_free=takes_free, joins=joins)

    def _holds(self, size: Size, file: File, head: Head) -> bool:
        """Whether there may be room for the head of a line."""
        room = self._room(size, file)
        if room is None or not room.holds(head.duty, head.state_bytes):
            return False
        if file.has_profile or head.state_bytes <= room.free_state_bytes:
            return True
        context = self._context
        return ways(context, context.deployment(head.name), self._now) != (Way.DEDICATED,)

    def _next_of_wish(self, size: Size, rank: Rank) -> None:
        """The next of those that wish the same stands for all of them."""
        context = self._context
        for name in context.waiting.of_wish(size, rank):
            deployment = context.deployment(name)
            if is_unpassable(context, deployment, self._now):
                self._wishes[name] = size, rank
                self._push(name)
                return
            if is_possible(context, deployment):
                # Those behind it have waited less.
                return

    def _is_nobody_else_to_pass(self) -> bool:
        """Whether all who are left wish what somebody ahead may be waiting for."""
        waiting = self._context.waiting
        return not waiting.singles and all(
            any(
                size.workers == workers and alike(kind, size.node_type)
                for kind, workers in self._ahead
            )
            for size in waiting.wishes
        )

    def _look_at(self, deployment: Deployment, *, is_tried: bool) -> bool:
        """Place it and its gang; False: not now. One that only stands for its wish is not tried,
        because there is no room for it."""
        context, now = self._context, self._now
        gang = gang_of(context, deployment)
        self._seen.update(each.deployment for each in gang)
        if why_not_yet(context, deployment) is not None:
            return False
        if is_tried or self._may_try(gang):
            only = _ways_left(context, gang, self._ahead, now)
            likeness = {_likeness(each, only[each.deployment]) for each in gang}
            if not likeness & self._failed:
                if _place_all(context, gang, only, now):
                    self._note_placed(gang)
                    return True
                if len(gang) == 1:
                    self._failed |= likeness
                    self._note_search(deployment, only[deployment.deployment])
        if is_unpassable(context, deployment, now):
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
            if other not in self._seen and self._counts(other):
                self._push(other)

    def _note_search(self, deployment: Deployment, only: tuple[Way, ...]) -> None:
        """Groups were searched for it, and free GPUs, in vain."""
        size = _size_of(deployment)
        if Way.DEDICATED in only:
            self._rooms.refused(size, deployment.state_bytes)
        if deployment.trace is not None:
            searches, key = self._context.state.searches, _size_key(size)
            searches[key] = searches.get(key, 0) + 1

    def _may_try(self, gang: Sequence[Deployment]) -> bool:
        """Whether one of them is new, or in no line, and there may be room."""
        first, context = gang[0], self._context
        if self._newcomers is None:
            if first.deployment not in context.waiting.singles:
                return False
        elif not any(each.deployment in self._newcomers for each in gang):
            return False
        if len(gang) > 1:
            return True
        found = context.waiting.place_of(first.deployment)
        if found is not None:
            return self._holds(*found)
        size = _size_of(first)
        searches = context.state.searches.get(_size_key(size), 0)
        if first.trace is None or searches < context.config.searches_max:
            return True
        return first.state_bytes <= self._rooms.of(size, joins=False).free_state_bytes

    def _counts(self, name: DeploymentId) -> bool:
        """Whether it is one of those who wait that this pass is about."""
        if name not in self._context.waiting:
            return False
        if self._newcomers is None or name in self._newcomers:
            return True
        return is_unpassable(self._context, self._context.deployment(name), self._now)


def why_not_yet(context: Context, deployment: Deployment) -> tuple[str, str] | None:
    """(reason, rule) for which `deployment` may not have GPUs even where some are free."""
    job = context.job(deployment.job)
    if job.gang and len(job.deployments) < job.gang:
        have = len(job.deployments)
        return f"its gang of {job.gang} has {have} deployments so far", "gang"
    gpus = sum(each.workers for each in gang_of(context, deployment))
    reason = over_quota(context, job, gpus)
    return None if reason is None else (reason, "quota")


def _place_all(
    context: Context, gang: list[Deployment], only: dict[DeploymentId, tuple[Way, ...]], now: float
) -> bool:
    done: list[Deployment] = []
    # The largest first: it has the fewest places to go.
    for deployment in sorted(gang, key=lambda d: (-d.workers, d.created_at, d.deployment)):
        if place(context, deployment, now, only=only[deployment.deployment]) is None:
            for each in reversed(done):
                leave(context, each)
                each.ranks = ()
                each.nodes = ()
                each.placement = None
            return False
        done.append(deployment)
    for deployment in gang:
        context.waiting.remove(deployment.deployment)
        context.hold(deployment, +1, now)
    return True


def _ways_left(
    context: Context, gang: list[Deployment], ahead: set[_Wish], now: float
) -> dict[DeploymentId, tuple[Way, ...]]:
    """How each of `gang` may get GPUs behind those `ahead`, whom nobody may pass: none that they
    may be waiting for, free or in a group of the size they want."""
    found = {each.deployment: ways(context, each, now) for each in gang}
    if is_partial(context, context.job(gang[0].job)):
        return found
    for each in gang:
        rivals = [workers for kind, workers in ahead if alike(kind, each.node_type)]
        if each.workers in rivals:
            found[each.deployment] = ()
        elif rivals:
            left = [way for way in found[each.deployment] if way != Way.DEDICATED]
            found[each.deployment] = tuple(left)
    return found


def _size_of(deployment: Deployment) -> Size:
    return Size(deployment.node_type, deployment.workers, shares(deployment))


def _size_key(size: Size) -> str:
    return f"{size.node_type}/{size.workers}"


def _likeness(deployment: Deployment, only: tuple[Way, ...]) -> tuple[object, ...]:
    """What two deployments share that both fit or both do not."""
    return (
        deployment.workers,
        deployment.node_type,
        shares(deployment),
        deployment.state_bytes,
        deployment.trace,
        only,
    )


def quota_of(tenant: Tenant) -> dict[str, float | int | None]:
    """The tenant's limits, None for none."""
    return {
        "weight": tenant.weight,
        "jobs_max": tenant.jobs_max,
        "gpus_max": tenant.gpus_max,
        "gpu_seconds_max": tenant.gpu_seconds_max,
        "live_jobs_max": tenant.live_jobs_max,
        "checkpoints_max": tenant.checkpoints_max,
        "checkpoint_bytes_max": tenant.checkpoint_bytes_max,
        "priority_max": tenant.priority_max,
    }
