"""Explains why an operation waits, with an estimated start. Every poll carries the answer."""

from dataclasses import dataclass

from plexrl.ids import DeploymentId
from plexrl.scheduler.dispatch.bursts import bound_s
from plexrl.scheduler.dispatch.candidates.busy_time import (
    OVERDUE_S_MIN,
    is_of_unknown_length,
    last_free_group,
    overdue_s,
    under_way_s,
)
from plexrl.scheduler.dispatch.candidates.readiness import candidate, queued_s, runs_on_stored_state
from plexrl.scheduler.dispatch.slack_guard import holds_back
from plexrl.scheduler.operations.deadlines.bounds import runs
from plexrl.scheduler.operations.deadlines.durations import run_s
from plexrl.scheduler.operations.held.unreturned_memory import reason_for
from plexrl.scheduler.operations.submission.queue_order import position_in_queue
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.queries.eta import goes_before, start_s
from plexrl.scheduler.queries.explain_placement import Reason, name_for, why_no_gpus
from plexrl.scheduler.recovery.evacuation import awaited
from plexrl.scheduler.recovery.relocation import is_stopping
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.state.demand.wait_intervals import interval
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.operations import OperationKind, OperationState

OWN_WORK = ("running", "order", "dependency")
"""Rules by which an operation waits for work of its own job, or runs. The errors of past waits for
groups say nothing of it: with them, far more than 80 % would start inside the interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The reason for which an operation waits."""

    reason: str
    rule: str
    """`order`, `burst`, `slack`, `launching`, `recovering`, `migrating`, `relocation`, `capacity`,
    `slo`, `quota`, `gang`, `impossible`, `turn`, `dependency`, `backoff`, `held`, `no room`,
    `switch`, `preemptible`, `router`, `running`, `overdue`, or the name of the ordering rule."""
    holder: str | None
    """The holder of the group's lock; anonymous for a tenant if it belongs to another one."""
    eta_s: float | None
    """Estimated seconds until it starts, or until it ends if it runs; None if unknown, also once
    the estimate has passed."""
    eta_low_s: float | None
    """It starts between `eta_low_s` and `eta_high_s` in 80 % of the cases; None without an estimate
    of waiting for a group, also of an operation behind others of its own job."""
    eta_high_s: float | None
    position: int
    """Number of operations of the same deployment ahead of it."""


def explain(
    cluster: Cluster, operation: Operation, now: float, *, sees_all: bool = False
) -> Explanation | None:
    """The explanation of an unfinished operation for its tenant, or for an operator, who
    `sees_all`; None for a finished one."""
    if operation.state.is_final:
        return None
    deployment = cluster.state.deployment(operation.deployment)
    group = last_free_group(cluster.state, deployment, now)
    holder = None
    if group is not None and group.holder is not None:
        holder = name_for(cluster.state, group.holder, deployment, sees_all=sees_all)
    reason, rule, eta_s = _reason(cluster, operation, deployment, group, now, sees_all)
    if _is_behind_unknown(cluster.state, deployment, group):
        eta_s = None
    position = _position(cluster.state, deployment, operation)
    low_s = high_s = None
    if eta_s is not None and group is not None and rule not in OWN_WORK:
        low_s, high_s = interval(group.wait_errors, cluster.state.eta_errors.newest, eta_s)
    return Explanation(
        reason=reason,
        rule=rule,
        holder=holder,
        eta_s=eta_s,
        eta_low_s=low_s,
        eta_high_s=high_s,
        position=position,
    )


def _is_behind_unknown(state: State, deployment: Deployment, group: Group | None) -> bool:
    """Whether something runs before an operation of which nothing tells when it ends."""
    names = {deployment.deployment, None if group is None else group.holder}
    return any(
        is_of_unknown_length(state, state.deployments[name]) for name in names if name is not None
    )


