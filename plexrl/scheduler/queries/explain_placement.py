"""Explains why a deployment has no GPUs: which groups are full, which do not fit its trace."""

import math
from typing import TYPE_CHECKING, Final, TypedDict

import numpy as np

from plexrl.ids import DeploymentId, GroupId, TenantId
from plexrl.scheduler.admission.order import blocks_others
from plexrl.scheduler.admission.queues.expected_ends import expected_end
from plexrl.scheduler.admission.queues.gangs import why_not_yet
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.index import CapacityShape, ShapeTable
from plexrl.scheduler.placement.capacity.needs import (
    kept_bytes,
    need_of,
    node_types_compatible,
)
from plexrl.scheduler.placement.capacity.node_pool import fabric_note, kind_of
from plexrl.scheduler.placement.choice.search import find, fitting, nearest
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.contention.colocation import own_rollout_groups
from plexrl.scheduler.placement.contention.service_level import is_tight, waiting_bound
from plexrl.scheduler.placement.fit.feasibility import gang_of, why_impossible
from plexrl.scheduler.placement.placement import modes
from plexrl.scheduler.rules.hrrs import starves_at
from plexrl.scheduler.rules.policies import PlacementMode
from plexrl.scheduler.state.records import Deployment, State
from plexrl.wire.messages.views import AttemptView, Census, Count, NearGroupView

if TYPE_CHECKING:
    from numpy.typing import NDArray

NEAR_MAX = 3
"""Maximum number of groups with the best fit in an explanation."""

_REFUSALS: Final[tuple[tuple[Count, str], ...]] = (
    ("closed", "accept no members now"),
    ("full", "have the maximum number of members"),
    ("without_memory", "lack memory for its state"),
    ("device_full", "lack memory on their GPUs beside what their members keep there"),
    ("loaded", "are too busy"),
)

Reason = tuple[str, str, float | None]
"""(reason, rule, estimated seconds until it goes on; None: unknown)."""


def why_no_gpus(cluster: Cluster, deployment: Deployment, now: float, *, sees_all: bool) -> Reason:
    """(reason, rule, seconds until it may get GPUs) of a deployment without GPUs."""
    if deployment.spec.preemptible:
        return (
            f"it is preemptible, and no shared group of {deployment.spec.workers} GPUs has memory "
            "for its state and no other preemptible deployment",
            "preemptible",
            None,
        )
    held = why_not_yet(cluster, deployment)
    if held is not None:
        return *held, None
    why_never = why_impossible(cluster, deployment)
    if why_never is not None:
        return why_never, "impossible", None
    eta_s = _capacity_eta_s(cluster.capacity, deployment, now)
    what = f"{deployment.spec.workers} GPUs"
    if deployment.spec.node_type:
        what += f" of type {deployment.spec.node_type!r}"
    # Only a search can tell that the job's own service level is what keeps it out.
    rows = attempts(cluster, deployment, now, searches=is_tight(cluster, deployment))
    tried = "; ".join(f"{row['way']}: {row['why']}" for row in rows)
    ahead, others = cluster.queues.waiting.counts.standing(deployment.deployment)
    standing = (
        f"{ahead} of the {others} others that wait have a higher priority or have waited longer"
    )
    rule = "turn" if ahead else "capacity"
    if not ahead and any(row.get("device_full") for row in rows):
        rule = "memory"
    if any(row.get("over_slo") for row in rows):
        rule = "slo"
    reserved = _reservation(cluster.capacity, deployment, now, sees_all)
    if reserved is not None:
        reason, reserved_s = reserved
        reason = f"{reason}; {what} are wanted; {standing}; {tried}"
        return reason, "reservation", eta_s if reserved_s is None else reserved_s
    return f"{what} are not free yet; {standing}; {tried}", rule, eta_s


