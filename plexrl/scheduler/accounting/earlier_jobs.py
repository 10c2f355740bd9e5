"""What earlier jobs tell of later ones: their demand, before it is measured, and their length.

A deployment of the same tenant, job name, size and state starts with the newest *profile* of its
predecessor, as if it had measured that itself. Otherwise it starts with the *prior* of its shape:
one of the newest profiles of deployments of the same kind, workers, layout, limits and about the
same state, whatever tenant they are of. Layout and limits stand for the batch, which is known with
the first operation only. A prior holds until the deployment's own profile is complete.

The prior is the profile at the lower quartile of duty. A backlog has deployments of less duty and
of more; if their demand is known, those of less fill the last gap of a group. With the median none
of them would be tried, and gaps would stay. What is too much after all is measured soon, and then
the group closes and the member that waits most moves.

Priors hold no names, and no view shows them to a tenant.
"""

import json
from collections.abc import Iterable
from dataclasses import replace

from plexrl.ids import TenantId
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.demand.estimates import KEPT, WEIGHT
from plexrl.scheduler.state.demand.trace import DemandTrace
from plexrl.scheduler.state.records import Deployment, Job, State

PRIOR_OF = 9
"""Newest profiles of a shape that are kept: one strange job does not decide the prior."""


def remember(state: State, settings: Settings, deployment: Deployment) -> bool:
    """Store the profile for later jobs. True: it is the first of its shape."""
    assert deployment.trace is not None
    profiles = state.profiles
    key = profile_key(state, deployment)
    profiles.pop(key, None)
    profiles[key] = deployment.trace
    # There may be several if the setting was reduced.
    while len(profiles) > settings.config.profiles:
        del profiles[next(iter(profiles))]
    if not settings.profiles_while_sharing:
        return False
    shape, priors = shape_key(deployment), state.priors
    alike = priors.pop(shape, {})
    is_first = not alike
    alike.pop(deployment.serial, None)
    alike[deployment.serial] = deployment.trace
    while len(alike) > PRIOR_OF:
        del alike[next(iter(alike))]
    priors[shape] = alike
    while len(priors) > settings.config.profiles:
        del priors[next(iter(priors))]
    return is_first


def begin_with_known(state: State, settings: Settings, deployment: Deployment) -> None:
    """Give a deployment of unknown demand that of its predecessor, or else the prior."""
    assert deployment.trace is None, f"the demand of {deployment.deployment} is known"
    deployment.trace = state.profiles.get(profile_key(state, deployment))
    plans = settings.profiles_while_sharing and deployment.shares and not deployment.preemptible
    if deployment.trace is None and plans:
        alike = state.priors.get(shape_key(deployment), {})
        deployment.trace = _prior(alike.values())
        deployment.has_prior = deployment.trace is not None


def remember_length(state: State, settings: Settings, job: Job, now: float) -> None:
    """Store how long a completed job took, unless it was paced."""
    if job.placed_at is None or not settings.config.learns_from_jobs:
        return
    if any(state.deployments[each].pace for each in job.deployments):
        return
    lengths, key = state.lengths, _name_key(job.tenant, job.name)
    before, took_s = lengths.pop(key, None), now - job.placed_at
    lengths[key] = took_s if before is None else KEPT * before + WEIGHT * took_s
    while len(lengths) > settings.config.profiles:
        del lengths[next(iter(lengths))]


def usual_length(state: State, tenant: TenantId, name: str) -> float:
    """Length of the tenant's earlier jobs of this name, in seconds; 0: there were none."""
    return state.lengths.get(_name_key(tenant, name), 0.0)


def _name_key(tenant: TenantId, name: str) -> str:
    return f"{tenant}/{name}"


def profile_key(state: State, deployment: Deployment) -> str:
    """Key of the profile: a later deployment with the same key starts with it."""
    job = state.job(deployment.job)
    name = deployment.deployment.rsplit("/", 1)[-1]
    parts = [job.tenant, job.name, name, str(deployment.workers), str(deployment.state_bytes)]
    # The specification, and so the prior's key, has the pace.
    return "/".join([*parts, deployment.pace] if deployment.pace else parts)


def shape_key(deployment: Deployment) -> str:
    """Key of the prior. The model's own description may name a tenant's folder: its size stands for
    it."""
    limits = deployment.spec_json
    try:
        spec = json.loads(limits)
    except ValueError:
        # Only its sender knows what a specification says.
        spec = None
    if isinstance(spec, dict):
        limits = json.dumps({name: spec[name] for name in sorted(spec) if name != "model"})
    parts = (deployment.kind, str(deployment.workers), f"{deployment.state_bytes:.1e}", limits)
    return "/".join(parts)


def _prior(traces: Iterable[DemandTrace]) -> DemandTrace | None:
    """The trace at the lower quartile of duty; None if there are none."""
    ordered = sorted(traces, key=lambda trace: trace.duty)
    return replace(ordered[len(ordered) // 4], cycles=0) if ordered else None