def _reason(
    cluster: Cluster,
    operation: Operation,
    deployment: Deployment,
    group: Group | None,
    now: float,
    sees_all: bool,
) -> Reason:
    if operation.state == OperationState.RUNNING:
        return _why_running(cluster, operation, deployment, now)
    if deployment.wpg.state == WpgState.WAITING or group is None:
        return why_no_gpus(cluster, deployment, now, sees_all=sees_all)
    state, backoff = cluster.state, deployment.wpg.backoff
    not_ready = _why_not_ready(state, deployment, sees_all)
    if not_ready is not None:
        return not_ready
    ahead = queued_s(state, deployment, _position(state, deployment, operation))
    if operation.after is not None:
        dependency = state.operations.get(operation.after)
        if dependency is not None and not dependency.state.is_final:
            found = explain(cluster, dependency, now, sees_all=sees_all)
            eta_s = None if found is None else found.eta_s
            why = "" if found is None else f": {found.reason}"
            return f"the weights it pulls are not published yet{why}", "dependency", eta_s
    if now < backoff.until:
        wait_s = backoff.until - now
        why = reason_for(state, deployment, sees_all=sees_all)
        if backoff.code:
            return f"it is held and will be tried again: {why}", "held", wait_s + ahead
        return f"a switch to it failed ({why})", "backoff", wait_s + ahead
    if group.holder == deployment.deployment:
        own = _why_after_its_own(cluster, operation, deployment, group, now, ahead)
        if own is not None:
            return own
    if runs_on_stored_state(deployment):
        wait_s = under_way_s(state, deployment, now)
        eta_s = max(start_s(cluster, group, deployment, now), wait_s) + ahead
        return f"{_on_stored_state(deployment)} first", "order", eta_s
    if deployment.spec.preemptible:
        return _why_no_idle_time(state, group)
    return _why_another_holds(cluster, deployment, group, now, ahead, sees_all)


def _on_stored_state(deployment: Deployment) -> str:
    """What runs on the stored state of a deployment."""
    if any(run.kind is OperationKind.OPTIM_STEP for run in deployment.work.running.values()):
        return "an optimizer step of its deployment is made in host memory"
    return "a checkpoint of its deployment is saved from the stored state"


def _why_running(
    situation: Situation, operation: Operation, deployment: Deployment, now: float
) -> Reason:
    """How long an operation that was sent to the workers is expected to take."""
    if not situation.state.routers:
        return "no router is connected; it is sent again once one connects", "router", None
    began_at = operation.started_at if operation.started_at is not None else now
    expected_s = run_s(situation.state, deployment, operation)
    if expected_s is None:
        return "it is running, and it is not known yet how long that takes", "running", None
    if late := _overdue(situation, deployment, now):
        return f"it is running, expected to take {expected_s:.1f} s, {late}", "running", None
    return "it is running", "running", max(0.0, expected_s - (now - began_at))


def _why_not_ready(state: State, deployment: Deployment, sees_all: bool) -> Reason | None:
    """Why a deployment with GPUs can start nothing; None: its workers are ready."""
    wpg = deployment.wpg
    if wpg.state == WpgState.LAUNCHING:
        return "its workers are starting", "launching", None
    if wpg.state in (WpgState.RECOVERING, WpgState.MIGRATING):
        nodes = ", ".join(awaited(state, deployment))
        if nodes:
            return f"it waits for {nodes} to return with its GPUs and state", "recovering", None
    if wpg.processes.launch_at is not None:
        why = reason_for(state, deployment, sees_all=sees_all)
        return (
            f"its workers had not enough memory to start, and are started again: {why}",
            "no room",
            None,
        )
    if wpg.state == WpgState.RECOVERING:
        why = f"moved ({wpg.moves.last_reason})" if wpg.moves.last_reason else "lost"
        if wpg.backoff.code:
            why = f"stopped ({reason_for(state, deployment, sees_all=sees_all)})"
        return f"its workers were {why} and are starting again", "recovering", None
    if wpg.state == WpgState.MIGRATING:
        nodes = ", ".join(wpg.stored.awaited_nodes)
        return f"its state is being copied to {nodes}", "migrating", None
    if wpg.moves.planned is not None and is_stopping(state, deployment):
        return f"it is about to be moved: {wpg.moves.planned.reason}", "relocation", None
    return None