def _reservation(
    capacity: Capacity, deployment: Deployment, now: float, sees_all: bool
) -> tuple[str, float | None] | None:
    """(what a reservation, its own or another's, means for the deployment; seconds until its own).
    None: no reservation keeps GPUs from it."""
    state, free = capacity.state, capacity.inventory.pool.free_gpus(deployment.spec.node_type)
    own = state.reservations.get(deployment.deployment)
    if own is not None and now < own.at:
        left_s = own.at - now
        return (
            f"it has a reservation: it gets GPUs in {left_s:.0f} s if the running jobs end by "
            "their expected lengths, and others run meanwhile only if that does not delay it",
            left_s,
        )
    if own is not None:
        return (
            f"the time of its reservation has come {own.renewals + 1} times, because jobs last "
            f"longer than expected: until it starts, no other job that waits may take the {free} "
            "free GPUs",
            None,
        )
    if free < deployment.spec.workers:
        return None
    for name, other in sorted(state.reservations.items(), key=lambda each: (each[1].at, each[0])):
        if node_types_compatible(state.deployment(name).spec.node_type, deployment.spec.node_type):
            owner = name_for(state, name, deployment, sees_all=sees_all)
            until = f"for {other.at - now:.0f} s more" if now < other.at else "until that starts"
            return (
                f"free GPUs are reserved {until} for {owner}, which has waited longer than "
                "starvation_bound_s: this one runs before it only if it is expected to end by "
                "then, or takes none of those GPUs",
                None,
            )
    return None


class BlockingView(TypedDict):
    """A deployment that keeps free GPUs from all others until it starts."""

    deployment: DeploymentId
    tenant: TenantId
    workers: int
    free_gpus: int
    since: float
    """When its reservation came for the last time, or its starvation bound."""


def blocking_heads(cluster: Cluster, now: float) -> list[BlockingView]:
    """The starving deployments without a reservation to come, while there are free GPUs that they
    keep from others. A policy without backfilling blocks by design, and has none."""
    state, config = cluster.state, cluster.settings.config
    if not cluster.settings.policy.backfills:
        return []
    if config.reservations:
        since = {name: each.at for name, each in state.reservations.items()}
    else:
        since = {
            name: starves_at(state.deployment(name).created_at, config.starvation_bound_s)
            for name in cluster.queues.waiting
        }
    found: list[BlockingView] = []
    for name, at in sorted(since.items(), key=lambda each: (each[1], each[0])):
        deployment = state.deployment(name)
        free = cluster.capacity.inventory.pool.free_gpus(deployment.spec.node_type)
        if now < at or not free or why_not_yet(cluster, deployment) is not None:
            continue
        if not blocks_others(cluster, deployment, now):
            continue
        found.append(
            {
                "deployment": name,
                "tenant": state.job(deployment.job).tenant,
                "workers": deployment.spec.workers,
                "free_gpus": free,
                "since": at,
            }
        )
    return found


def kept_gpus(cluster: Cluster, now: float) -> int:
    """Number of free GPUs that a reservation or a job that nobody may pass keeps, while a smaller
    unit waits that needs no more GPUs than these. Quotas and memory are not looked at."""
    state, waiting, pool = cluster.state, cluster.queues.waiting, cluster.capacity.inventory.pool
    if not cluster.settings.policy.backfills:
        heads = list(waiting)
    elif cluster.settings.config.reservations:
        heads = list(state.reservations)
    else:
        heads = [DeploymentId(head["deployment"]) for head in blocking_heads(cluster, now)]
    if not heads or not pool.free_gpus():
        return 0
    gangs = [gang_of(cluster.queues, state.deployment(name)) for name in heads]
    largest = max(sum(each.spec.workers for each in gang) for gang in gangs)
    types = {each.spec.node_type: None for gang in gangs for each in gang}
    free = pool.free_gpus() if "" in types else sum(pool.free_gpus(each) for each in types)
    for sizes in waiting.table.all_sizes.in_use():
        wanted = sum(size.workers for size in sizes)
        is_rival = "" in types or any(
            not size.node_type or size.node_type in types for size in sizes
        )
        if wanted <= free and wanted < largest and is_rival:
            return free
    return 0


def attempts(
    cluster: Cluster, deployment: Deployment, now: float, *, searches: bool
) -> list[AttemptView]:
    """Why each placement mode fails now, in the order in which they are tried.

    `searches`: also search the groups with capacity for free slots, which takes milliseconds. Polls
    do not search.
    """
    return [
        _attempt(cluster, deployment, mode, now, searches=searches)
        for mode in modes(cluster, deployment, now)
    ]


