"""Who gets GPUs next: quotas, priorities, weighted fairness and response ratio (PlexRL §5.2.3).

The order of waiting deployments, first criterion first:

1. the job already has GPUs for another deployment (it holds them idle until it is whole);
2. it has waited beyond `starvation_bound_s`;
3. priority class;
4. its tenant's share: GPUs held and lately used, over its weight (least first);
5. response ratio of the wait to the job's expected length;
6. time of submission, then name.

A job that asked for a gang gets GPUs for all its deployments at once or for none. One that waits
beyond the starvation bound is passed by no other job that would take free GPUs it might be waiting
for; where the policy does not backfill, nobody is.
"""

import heapq
from collections.abc import Mapping, Sequence

from plexrl.errors import CapacityError, ModelDoesNotFitError
from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.context import Context
from plexrl.scheduler.node_pool import NodeKind
from plexrl.scheduler.placement import leave, patience_ends_at, place, shares, ways
from plexrl.scheduler.policies import Way
from plexrl.scheduler.rooms import Rooms
from plexrl.scheduler.scarcity import alike, over_quota
from plexrl.scheduler.state import Deployment, Job, Tenant
from plexrl.scheduler.usage import recent_gpu_seconds
from plexrl.scheduler.waiting import Likeness, Rank, Size

JOB_S = 3600.0
"""Length of a job that its user said nothing about."""

SHARE_WINDOW_S = 3600.0
"""GPU-seconds used count as much as the same number held over this time."""

_Wish = tuple[str, int]
"""(node type, workers) of a deployment that nobody may pass."""

_Turn = tuple[bool, bool, int, float, float, float, str]
"""The criteria above, the lowest first."""