def _why_after_its_own(
    situation: Situation,
    operation: Operation,
    deployment: Deployment,
    group: Group,
    now: float,
    ahead_s: float,
) -> Reason | None:
    """Why it waits though its deployment holds the group; None: the deployment gives way."""
    if late := _overdue(situation, deployment, now):
        return f"an operation of its deployment before it is {late}", "overdue", None
    eta_s = start_s(situation, group, deployment, now) + ahead_s
    if deployment.wpg.moving is not None or deployment.work.replay.replaying:
        return "its model's state is being moved", "switch", eta_s
    if not deployment.spec.preemptible or deployment.work.queue[0] != operation.operation:
        return "operations of its deployment that were submitted before it", "order", eta_s
    return None


def _why_another_holds(
    situation: Situation,
    deployment: Deployment,
    group: Group,
    now: float,
    ahead: float,
    sees_all: bool,
) -> Reason:
    state = situation.state
    eta_s = start_s(situation, group, deployment, now) + ahead
    if group.incoming == deployment.deployment and not _is_late(state, group, now):
        return "the group is being handed to it", "switch", eta_s
    rule = situation.settings.config.ordering
    if group.holder is None:
        own = candidate(state, deployment)
        wait_s = holds_back(situation, deployment, own, now)
        if wait_s is not None:
            return "a job with exclusive slots is expected first", "slack", eta_s + wait_s
        return "the group's lock is about to be granted", rule, eta_s
    holder = state.deployment(group.holder)
    who = name_for(state, holder.deployment, deployment, sees_all=sees_all)
    if holder.spec.preemptible and holder.wpg.moving is None:
        # It is interrupted at once, however long its run was expected to take.
        return f"{who} used the idle time of the group, and gives way", "preemptible", eta_s
    if late := _overdue(situation, holder, now):
        return f"{who} has the group, and what it does there is {late}", "overdue", None
    if holder.wpg.moving is not None:
        return "the group is being switched", "switch", eta_s
    before = goes_before(situation, group, deployment, now)
    if before:
        names = [
            name_for(state, DeploymentId(each.name), deployment, sees_all=sees_all)
            for each in before
        ]
        return f"{', '.join(names)} goes first by the rule {rule}", rule, eta_s
    passed = _passed(holder, now)
    if passed:
        began_at = holder.demand.burst.started_at or now
        left_s = max(0.0, began_at + bound_s(situation, holder) - now)
        reason = f"{who} is in the middle of its burst, {passed}; it yields in {left_s:.0f} s"
        return f"{reason} at the latest", "burst", None
    return f"{who} is in the middle of its burst", "burst", eta_s


def _passed(holder: Deployment, now: float) -> str:
    """What is said of a burst that no estimate covers any more; empty: one does."""
    burst = holder.demand.burst
    if burst.started_at is None:
        return ""
    usual_s = holder.demand.burst_s(burst.tokens)
    passed_s = now - burst.started_at - usual_s
    if passed_s <= OVERDUE_S_MIN:
        return ""
    return f"{passed_s:.0f} s longer than usual" if usual_s else "whose length is not known yet"


def _is_late(state: State, group: Group, now: float) -> bool:
    return group.holder is not None and overdue_s(state, state.deployment(group.holder), now) > 0.0


def _overdue(situation: Situation, deployment: Deployment, now: float) -> str:
    """By how much what the deployment runs has passed its estimate, and what will happen; empty:
    it has not."""
    state = situation.state
    late_s = overdue_s(state, deployment, now)
    if not late_s:
        return ""
    text = f"overdue for {late_s:.0f} s"
    if not state.overdue_s:
        return text
    left_s = min(run.due_at for run in runs(situation, deployment)) - now
    return f"{text}; its workers are replaced in {max(0.0, left_s):.0f} s if it does not end"


def _why_no_idle_time(state: State, group: Group) -> Reason:
    """Why a filler does not have the lock: it is unknown when it gets it."""
    deployments = map(state.deployment, group.members)
    if any(
        deployment.work.queue or deployment.work.running or deployment.wpg.moving
        for deployment in deployments
    ):
        return (
            f"members of group {group.group} work; it is preemptible, and uses their idle time",
            "preemptible",
            None,
        )
    return (
        f"members of group {group.group} are expected before it could use the GPUs for as long as "
        "the switches take",
        "preemptible",
        None,
    )


def _position(state: State, deployment: Deployment, operation: Operation) -> int:
    """Number of queued operations ahead of it; 0 if it is not queued."""
    if operation.state != OperationState.PENDING:
        return 0
    return position_in_queue(state, deployment, operation)
