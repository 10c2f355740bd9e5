"""Estimates when a waiting deployment gets its group, and measures the error of the estimates.

For a sample of the bursts that have to wait, the estimate and its 80 % interval are made on arrival
and later compared with the real start. The errors give the next intervals
(`state.demand.wait_intervals`).
"""

from itertools import accumulate

from plexrl.ids import DeploymentId
from plexrl.scheduler.dispatch.candidates.busy_time import group_free_s, under_way_s
from plexrl.scheduler.dispatch.candidates.readiness import candidate, wants_the_group
from plexrl.scheduler.rules.hrrs import Candidate
from plexrl.scheduler.rules.ordering import SortKey, sort_key
from plexrl.scheduler.rules.settings import Situation, Step
from plexrl.scheduler.rules.switch_cost import load_after_s
from plexrl.scheduler.state.demand.wait_intervals import interval
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import RATIO_BOUNDS, Deployment, EtaErrors, Group
from plexrl.wire.messages.cluster_views import EtaQualityView

SAMPLE_EACH = 8
"""One in this many waits is estimated on arrival, which measures the error at an eighth of the
cost. Explicit queries are always answered."""
SAMPLE_ALL = 1000
"""So many waits of a cluster are all estimated before that, so that a small or new one soon knows
its errors."""


def goes_before(
    situation: Situation, group: Group, deployment: Deployment, now: float
) -> list[Candidate]:
    """Waiting members that go before `deployment`, in order."""
    state = situation.state
    return _before(situation, group, deployment, candidate(state, deployment), now)


def _before(
    situation: Situation,
    group: Group,
    deployment: Deployment,
    burst: Candidate,
    now: float,
) -> list[Candidate]:
    """Waiting members that go before `burst`, that of `deployment`, in order."""
    state, settings = situation.state, situation.settings
    ordering, bound_s = settings.ordering, settings.config.starvation_bound_s
    own = sort_key(ordering, burst, now, bound_s)
    found: list[tuple[SortKey, Candidate]] = []
    names = group.members
    if deployment.placement.spans:
        # Of all its groups: it gets them together.
        groups = state.groups_of(deployment)
        names = list(dict.fromkeys([name for group in groups for name in group.members]))
    for name in names:
        if name in (deployment.deployment, group.holder):
            continue
        rival = state.deployment(name)
        if not rival.work.queue or not wants_the_group(state, rival, now):
            continue
        other = candidate(state, rival)
        key = sort_key(ordering, other, now, bound_s)
        if key < own:
            found.append((key, other))
    # Keys end in the member's name: no two are equal, so candidates are not compared.
    found.sort()
    return [other for _, other in found]


def start_s(situation: Situation, group: Group, deployment: Deployment, now: float) -> float:
    """Estimated seconds until the head of `deployment`'s queue starts on its group."""
    state = situation.state
    if group.holder == deployment.deployment:
        return under_way_s(state, deployment, now)
    if group.incoming == deployment.deployment:
        awaited = [group for group in state.groups_of(deployment) if group.holder is not None]
        last = max(awaited, key=lambda each: group_free_s(state, each, now))
        assert last.holder is not None, "only groups with a holder are awaited"
        holder = state.deployment(last.holder)
        return group_free_s(state, last, now) + load_after_s(state, holder, deployment)
    own = candidate(state, deployment)
    rivals = _before(situation, group, deployment, own, now)
    # What goes before it on one of its groups runs beside what does on another.
    free_s = {group.group: group_free_s(state, group, now) for group in state.groups_of(deployment)}
    for rival in rivals:
        for name in state.deployments[DeploymentId(rival.name)].placement.groups:
            if name in free_s:
                free_s[name] += rival.service_s + rival.setup_s
    return max(free_s.values()) + own.setup_s


def record_estimate(step: Step, deployment: Deployment, operation: Operation) -> None:
    """Record the estimated start of an operation that has to wait for its group."""
    state, now = step.state, step.now
    if len(deployment.work.queue) > 1:
        return
    groups = state.groups_of(deployment)
    if not groups or groups[0].holder == deployment.deployment:
        return
    group = groups[0]
    alone = all(len(group.members) == 1 and not group.fillers for group in groups)
    if alone or deployment.spec.preemptible or not deployment.wpg.is_ready or deployment.spec.pace:
        # Waits for paced deployments are of modelled times, and say nothing of computed ones.
        return
    errors = state.eta_errors
    errors.waits += 1
    if errors.waits % SAMPLE_EACH == 1 or errors.waits <= SAMPLE_ALL:
        wait_s = start_s(step, group, deployment, now)
        low_s, high_s = interval(group.wait_errors, errors.newest, wait_s)
        operation.expected_at = now + wait_s
        operation.expected_within = now + low_s, now + high_s


def eta_quality(errors: EtaErrors) -> EtaQualityView:
    """How good the estimates were so far."""
    bounds = (*map(str, RATIO_BOUNDS), "+Inf")
    return {
        "estimates": errors.count,
        "mean_error_s": errors.absolute_s / errors.count if errors.count else None,
        "mean_late_s": errors.late_s / errors.count if errors.count else None,
        "slipped": errors.slipped,
        "early": errors.early,
        "late": errors.late,
        "ratios": dict(zip(bounds, accumulate(errors.ratios), strict=True)),
        "ratio_sum": errors.ratio_sum,
    }