def name_for(state: State, name: DeploymentId, subject: Deployment, *, sees_all: bool) -> str:
    """A deployment's name in an explanation of `subject` for its tenant, or for an operator, who
    `sees_all`."""
    owner = state.job(state.deployment(name).job).tenant
    is_shown = sees_all or owner == state.job(subject.job).tenant
    return name if is_shown else "another tenant's job"


def near_groups(
    cluster: Cluster, deployment: Deployment, now: float, *, sees_all: bool
) -> list[NearGroupView]:
    """The other groups in which the deployment's trace fits best; for a tenant those only where
    each member's own demand is known."""
    choices = [
        choice
        for choice in nearest(cluster, deployment, now, strict=False, count=NEAR_MAX)
        if sees_all or not _has_priors(cluster.state, (choice.group, *choice.beside))
    ]
    return [
        {
            "group": choice.group,
            "members": [
                name_for(cluster.state, member, deployment, sees_all=sees_all)
                for member in cluster.state.groups[choice.group].members
            ],
            "shift_s": float(choice.shift_slots),
            "overlap_s": choice.overlap_s,
            "interference_s": choice.interference_s,
            "contention": choice.contention,
            "load": cluster.capacity.inventory.index.load(choice.group),
        }
        for choice in choices
    ]


def _has_priors(state: State, groups: tuple[GroupId, ...]) -> bool:
    """Whether the demand of a member is that of others like it."""
    members = [name for group in groups for name in state.groups[group].members]
    return any(state.deployment(name).demand.has_prior for name in members)


def _attempt(
    cluster: Cluster, deployment: Deployment, mode: PlacementMode, now: float, *, searches: bool
) -> AttemptView:
    if mode == PlacementMode.DEDICATED:
        free = cluster.capacity.inventory.pool.free_gpus(deployment.spec.node_type)
        why = f"{free} GPUs are in no group, {deployment.spec.workers} of one kind are wanted"
        kinds = cluster.capacity.inventory.in_service()
        if free >= deployment.spec.workers:
            why += fabric_note(kind for kind in kinds if kinds[kind] < deployment.spec.workers)
        if cluster.capacity.inventory.draining:
            why += f"; {len(cluster.capacity.inventory.draining)} nodes are being drained"
        return {"way": mode.value, "free_gpus": free, "why": why}
    counts = _census(cluster.capacity, deployment)
    if mode == PlacementMode.SPANNING:
        why = _why_not_spanning(cluster.capacity, deployment)
        return {"way": mode.value, **counts, "over_slo": False, "why": why}
    refused = [f"{counts[name]} {words}" for name, words in _REFUSALS if counts[name]]
    open_count, over_slo = counts["open"], False
    own = f"{waiting_bound(cluster, deployment):.0%} for this one"
    if open_count and not searches:
        refused.append(f"{open_count} have capacity by load and memory")
    elif (
        open_count
        and mode in (PlacementMode.STRICT, PlacementMode.OVERLAP)
        and deployment.demand.trace is not None
    ):
        longest = math.ceil(max(s.duration_s for s in deployment.demand.trace.segments))
        # A prior is the demand of others, which this one's tenant is not told.
        window = "window long enough" if deployment.demand.has_prior else f"window of {longest} s"
        strict = mode == PlacementMode.STRICT
        fits = fitting(cluster, deployment, now, strict=strict)
        if not fits:
            kind = "free at any shift" if strict else "with little enough overlap"
            refused.append(f"{open_count} have no {window} {kind}")
        elif not nearest(cluster, deployment, now, strict=strict, count=1):
            over_slo = True
            refused.append(
                f"in the best of the {len(fits)} where it fits, a member would wait for a greater "
                f"part of its time than its job accepts ({own})"
            )
    elif (
        open_count
        and mode in (PlacementMode.PACKED, PlacementMode.EMPTIEST)
        and find(cluster, deployment, mode, now) is None
    ):
        over_slo = True
        refused.append(
            f"in the {open_count} with capacity, no prediction shows that every member would wait "
            f"for no greater part of its time than its job accepts ({own})"
        )
    elif mode == PlacementMode.COLOCATED:
        refused.append("in none its job's members work only while it does not")
    elif open_count and mode == PlacementMode.CO_EXECUTED:
        refused.append(
            f"{open_count} have too little time in their round, or too little host memory"
        )
    groups = f"{counts['groups']} groups of {deployment.spec.workers} GPUs"
    why = groups + (": " + ", ".join(refused) if refused else "")
    return {"way": mode.value, **counts, "over_slo": over_slo, "why": why}


