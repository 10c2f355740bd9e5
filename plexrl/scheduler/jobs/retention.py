"""Ended jobs are remembered up to a bound; then the one that ended first is forgotten.

With it go its deployments and what it used; of these its tenant's totals stay. What is known of a
forgotten job is what is known of one that never was: a question for it, or for an operation of it
that is still in the history, finds nothing, and its id may be used again: the operations of before
are not those of the job that has it then, and its workers' incarnations go on behind the former
ones, so that no late report of these is taken for one of theirs. Nothing that is decided hangs on
what is forgotten: whoever lives has no tie to a job that has ended.
"""

from plexrl.ids import DeploymentId
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, ForgottenJobs, State

INCARNATIONS_MAX = 4096
"""Forgotten deployments whose last incarnation is known of each; of older ones the highest is."""


def forget_ended(context: Context) -> None:
    """Keep to the bound; to be called between events, for one event may end many jobs."""
    state = context.state
    while len(state.ended) > context.config.ended_jobs:
        name = next(iter(state.ended))
        del state.ended[name]
        job = state.jobs.pop(name)
        for deployment in job.deployments:
            gone = state.deployments.pop(deployment)
            if gone.processes.incarnation:
                retire(state, deployment, gone.processes.incarnation)
        totals = state.forgotten.setdefault(job.tenant, ForgottenJobs())
        totals.jobs += 1
        totals.operations += sum(row.operations for row in job.usage.values())


def forget_oldest(context: Context) -> None:
    """Keep to the bound of operations that are in the history."""
    state = context.state
    finished = state.finished
    while len(finished) > context.history:
        name = finished.pop(state.finished_count + 1 - len(finished))
        oldest = state.operations[name]
        if oldest.result is not None:
            context.discard(oldest.result)
        if oldest.is_logged:
            # A recovery may still repeat it; it goes with the log.
            oldest.is_forgotten = True
        else:
            del state.operations[name]


def owner_of(state: State, operation: Operation) -> Deployment | None:
    """The deployment that the operation was submitted to; None where its job is forgotten, also if
    another job has the name by now."""
    found = state.deployments.get(operation.deployment)
    return None if found is None or operation.submitted_at < found.created_at else found


def last_incarnation(state: State, name: DeploymentId) -> int:
    """Of the workers of forgotten deployments of that name, at least; 0: there were none."""
    return state.retired.get(name, state.retired_incarnation)


def retire(
    state: State, name: DeploymentId, incarnation: int, kept: int = INCARNATIONS_MAX
) -> None:
    """A deployment whose workers were of `incarnation` at last is forgotten."""
    state.retired.pop(name, None)
    state.retired[name] = incarnation
    if len(state.retired) > kept:
        oldest = state.retired.pop(next(iter(state.retired)))
        state.retired_incarnation = max(state.retired_incarnation, oldest)
