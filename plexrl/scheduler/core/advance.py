"""What an event leaves to do: due timers, placements, groups to decide again, cycles that ended.

Each step of this is named, and so is the event itself. A step that raises is a fault of ours, never
a refusal: state has changed by then. `Fault` names the step, so that whoever replays the event on a
sound state can leave that one step out and keep the rest.
"""

from typing import Final

from plexrl.ids import DeploymentId, GroupId, JobId, NodeId, OperationId
from plexrl.scheduler.admission.deadlocks import break_deadlocks
from plexrl.scheduler.admission.preemption import preempt_detached
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.dispatch.group_step import advance
from plexrl.scheduler.jobs.cycles import cycle_over
from plexrl.scheduler.jobs.lifecycle import detach_or_cancel, launch_if_due, place_waiting
from plexrl.scheduler.jobs.retention import forget_ended
from plexrl.scheduler.operations.cancellation import deadline_passed
from plexrl.scheduler.placement.evacuation import reconcile_node
from plexrl.scheduler.placement.relocation import send_migration
from plexrl.scheduler.state.machines.wpg_states import WpgState

EVENT: Final = "event"
"""The step that is the event itself."""

GIVING_WAY: Final = "giving way"

NONE: Final[frozenset[str]] = frozenset()


class Fault(Exception):
    """A step of an event raised what is no refusal. The core's state is of no use any more."""

    def __init__(self, step: str, error: Exception) -> None:
        super().__init__(step)
        self.step = step
        self.error = error
        """What it raised; compiled code keeps no `__cause__`."""


def work_off(context: Context, now: float, skipped: frozenset[str]) -> None:
    """Do all that is to be done, but for the steps named in `skipped`.

    Raises:
        Fault: a step failed.
    """
    timers, state = context.timers, context.state
    step, name = "timers", ""
    try:
        if timers and timers[0][0] <= now:
            for what in context.due(now):
                step, name = "timer", what
                if not skipped or f"timer {what}" not in skipped:
                    _look_again(context, what, now)
        dirty, cycles_over = context.dirty, context.cycles_over
        step, name = GIVING_WAY, ""
        while (
            dirty
            or cycles_over
            or context.place_waiting
            or context.newcomers
            or (GIVING_WAY not in skipped and preempt_detached(context, now))
        ):
            if context.place_waiting or context.newcomers:
                step, name = "placement", ""
                if step in skipped:
                    context.place_waiting = False
                    context.newcomers.clear()
                else:
                    place_waiting(context, now)
                    break_deadlocks(context, now)
            while dirty:
                touched = next(iter(dirty))
                del dirty[touched]
                group = state.groups.get(touched)
                if group is not None:
                    step, name = "group", touched
                    if not skipped or f"group {name}" not in skipped:
                        advance(context, group, now)
            while cycles_over:
                deployment = state.deployments[next(iter(cycles_over))]
                del cycles_over[deployment.deployment]
                step, name = "cycle", deployment.deployment
                if not skipped or f"cycle {name}" not in skipped:
                    cycle_over(context, deployment, now)
            step, name = GIVING_WAY, ""
        step, name = "forgetting", ""
        if len(state.ended) > context.ended_jobs and step not in skipped:
            forget_ended(context)
    except MemoryError:
        raise
    except Exception as error:
        raise Fault(f"{step} {name}".rstrip(), error) from error


def has_work(context: Context) -> bool:
    """Whether anything has been done or is left to do: so little as a refused event must not do."""
    return bool(
        context.commands
        or context.discards
        or context.dirty
        or context.newcomers
        or context.cycles_over
        or context.place_waiting
    )


def _look_again(context: Context, what: str, now: float) -> None:
    kind, _, name = what.partition(":")
    match kind:
        case "group":
            context.touch(GroupId(name))
        case "deadline":
            deadline_passed(context, OperationId(name), now)
        case "placement":
            context.place_waiting = context.place_waiting or bool(context.waiting)
        case "node" if name in context.state.nodes:
            reconcile_node(context, NodeId(name), now)
        case "launch" if name in context.state.deployments:
            launch_if_due(context, context.deployment(DeploymentId(name)), now)
        case "migration":
            deployment = context.state.deployments.get(DeploymentId(name))
            if deployment is not None and deployment.state == WpgState.MIGRATING:
                send_migration(context, deployment)
        case "job" if (job := context.state.jobs.get(JobId(name))) is not None:
            detach_or_cancel(context, job, now)
