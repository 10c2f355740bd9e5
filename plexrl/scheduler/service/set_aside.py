"""Steps of events that failed by a fault of ours: left out from then on, in every replay too.

An event is in the journal before the core sees it, and every replay does what the core did. So an
event that the core cannot take in would end the scheduler at every start. Instead the step that
failed (see `plexrl.scheduler.core.advance`) is written down beside the event, the core is made anew
from the newest snapshot and the events behind it, and the event is taken in without that step.
Operators are told: by the log, and by `plexrl status`.
"""

import logging
from typing import Any, Final

import msgspec

from plexrl.errors import LeaseLostError, NotFoundError, SchedulerFaultError, StorageError
from plexrl.ids import DeploymentId, JobId
from plexrl.scheduler.core.advance import EVENT, Fault
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.journal.journal import Journal
from plexrl.scheduler.state import events as ev

LOG = logging.getLogger(__name__)

NOTHING_ASIDE: Final[dict[str, Any]] = {"steps_set_aside": 0, "newest_set_aside": ""}

STEPS_MAX = 8
"""Of one event; an event of which more fail is left out whole."""


class SetAside:
    """What the journal says is left out, and what is added to it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._steps = journal.steps_set_aside()
        self._newest = ""

    def steps(self, position: int) -> frozenset[str]:
        """The steps of the event at `position` that are left out."""
        return self._steps.get(position, frozenset())

    def view(self) -> dict[str, Any]:
        """For operators: how much is left out, and the newest of this process."""
        return {
            "steps_set_aside": sum(len(steps) for steps in self._steps.values()),
            "newest_set_aside": self._newest,
        }

    def add(self, position: int, event: ev.Event, fault: Fault) -> None:
        """Leave out the step that failed, or the whole event where that is not enough.

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
            "a fault of PlexRL: it is left out from now on, please report it: %s",
            self._newest,
            exc_info=fault,
        )
        try:
            self._journal.set_aside(position, step, error)
        except LeaseLostError:
            raise
        except StorageError as refused:
            # The next replay meets the same fault and writes it down then.
            LOG.error("what is left out could not be written down: %s", refused)


def answer(event: ev.Event, position: int) -> SchedulerFaultError:
    """What whoever sent an event that was left out whole is told."""
    return SchedulerFaultError(
        f"the scheduler has a fault that this {type(event).__name__} meets: nothing was changed, "
        f"and the same request meets it again; give the operator the number {position}",
        position=position,
    )


def follow_up(core: SchedulerCore, event: ev.Event, now: float) -> ev.Event | None:
    """What is reported instead of a report that was left out whole, so that nobody waits for it for
    ever: first that the workers must start over, and if that cannot be taken in either, that the
    job has failed. None: there is nothing to say."""
    reason = "a fault of the scheduler: see its log"
    try:
        match event:
            case ev.OperationFailed(state_intact=False):
                name = DeploymentId(core.operation_view(event.operation, now)["deployment"])
                return _failed(core, name, reason, now)
            case ev.OperationFinished() | ev.OperationFailed():
                error = SchedulerFaultError(reason).to_wire()
                return ev.OperationFailed(
                    operation=event.operation,
                    token=event.token,
                    error_json=msgspec.json.encode(error).decode(),
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
    job = JobId(core.deployment_view(name, now)["job"])
    return ev.JobFinished(job=job, outcome="failed", reason=reason)