def check_it_can_fit(sizes: Mapping[NodeKind, tuple[int, int]], deployment: Deployment) -> None:
    """Refuse what not even the empty cluster could hold.

    Raises:
        CapacityError: more GPUs than nodes of the wanted type have together, or there are none.
        ModelDoesNotFitError: a rank's state is larger than a GPU's memory, or the whole state than
            the tiers it is offloaded to.
    """
    name, wanted = deployment.deployment, deployment.node_type
    typed = {kind: size for kind, size in sizes.items() if wanted in ("", kind.node_type)}
    if not typed and sizes:
        there = sorted({kind.node_type for kind in sizes} - {""})
        raise CapacityError(
            f"deployment {name!r} asks for nodes of type {wanted!r}; the cluster has "
            f"{', '.join(there) or 'nodes without a type only'}: name one it has, or none",
            workers=deployment.workers,
            gpus=0,
        )
    of_type = f" of type {wanted!r}" if wanted else ""
    per_rank = -(-deployment.state_bytes // deployment.workers)
    gpus = max((gpus for gpus, _ in typed.values()), default=0)
    if deployment.workers > gpus:
        raise CapacityError(
            f"deployment {name!r} asks for {deployment.workers} GPUs{of_type}; the cluster has "
            f"{gpus} of one kind: ask for fewer workers or add nodes",
            workers=deployment.workers,
            gpus=gpus,
        )
    memory = max(
        kind.gpu_memory_bytes for kind, (count, _) in typed.items() if count >= deployment.workers
    )
    if per_rank > memory:
        needed = -(-deployment.state_bytes // memory)
        raise ModelDoesNotFitError(
            f"deployment {name!r} needs {per_rank} bytes on each of its {deployment.workers} GPUs; "
            f"a GPU{of_type} has {memory}: ask for at least {needed} workers or a smaller model",
            bytes_per_gpu=per_rank,
            gpu_memory_bytes=memory,
        )
    tiers = sum(tier_bytes for _, tier_bytes in typed.values())
    if shares(deployment) and deployment.state_bytes > tiers:
        raise ModelDoesNotFitError(
            f"deployment {name!r} has {deployment.state_bytes} bytes of state; the host tiers and "
            f"NVMe tiers hold {tiers}: raise them or ask for an exclusive group",
            state_bytes=deployment.state_bytes,
            host_memory_bytes=tiers,
        )


def enqueue_deployment(context: Context, deployment: Deployment) -> None:
    """A deployment was created: it waits for GPUs until the end of this event at least."""
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

    Not everybody is looked at: of a line only the first, and the next once that one is placed; and
    no line for which there cannot be room. Where others must not be let past, the first of each
    wish stands for all that wish the same.
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
        self._turns: list[tuple[_Turn, DeploymentId]] = []
        self._lines: dict[DeploymentId, tuple[Size, Likeness]] = {}
        """By who is first of them."""
        self._wishes: dict[DeploymentId, tuple[Size, Rank]] = {}
        self._seen: set[DeploymentId] = set()
        self._ahead: set[_Wish] = set()
        self._failed: set[tuple[object, ...]] = set()
        self._placed: list[Deployment] = []

    def run(self) -> list[Deployment]:
        """Who was placed."""
        context, now = self._context, self._now
        self._line_up()
        while self._turns:
            turn, name = heapq.heappop(self._turns)
            deployment = context.deployment(name)
            if name in self._seen:
                continue
            turn_now = _turn(context, deployment, now)
            if turn_now > turn:
                # What was placed meanwhile counts against its tenant.
                heapq.heappush(self._turns, (turn_now, name))
                continue
            ahead = len(self._ahead)
            is_placed = self._look_at(deployment)
            if len(self._ahead) > ahead and self._is_nobody_else_to_pass():
                break
            line, wish = self._lines.pop(name, None), self._wishes.pop(name, None)
            if is_placed:
                if line is not None:
                    self._next_of_line(*line)
                if wish is not None:
                    self._next_of_wish(*wish)
        return self._placed

    def _line_up(self) -> None:
        waiting = self._context.waiting
        if self._newcomers is None:
            for size, lines in waiting.lines.items():
                if self._rooms.any_for(size):
                    for likeness in lines:
                        self._next_of_line(size, likeness)
            if not self._turns and not waiting.singles:
                return
            for name in waiting.singles:
                self._push(name)
        else:
            for name in self._newcomers:
                self._push(name)
            for name in waiting.singles:
                if self._is_unpassable(self._context.deployment(name)):
                    self._push(name)
        for size, wishes in waiting.wishes.items():
            for rank in wishes:
                self._next_of_wish(size, rank)

    def _push(self, name: DeploymentId) -> None:
        turn = _turn(self._context, self._context.deployment(name), self._now)
        heapq.heappush(self._turns, (turn, name))

    def _next_of_line(self, size: Size, likeness: Likeness) -> None:
        """It is the turn of the next in a line, if there may be room for it."""
        name = self._context.waiting.first_of_line(size, likeness)
        if name is None or self._newcomers is not None:
            return
        if self._rooms.may_hold(self._context.deployment(name), size, self._now):
            self._lines[name] = size, likeness
            self._push(name)

    def _next_of_wish(self, size: Size, rank: Rank) -> None:
        """The next of those that wish the same stands for all of them."""
        name = self._context.waiting.first_of_wish(size, rank)
        if name is not None and self._is_unpassable(self._context.deployment(name)):
            self._wishes[name] = size, rank
            self._push(name)

    def _is_unpassable(self, deployment: Deployment) -> bool:
        """Whether nobody behind it may pass it."""
        context = self._context
        return not context.policy.backfills or _starves(context, deployment, self._now)

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

    def _look_at(self, deployment: Deployment) -> bool:
        """Place it and its gang; False: not now."""
        context, now = self._context, self._now
        gang = _gang(context, deployment)
        self._seen.update(each.deployment for each in gang)
        if why_not_yet(context, deployment) is not None:
            return False
        if self._may_try(gang):
            only = _ways_left(context, gang, self._ahead, now)
            likeness = {_likeness(each, only[each.deployment]) for each in gang}
            is_search = not likeness & self._failed
            if is_search and _place_all(context, gang, only, now):
                self._placed += gang
                self._rooms.forget()
                # Now that their job has GPUs, it is the turn of its other deployments.
                for other in context.job(deployment.job).deployments:
                    if other not in self._seen and self._counts(other):
                        self._push(other)
                return True
            if len(gang) == 1:
                self._failed |= likeness
                searched = is_search and _joins_others(only[deployment.deployment])
                if searched and deployment.trace is not None:
                    searches, size = context.state.searches, _size_key(deployment)
                    searches[size] = searches.get(size, 0) + 1
        if self._is_unpassable(deployment):
            self._ahead.update((each.node_type, each.workers) for each in gang)
        return False

    def _may_try(self, gang: Sequence[Deployment]) -> bool:
        """Whether one of them is new, or capacity is; one that only stands for its wish is not
        tried, because there is no room for it."""
        first, context = gang[0], self._context
        if len(gang) == 1 and first.trace is not None:
            searches = context.state.searches.get(_size_key(first), 0)
            if searches >= context.config.searches_max and not self._rooms.is_free(first):
                return False
        if self._newcomers is not None:
            return any(each.deployment in self._newcomers for each in gang)
        if first.deployment in context.waiting.singles:
            return True
        line = self._lines.get(first.deployment)
        return line is not None and self._rooms.may_hold(first, line[0], self._now)

    def _counts(self, name: DeploymentId) -> bool:
        """Whether it is one of those who wait that this pass is about."""
        if name not in self._context.waiting:
            return False
        if self._newcomers is None or name in self._newcomers:
            return True
        return self._is_unpassable(self._context.deployment(name))


def waiting_order(context: Context, now: float) -> list[Deployment]:
    """All waiting deployments in the order of their turn."""
    waiting = [context.deployment(name) for name in context.waiting]
    return sorted(waiting, key=lambda each: _turn(context, each, now))


def why_not_yet(context: Context, deployment: Deployment) -> tuple[str, str] | None:
    """(reason, rule) for which `deployment` may not have GPUs even where some are free."""
    job = context.job(deployment.job)
    if job.gang and len(job.deployments) < job.gang:
        have = len(job.deployments)
        return f"its gang of {job.gang} has {have} deployments so far", "gang"
    gpus = sum(each.workers for each in _gang(context, deployment))
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
        context.hold(context.job(deployment.job).tenant, deployment, +1)
    return True


def _gang(context: Context, deployment: Deployment) -> list[Deployment]:
    job = context.job(deployment.job)
    if not job.gang:
        return [deployment]
    return [context.deployment(name) for name in job.deployments if name in context.waiting]


def _ways_left(
    context: Context, gang: list[Deployment], ahead: set[_Wish], now: float
) -> dict[DeploymentId, tuple[Way, ...]]:
    """How each of `gang` may get GPUs behind those `ahead`, whom nobody may pass: none that they
    may be waiting for, free or in a group of the size they want."""
    found = {each.deployment: ways(context, each, now) for each in gang}
    if _is_partial(context, context.job(gang[0].job)):
        return found
    for each in gang:
        rivals = [workers for kind, workers in ahead if alike(kind, each.node_type)]
        if each.workers in rivals:
            found[each.deployment] = ()
        elif rivals:
            left = [way for way in found[each.deployment] if way != Way.DEDICATED]
            found[each.deployment] = tuple(left)
    return found


def _joins_others(only: tuple[Way, ...]) -> bool:
    """Whether groups are looked at, and not free GPUs alone."""
    return len(only) > 1 or (len(only) == 1 and only[0] != Way.DEDICATED)


def _starves(context: Context, deployment: Deployment, now: float) -> bool:
    return now - deployment.created_at >= context.config.starvation_bound_s


def _is_partial(context: Context, job: Job) -> bool:
    return any(context.deployment(name).group is not None for name in job.deployments)


def _turn(context: Context, deployment: Deployment, now: float) -> _Turn:
    job = context.job(deployment.job)
    expected_s = job.expected_s or JOB_S
    ratio = (now - deployment.created_at + expected_s) / expected_s
    return (
        not _is_partial(context, job),
        not _starves(context, deployment, now),
        -job.priority,
        tenant_share(context, job.tenant, now),
        -ratio,
        deployment.created_at,
        deployment.deployment,
    )


def tenant_share(context: Context, name: TenantId, now: float) -> float:
    """GPUs the tenant holds, and GPU-seconds it used lately, over its weight."""
    tenant = context.state.tenants.get(name)
    weight = 1.0 if tenant is None else tenant.weight
    used = 0.0 if tenant is None else recent_gpu_seconds(tenant, now)
    gpus, _ = context.holdings(name)
    return (gpus + used / SHARE_WINDOW_S) / weight


def _size_key(deployment: Deployment) -> str:
    return f"{deployment.node_type}/{deployment.workers}"


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
        "priority_max": tenant.priority_max,
    }
