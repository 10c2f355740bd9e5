"""The order in which those who wait get GPUs, first criterion first:

1. the job already has GPUs for another deployment (it holds them idle until it is whole);
2. priority class, the highest first;
3. its tenant's share of the cluster, the least first (`fair_shares`);
4. those that have waited beyond `starvation_bound_s`, in the order of submission; then the others
   by response ratio: (wait + expected length) / expected length, the highest first;
5. time of submission, then name.

A long wait therefore helps a job against others of its tenant and class only. Tenants keep the
parts that their weights give them, however old their backlogs are, and a fresh job of a higher
class goes before all of them. No job waits for ever: its tenant's share does not grow while it gets
nothing, and inside its class the tenant serves it before whatever was submitted later.

Expected lengths are compared in steps of a factor of two: with steps, jobs of one tenant, class and
step stay in the order of their submission for as long as they wait, and need not be sorted again.
"""

import math

from plexrl.scheduler.admission.fit.feasibility import is_possible
from plexrl.scheduler.admission.queues.waiting import expected_step
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.state.records import Deployment, Job

AdmissionKey = tuple[bool, int, float, float, float, str]
"""The criteria above, the lowest first."""


def admission_key(
    context: Context, deployment: Deployment, share: float, now: float
) -> AdmissionKey:
    """The deployment's place in the order, with its tenant's share."""
    job = context.job(deployment.job)
    created_at, expected_s = deployment.created_at, expected_step(job.expected_s)
    ratio = response_ratio(context, created_at, expected_s, now)
    is_whole = not is_partial(context, job)
    return is_whole, -job.priority, share, -ratio, created_at, deployment.deployment


def response_ratio(context: Context, created_at: float, expected_s: float, now: float) -> float:
    """Of one that waits since `created_at`; infinite beyond the bound."""
    waited_s = now - created_at
    if waited_s >= context.config.starvation_bound_s:
        return math.inf
    return (waited_s + expected_s) / expected_s


def blocks_others(context: Context, deployment: Deployment, now: float) -> bool:
    """Whether nobody behind it may take free GPUs that it waits for: it waited beyond the bound,
    or the policy does not backfill; and the nodes in service could hold it."""
    if context.policy.backfills and now - deployment.created_at < context.config.starvation_bound_s:
        return False
    return is_possible(context, deployment)


def is_partial(context: Context, job: Job) -> bool:
    """Whether the job has GPUs for one of its deployments."""
    return any(context.deployment(name).group is not None for name in job.deployments)
