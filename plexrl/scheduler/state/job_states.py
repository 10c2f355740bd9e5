"""The job's state machine, as a table (PlexRL §5.2.3).

QUEUED ──placed──▶ ADMITTED ──first grant──▶ PROFILING ──first cycle──▶ RUNNING ⇄ SUSPENDED
   any live state ──end──▶ COMPLETED | FAILED | CANCELLED
"""

from enum import StrEnum


class JobState(StrEnum):
    QUEUED = "QUEUED"
    """Waits for GPUs."""
    ADMITTED = "ADMITTED"
    """All its deployments have GPUs."""
    PROFILING = "PROFILING"
    """Runs its first cycle."""
    RUNNING = "RUNNING"
    """Its training WPG holds its group's lock."""
    SUSPENDED = "SUSPENDED"
    """Its training WPG gave the group to another job."""
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
    DISPLACED = "displaced"
    """One of its deployments waits for GPUs again."""
    GRANTED = "granted"
    CYCLE_ENDED = "cycle_ended"
    OFFLOADED = "offloaded"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


_LIVE = (
    JobState.QUEUED,
    JobState.ADMITTED,
    JobState.PROFILING,
    JobState.RUNNING,
    JobState.SUSPENDED,
)

TRANSITIONS: dict[tuple[JobState, JobTrigger], JobState] = {
    (JobState.QUEUED, JobTrigger.PLACED): JobState.ADMITTED,
    (JobState.ADMITTED, JobTrigger.DISPLACED): JobState.QUEUED,
    (JobState.ADMITTED, JobTrigger.GRANTED): JobState.PROFILING,
    (JobState.PROFILING, JobTrigger.CYCLE_ENDED): JobState.RUNNING,
    (JobState.PROFILING, JobTrigger.OFFLOADED): JobState.SUSPENDED,
    (JobState.RUNNING, JobTrigger.OFFLOADED): JobState.SUSPENDED,
    (JobState.SUSPENDED, JobTrigger.GRANTED): JobState.RUNNING,
    **{(state, JobTrigger.COMPLETED): JobState.COMPLETED for state in _LIVE},
    **{(state, JobTrigger.FAILED): JobState.FAILED for state in _LIVE},
    **{(state, JobTrigger.CANCELLED): JobState.CANCELLED for state in _LIVE},
}


_AFTER: dict[JobTrigger, dict[JobState, JobState]] = {trigger: {} for trigger in JobTrigger}
"""The same by trigger: a pair would have to be made for every look."""

for (_state, _trigger), _next in TRANSITIONS.items():
    _AFTER[_trigger][_state] = _next


def next_state(state: JobState, trigger: JobTrigger) -> JobState:
    """The state after `trigger`; what the table does not name changes nothing."""
    return _AFTER[trigger].get(state, state)
