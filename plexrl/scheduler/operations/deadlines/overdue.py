"""Replaces the workers of runs that have missed their bound, and lists those that are overdue.

A hung worker answers no request, and its operation never ends: a collective whose other rank is
gone, a stalled file system, a deadlock. The remedy is that of a lost worker: the processes are
ended, the WPG starts again from its last complete version and repeats what followed, bit for bit.
An operation that hangs each time is at last a failure of its job (`launch_attempts`). A move that
hangs is a fault of the machine: it is tried again, at ever longer intervals.
"""

from typing import NamedTuple, TypedDict

from plexrl.ids import DeploymentId, OperationId
from plexrl.scheduler.operations.deadlines.bounds import BoundedRun, is_launching, runs, watch
from plexrl.scheduler.rules.settings import Situation, Step
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.records import Deployment


class OverdueView(TypedDict):
    """A run that is far past its estimate."""

    deployment: DeploymentId
    operation: OperationId
    """Empty for a start of processes."""
    kind: str
    began_at: float
    """When it was sent to the workers, in seconds on the scheduler's clock."""
    expected_at: float | None
    """When it was expected to end; None: it was not known how long it takes."""
    replaced_at: float
    """When its workers are replaced if it has not ended."""


class Overrun(NamedTuple):
    """A deployment whose workers are to be replaced."""

    deployment: Deployment
    reason: str
    counts: bool
    """It counts as a failure of the WPG."""


def find_overrun(step: Step, name: DeploymentId) -> Overrun | None:
    """A deployment with a run that has missed its bound; None if it has none, or is gone. As long
    as something runs, sets the timer for the next look."""
    state, now = step.state, step.now
    deployment = state.deployments.get(name)
    if deployment is None or now < deployment.work.watch_at:
        return None
    deployment.work.watch(0.0)
    found = [*runs(step, deployment)]
    if not found or not state.overdue_s:
        # The next start sets a timer.
        return None
    missed = [each for each in found if each.due_at <= now]
    if missed and (state.routers or not missed[0].operation):
        deployment.wpg.processes.overrun()
        return Overrun(deployment, _reason(missed[0], now), not missed[0].is_move)
    # Without a router no report can arrive, and the next one gets all runs again. A run that begins
    # meanwhile is due no earlier than after the least bound.
    latest = now + state.overdue_s
    deployment.work.watch(latest if missed else min(latest, *[each.due_at for each in found]))
    step.effects.wake(deployment.work.watch_at, timers.overdue(name))
    return None


def _reason(missed: BoundedRun, now: float) -> str:
    ran_s = now - missed.began_at
    if not missed.operation:
        return f"they were not ready {ran_s:.0f} s after their start"
    length = "is of unknown length"
    if missed.expected_s is not None:
        length = f"was expected to take {missed.expected_s:.1f} s"
    return (
        f"{missed.kind} {missed.operation!r} {length} and did not end in {ran_s:.0f} s, so its "
        "workers were replaced"
    )


def watch_all(step: Step) -> None:
    """Look at the runs of all deployments: the setting may be new, or the snapshot old. No report
    could arrive before, so all bounds count from now on."""
    state, now = step.state, step.now
    state.issued_at = now
    if not state.overdue_s:
        return
    for deployment in state.deployments.values():
        if (
            deployment.work.running
            or deployment.wpg.moving is not None
            or is_launching(state, deployment)
        ):
            watch(step, deployment)


def overdue_view(situation: Situation, now: float) -> list[OverdueView]:
    """The runs that are overdue."""
    state = situation.state
    if not state.overdue_s:
        return []
    return [
        {
            "deployment": deployment.deployment,
            "operation": run.operation,
            "kind": run.kind,
            "began_at": run.began_at,
            "expected_at": run.expected_at,
            "replaced_at": run.due_at,
        }
        for deployment in state.deployments.values()
        for run in runs(situation, deployment)
        if run.is_overdue(now) and (state.routers or not run.operation)
    ]
