"""Finds what an event names, or refuses the event."""

from plexrl.errors import (
    JobEndedError,
    UnknownDeploymentError,
    UnknownJobError,
    UnknownOperationError,
)
from plexrl.ids import DeploymentId, JobId, OperationId
from plexrl.scheduler.state.machines.job_states import FINAL
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, Job, State


def find_job(state: State, name: JobId) -> Job:
    """Raises `UnknownJobError`."""
    job = state.jobs.get(name)
    if job is None:
        raise unknown_job(name)
    return job


def find_live_job(state: State, name: JobId) -> Job:
    """Raises `UnknownJobError`, or `JobEndedError` if the job has ended."""
    job = find_job(state, name)
    check_live(job)
    return job


def check_live(job: Job) -> None:
    """Raises `JobEndedError` if the job has ended."""
    if job.state in FINAL:
        raise JobEndedError(
            f"job {job.job!r} has ended ({job.state.value.lower()}): submit a new one",
            reason=job.reason,
        )


def find_deployment(state: State, name: DeploymentId) -> Deployment:
    """Raises `UnknownDeploymentError`."""
    deployment = state.deployments.get(name)
    if deployment is None:
        raise unknown_deployment(name)
    return deployment


def find_operation(state: State, name: OperationId) -> Operation:
    """Raises `UnknownOperationError`, also for an operation that has left the history."""
    operation = state.operations.get(name)
    is_known = operation is not None and owner_of(state, operation) is not None
    if operation is None or operation.is_forgotten or not is_known:
        raise unknown_operation(name)
    return operation


def owner_of(state: State, operation: Operation) -> Deployment | None:
    """The deployment that the operation was submitted to; None if its job was dropped, even if
    another job has the name."""
    found = state.deployments.get(operation.deployment)
    return None if found is None or operation.submitted_at < found.created_at else found


def job_named(
    state: State,
    job: JobId | None,
    deployment: DeploymentId | None,
    operation: OperationId | None,
) -> Job | None:
    """The job that is named, or that contains the named part; None if there is none."""
    if operation is not None and operation in state.operations:
        deployment = state.operations[operation].deployment
    if deployment is not None and deployment in state.deployments:
        job = state.deployments[deployment].job
    return None if job is None else state.jobs.get(job)


# The same errors answer for another tenant's objects: they must not show that one exists.


def unknown_job(name: JobId) -> UnknownJobError:
    """The error for a job that does not exist or belongs to another tenant."""
    return UnknownJobError(f"there is no job {name!r}")


def unknown_deployment(name: DeploymentId) -> UnknownDeploymentError:
    """The error for a deployment that does not exist or belongs to another tenant."""
    return UnknownDeploymentError(f"there is no deployment {name!r}")


def unknown_operation(name: OperationId) -> UnknownOperationError:
    """The error for an operation that is not there or belongs to another tenant."""
    return UnknownOperationError(f"there is no operation {name!r}, or it has left the history")
