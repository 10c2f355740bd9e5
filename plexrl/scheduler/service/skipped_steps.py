"""Records steps of events that failed because of a bug, so that every replay skips them too.

An event is in the journal before the core handles it, and a replay repeats what the core did. So an
event that the core cannot handle would stop the scheduler at every start. Instead the failed step
(see `plexrl.scheduler.core.advance`) is recorded in the journal (table `set_aside`), the core is
rebuilt from the newest snapshot and the later events, and the event is handled without that step.
The log and `plexrl status` report it to operators.
"""

import logging
from typing import Final

from plexrl.errors import LeaseLostError, NotFoundError, SchedulerFaultError, StorageError
from plexrl.ids import DeploymentId
from plexrl.scheduler.core.advance import EVENT, Fault
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.service.journal.journal import Journal
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages.cluster_views import SkippedStepsView

LOG = logging.getLogger(__name__)

NONE_SKIPPED: Final[SkippedStepsView] = {"steps_set_aside": 0, "newest_set_aside": ""}

STEPS_MAX = 8
"""Maximum skipped steps of one event; if more fail, the whole event is skipped."""


class SkippedSteps:
    """The skipped steps in the journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._steps = journal.skipped_steps()
        self._newest = ""

    def steps(self, position: int) -> frozenset[str]:
        """The skipped steps of the event at `position`."""
        return self._steps.get(position, frozenset())

    def view(self) -> SkippedStepsView:
        """For operators: the number of skipped steps, and the newest one of this process."""
        return {
            "steps_set_aside": sum(len(steps) for steps in self._steps.values()),
            "newest_set_aside": self._newest,
        }

    def add(self, position: int, event: ev.Event, fault: Fault) -> None:
        """Skip the step that failed, or the whole event if that is not enough.

        Raises:
            LeaseLostError: another scheduler leads.
        """
        steps, step = self.steps(position), fault.step
        if step in steps or len(steps) >= STEPS_MAX:
            step = EVENT
        self._steps[position] = steps | {step}
        error = repr(fault.error)
        self._newest = f"event {position} ({type(event).__name__}), step {step!r}: {error}"[:1000]
        LOG.critical(
            "a bug in PlexRL: the step is skipped from now on, please report it: %s",
            self._newest,
            exc_info=fault,
        )
        try:
            self._journal.skip_step(position, step, error)
        except LeaseLostError:
            raise
        except StorageError as refused:
            # The next replay meets the same bug and records it then.
            LOG.error("the skipped step could not be recorded: %s", refused)


def fault_error(event: ev.Event, position: int) -> SchedulerFaultError:
    """The error for the sender of an event that was skipped as a whole."""
    return SchedulerFaultError(
        f"the scheduler has a bug that this {type(event).__name__} triggers: nothing was changed, "
        f"and the same request triggers it again; give the operator the number {position}",
        position=position,
    )


def substitute_report(core: SchedulerCore, event: ev.Event, now: float) -> ev.Event | None:
    """The event to report in place of a skipped report, so that nothing waits for it for ever:
    first that the workers must restart, and if that fails too, that the job has failed. None: no
    event is needed."""
    reason = "a bug in the scheduler: see its log"
    try:
        match event:
            case ev.OperationFailed(state_intact=False):
                name = core.operation_view(event.operation, now)["deployment"]
                return _failed(core, name, reason, now)
            case ev.OperationFinished() | ev.OperationFailed():
                return ev.OperationFailed(
                    operation=event.operation,
                    token=event.token,
                    error=SchedulerFaultError(reason).to_wire(),
                    state_intact=False,
                )
            case ev.WorkerReady():
                return ev.WorkerExited(
                    deployment=event.deployment,
                    rank=event.rank,
                    incarnation=event.incarnation,
                    reason=reason,
                )
            case ev.WorkerExited():
                return _failed(core, event.deployment, reason, now)
    except NotFoundError:
        return None
    return None


def _failed(core: SchedulerCore, name: DeploymentId, reason: str, now: float) -> ev.Event:
    job = core.deployment_view(name, now)["job"]
    return ev.JobFinished(job=job, outcome="failed", reason=reason)
