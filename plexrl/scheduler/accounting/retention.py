"""Retention of ended jobs: past a limit, the job that ended first is dropped.

A dropped job's deployments and use go with it; its tenant's totals stay. A query for a dropped job,
or for an operation of it, finds nothing. The job's id may be used again. The new job does not own
the old operations, and its workers' incarnations continue after the old ones, so that a late report
of an old worker is not taken for a new one's. Decisions never read dropped jobs.
"""

from plexrl.ids import DeploymentId
from plexrl.scheduler.rules.settings import Situation, Step
from plexrl.scheduler.state.records import ForgottenJobs, State

INCARNATIONS_MAX = 4096
"""Dropped deployments whose last incarnation is stored; of older ones only the highest is."""


def forget_ended(situation: Situation) -> None:
    """Drop ended jobs above the limit; call it after an event, which may end many jobs."""
    state = situation.state
    while len(state.ended) > situation.settings.config.ended_jobs:
        name = next(iter(state.ended))
        del state.ended[name]
        job = state.jobs.pop(name)
        for deployment in (*job.deployments, *job.ended_deployments):
            gone = state.deployments.pop(deployment)
            if gone.wpg.processes.incarnation:
                retire(state, deployment, gone.wpg.processes.incarnation)
        totals = state.forgotten.setdefault(job.tenant, ForgottenJobs())
        totals.jobs += 1
        totals.operations += sum(row.operations for row in job.usage.values())


def forget_oldest(step: Step) -> None:
    """Drop operations from the history above its limit."""
    state = step.state
    finished = state.finished
    while len(finished) > state.history:
        name = finished.pop(state.finished_count + 1 - len(finished))
        oldest = state.operations[name]
        if oldest.result is not None:
            step.effects.discards.append(oldest.result)
        if oldest.is_logged:
            # A recovery may still repeat it: it is dropped with the log.
            oldest.is_forgotten = True
        else:
            del state.operations[name]


def last_incarnation(state: State, name: DeploymentId) -> int:
    """Upper bound of the incarnations of dropped deployments of that name; 0: there were none."""
    return state.retired.get(name, state.retired_incarnation)


def retire(
    state: State, name: DeploymentId, incarnation: int, kept: int = INCARNATIONS_MAX
) -> None:
    """Store the last incarnation of a dropped deployment."""
    state.retired.pop(name, None)
    state.retired[name] = incarnation
    if len(state.retired) > kept:
        oldest = state.retired.pop(next(iter(state.retired)))
        state.retired_incarnation = max(state.retired_incarnation, oldest)
