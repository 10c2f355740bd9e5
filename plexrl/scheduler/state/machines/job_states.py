"""The job's state machine (PlexRL §5.2.3)."""

from enum import StrEnum
from typing import Final

from plexrl.scheduler.state.machines.transitions import Machine


class JobState(StrEnum):
    QUEUED = "QUEUED"
    """Waits for GPUs."""
    ADMITTED = "ADMITTED"
    """All its deployments have GPUs."""
    PROFILING = "PROFILING"
    """Its demand is not known yet, or the policy needs no profile and its first cycle runs."""
    RUNNING = "RUNNING"
    """Profiling is over, and the state of its training WPG was loaded and not offloaded since."""
    SUSPENDED = "SUSPENDED"
    """The state of its training WPG was offloaded, for another member or for a move."""
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        return self in FINAL


FINAL = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})
"""States that a job does not leave."""


class JobTrigger(StrEnum):
    """What can happen to a job."""

    PLACED = "placed"
    """A deployment got GPUs, and now all deployments have some."""
    DISPLACED = "displaced"
    """A deployment lost its GPUs and waits for others."""
    GRANTED = "granted"
    """The state of its training WPG is on the GPUs."""
    CYCLE_ENDED = "cycle_ended"
    """A training cycle is over, and the job needs no further profiling."""
    OFFLOADED = "offloaded"
    """The state of its training WPG left the GPUs."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


_QUEUED = JobState.QUEUED
_ADMITTED = JobState.ADMITTED
_PROFILING = JobState.PROFILING
_RUNNING = JobState.RUNNING
_SUSPENDED = JobState.SUSPENDED
_LIVE = (_QUEUED, _ADMITTED, _PROFILING, _RUNNING, _SUSPENDED)

TRANSITIONS: dict[tuple[JobState, JobTrigger], JobState] = {
    (_QUEUED, JobTrigger.PLACED): _ADMITTED,
    # A deployment that was created later got its GPUs; the others run meanwhile.
    (_ADMITTED, JobTrigger.PLACED): _ADMITTED,
    (_PROFILING, JobTrigger.PLACED): _PROFILING,
    (_RUNNING, JobTrigger.PLACED): _RUNNING,
    (_SUSPENDED, JobTrigger.PLACED): _SUSPENDED,
    **{(state, JobTrigger.DISPLACED): _QUEUED for state in _LIVE},
    # The training WPG has its GPUs while another deployment of the job waits for some.
    (_QUEUED, JobTrigger.GRANTED): _QUEUED,
    (_QUEUED, JobTrigger.OFFLOADED): _QUEUED,
    (_ADMITTED, JobTrigger.GRANTED): _PROFILING,
    # Its workers were restarted, or it has several training WPGs.
    (_PROFILING, JobTrigger.GRANTED): _PROFILING,
    (_RUNNING, JobTrigger.GRANTED): _RUNNING,
    (_SUSPENDED, JobTrigger.GRANTED): _RUNNING,
    # The offload began while the job was queued.
    (_ADMITTED, JobTrigger.OFFLOADED): _SUSPENDED,
    (_PROFILING, JobTrigger.OFFLOADED): _SUSPENDED,
    (_RUNNING, JobTrigger.OFFLOADED): _SUSPENDED,
    # It has several training WPGs.
    (_SUSPENDED, JobTrigger.OFFLOADED): _SUSPENDED,
    (_PROFILING, JobTrigger.CYCLE_ENDED): _RUNNING,
    # Only the first cycle changes the state; every later one is reported as well.
    (_QUEUED, JobTrigger.CYCLE_ENDED): _QUEUED,
    (_ADMITTED, JobTrigger.CYCLE_ENDED): _ADMITTED,
    (_RUNNING, JobTrigger.CYCLE_ENDED): _RUNNING,
    (_SUSPENDED, JobTrigger.CYCLE_ENDED): _SUSPENDED,
    **{(state, JobTrigger.COMPLETED): JobState.COMPLETED for state in _LIVE},
    **{(state, JobTrigger.FAILED): JobState.FAILED for state in _LIVE},
    **{(state, JobTrigger.CANCELLED): JobState.CANCELLED for state in _LIVE},
}

next_state: Final = Machine("job", TRANSITIONS).next_state
"""See `Machine.next_state`."""
