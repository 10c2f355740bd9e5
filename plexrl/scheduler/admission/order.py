"""The order in which waiting deployments get GPUs, first criterion first:

1. the job already has GPUs for another deployment, which are idle until the job is complete;
2. the higher priority class;
3. the smaller share of the cluster of the tenant (`fair_shares`);
4. deployments that have waited beyond `starvation_bound_s`, by time of submission; then the others
   by response ratio: (wait + expected length) / expected length, the highest first. With
   `longest_first` the greatest expected length goes first instead, however long others have waited:
   as in LPT scheduling, short jobs then fill the tail of a backlog;
5. time of submission, then number in the order of creation.

A long wait therefore helps a job only against jobs of the same tenant and class. Tenants keep the
shares that their weights give them, however old their backlogs are, and a new job of a higher class
goes before all others. No job starves: the share of its tenant does not grow while the tenant gets
nothing, and inside its class the tenant serves it before all later submissions.

The expected length of a job is the declared one, else that of its tenant's earlier jobs of its
name, else an hour. Expected lengths are rounded to powers of two. So jobs of one tenant, class and
rounded length stay in the order of submission while they wait.
"""

import math

import numpy as np
from numpy.typing import NDArray

from plexrl.scheduler.admission.fit.succession import takes_a_place
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.fit.feasibility import is_possible
from plexrl.scheduler.placement.waiting.units import expected_length, expected_step
from plexrl.scheduler.rules.hrrs import ratio_of, starves_at
from plexrl.scheduler.rules.settings import Settings, Situation
from plexrl.scheduler.state.records import Deployment, Job, State

AdmissionKey = tuple[bool, int, float, float, float, int]
"""The criteria above; the lowest key goes first."""


def admission_key(
    situation: Situation, deployment: Deployment, share: float, now: float
) -> AdmissionKey:
    """The sort key of a deployment whose tenant has this share."""
    state = situation.state
    job = state.job(deployment.job)
    created_at, expected_s = deployment.created_at, expected_step(expected_length(job))
    ratio = waiting_ratio(situation.settings, created_at, expected_s, now)
    return (
        not is_partial(state, job),
        -job.priority,
        share,
        -ratio,
        created_at,
        deployment.serial,
    )


def waiting_ratio(settings: Settings, created_at: float, expected_s: float, now: float) -> float:
    """Response ratio of a deployment that has waited since `created_at`; infinite beyond the
    starvation bound. With `longest_first` its expected length."""
    if settings.config.longest_first:
        return expected_s
    if now >= starves_at(created_at, settings.config.starvation_bound_s):
        return math.inf
    return ratio_of(now - created_at, expected_s)


def waiting_ratios(
    settings: Settings,
    created_at: NDArray[np.float64],
    expected_s: NDArray[np.float64],
    now: float,
) -> NDArray[np.float64]:
    """`waiting_ratio` of many: [deployments] float64."""
    if settings.config.longest_first:
        return expected_s
    ratios = (now - created_at + expected_s) / expected_s
    return np.where(have_starved(settings, created_at, now), math.inf, ratios)


def have_starved(
    settings: Settings, created_at: NDArray[np.float64], now: float
) -> NDArray[np.bool_]:
    """Whether deployments have waited beyond the starvation bound: [deployments] bool."""
    return created_at + settings.config.starvation_bound_s <= now


def blocks_others(cluster: Cluster, deployment: Deployment, now: float) -> bool:
    """Whether deployments behind it may not take free GPUs that it needs: it has waited beyond the
    bound or the policy does not backfill, and the nodes in service could hold it."""
    if not cluster.settings.policy.backfills:
        return is_possible(cluster, deployment)
    if now < starves_at(deployment.created_at, cluster.settings.config.starvation_bound_s):
        return False
    return is_possible(cluster, deployment) and not takes_a_place(cluster, deployment, now)


def is_partial(state: State, job: Job) -> bool:
    """Whether the job has GPUs for one of its deployments."""
    return any(state.deployment(name).has_gpus for name in job.deployments)