def _why_not_spanning(capacity: Capacity, deployment: Deployment) -> str:
    own = own_rollout_groups(capacity, deployment)
    if not own:
        return "none of its job's rollouts has GPUs that it could use, too"
    rest = deployment.spec.workers - sum([len(group.gpus) for group in own])
    free = capacity.inventory.pool.free_gpus(deployment.spec.node_type)
    return (
        f"beside the GPUs of its job's rollouts it needs {rest} more: {free} are free, and in no "
        "group has it time so that nobody waits for a greater part of its time than its job accepts"
    )


def _census(capacity: Capacity, deployment: Deployment) -> Census:
    counts: Census = {
        "groups": 0,
        "closed": 0,
        "full": 0,
        "without_memory": 0,
        "device_full": 0,
        "loaded": 0,
        "open": 0,
    }
    duty = capacity.inventory.duty(deployment)
    if deployment.demand.trace is not None:
        duty = deployment.demand.trace.duty
    index = capacity.inventory.index
    for shape in index.shapes(deployment.spec.workers, deployment.spec.node_type):
        for name, count in _census_of(capacity, deployment, shape, duty).items():
            counts[name] += count
    return counts


def _census_of(
    capacity: Capacity, deployment: Deployment, shape: CapacityShape, duty: float
) -> dict[Count, int]:
    """Counts the groups of a shape, each under the first reason against it."""
    table = capacity.inventory.index.table(shape)
    left = np.array([group is not None for group in table.groups])
    counts: dict[Count, int] = {"groups": int(left.sum())}
    reasons: tuple[tuple[Count, NDArray[np.bool_]], ...] = (
        ("closed", ~table.is_open),
        ("full", table.members >= capacity.settings.config.residents_max),
        ("without_memory", table.state_bytes_free < deployment.spec.state_bytes),
        ("device_full", ~_fits_on_device(table, deployment)),
        ("loaded", table.load + duty > capacity.settings.config.load_bound),
    )
    for name, against in reasons:
        counts[name] = int((left & against).sum())
        left &= ~against
    counts["open"] = int(left.sum())
    return counts


def _fits_on_device(table: ShapeTable, deployment: Deployment) -> "NDArray[np.bool_]":
    if table.is_virtual:
        return np.ones(len(table.groups), dtype=bool)
    return table.fit_on_device(need_of(deployment).device_bytes, kept_bytes(deployment))


def _capacity_eta_s(capacity: Capacity, deployment: Deployment, now: float) -> float | None:
    """Seconds until jobs with a declared length are expected to have released enough suitable GPUs,
    ignoring the deployments ahead; None if too few jobs declare a length."""
    free = dict.fromkeys(capacity.inventory.sizes(), 0)
    free |= dict(capacity.inventory.pool.free_by_kind(deployment.spec.node_type))
    free = {
        kind: gpus
        for kind, gpus in free.items()
        if deployment.spec.node_type in ("", kind.node_type)
    }
    ends = []
    for group in capacity.state.groups.values():
        jobs = [capacity.state.job(capacity.state.deployment(name).job) for name in group.members]
        if jobs and all(job.expected_s and job.job != deployment.job for job in jobs):
            end_s = max(expected_end(capacity.state, job, now) for job in jobs) - now
            kind = kind_of(capacity.state.nodes[group.gpus[0].node])
            ends.append((end_s, kind, len(group.gpus)))
    for end_s, kind, gpus in sorted(ends):
        if kind in free:
            free[kind] += gpus
            if free[kind] >= deployment.spec.workers:
                return end_s
    return None
