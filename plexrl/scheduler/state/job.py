"""A job's state: the only module that writes it."""

from plexrl.scheduler.state.machines.job_states import JobTrigger, next_state
from plexrl.scheduler.state.records import Job


def change_job(job: Job, trigger: JobTrigger) -> None:
    """Move the job along its table.

    Raises:
        IllegalTransitionError: the table has no such pair.
    """
    job.state = next_state(job.state, trigger)
