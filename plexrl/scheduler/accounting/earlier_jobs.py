"""Demand and length of a new job, as they were in earlier jobs.

A deployment starts with the complete profile of its predecessor: the newest deployment of the same
tenant, job name, size and state. Without one it starts with the *prior* of its shape, until its own
profile is complete. Deployments have the same shape if they have the same kind, workers, required
node type, layout and limits, and about the same state, whatever tenant they belong to. Layout and
limits stand for the batch, which is known with the first operation only.

The prior is one of the newest profiles of the shape, one for each job. Profiles of fewer cycles
than a complete one count only while there is no complete one. The prior has the lower quartile of
duty: a backlog has deployments of less duty and of more, and those of less fill the last gap of a
group if their demand is known. With the median none of them would be tried. What is too much after
all is measured soon, and then the group closes and the member that waits most moves. If there are
fewer than four profiles, the prior is their median.

All waiting deployments of a shape have the same prior. It is replaced when a newer one differs by
more than `drift_tolerance`, so they are not enqueued anew with each profile.

Priors hold no names, and no view shows them to a tenant.
"""

import json
import math
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.accounting.profiler import DRIFT_CYCLES
from plexrl.scheduler.rules.settings import Settings, Situation
from plexrl.scheduler.state.demand.estimates import KEPT, WEIGHT
from plexrl.scheduler.state.demand.trace import DemandTrace, ShapeDemand
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, Job, State

PROFILES_OF_SHAPE = 9
"""Newest profiles of a shape that are kept: one strange job does not decide the prior."""

SHAPES_MAX = 256
"""Shapes whose profiles are kept; the one that was measured least recently goes first."""

_FEW = 4
"""Fewer profiles have no lower quartile: it would be the least of them."""


class Unmeasured:
    """The deployments that the prior of their shape plans, or would plan if there was one.

    It is derived from the state, in the order of which `of` returns them.
    """

    def __init__(self, state: State) -> None:
        self._of: dict[str, dict[DeploymentId, int]] = {}
        for deployment in state.deployments.values():
            self.add(deployment)

    def add(self, deployment: Deployment) -> None:
        """Add the deployment if a prior may plan it."""
        if (
            deployment.spec.may_share
            and not deployment.spec.preemptible
            and not deployment.demand.has_own_trace
            and deployment.wpg.state != WpgState.STOPPED
        ):
            alike = self._of.setdefault(shape_key(deployment), {})
            alike[deployment.deployment] = deployment.serial

    def remove(self, deployment: Deployment) -> None:
        """Remove the deployment: it has ended, or its own demand is known."""
        shape = shape_key(deployment)
        alike = self._of.get(shape, {})
        alike.pop(deployment.deployment, None)
        if not alike:
            self._of.pop(shape, None)

    def has(self, deployment: Deployment) -> bool:
        """Whether the prior of its shape plans the deployment."""
        return deployment.deployment in self._of.get(shape_key(deployment), {})

    def of(self, shape: str) -> list[DeploymentId]:
        """The deployments of a shape, oldest first."""
        alike = self._of.get(shape, {})
        return sorted(alike, key=alike.__getitem__)

    def shapes(self) -> list[str]:
        """All shapes of which there are deployments."""
        return sorted(self._of)

    def check(self, state: State) -> None:
        """Assert that it has the deployments that follow from the state."""
        assert Unmeasured(state)._of == self._of, (
            "deployments without a profile are not found by their shape"
        )


def remember(situation: Situation, deployment: Deployment) -> bool:
    """Store the profile for later jobs. True: the prior of its shape has changed."""
    state, settings = situation.state, situation.settings
    trace = deployment.demand.trace
    assert trace is not None
    if is_complete(settings, trace):
        profiles = state.profiles
        key = profile_key(state, deployment)
        profiles.pop(key, None)
        profiles[key] = trace
        _keep_newest(profiles, settings.config.profiles)
    if not settings.profiles_while_sharing:
        return False
    shape = shape_key(deployment)
    demand = state.shapes.pop(shape, None) or ShapeDemand()
    state.shapes[shape] = demand
    _keep_newest(state.shapes, SHAPES_MAX)
    _add_profile(settings, demand, state.job(deployment.job).serial, trace)
    found, before = _typical(demand.profiles.values()), demand.prior
    if before is not None and _is_near(found, before, settings.config.drift_tolerance):
        return False
    # A trace of no cycles gives way to the first complete profile.
    demand.prior = replace(found, cycles=0)
    return True


def begin_with_known(situation: Situation, deployment: Deployment) -> None:
    """Give a new deployment of unknown demand that of its predecessor, or else the prior."""
    assert deployment.demand.trace is None, f"the demand of {deployment.deployment} is known"
    expect_as_before(situation, situation.state.job(deployment.job), deployment)


def expect_as_before(situation: Situation, job: Job, deployment: Deployment) -> None:
    """Give the deployment of `job`, which need not be part of the state, the demand of earlier
    ones."""
    known = situation.state.profiles.get(_profile_key(job, deployment))
    deployment.demand.know(known)
    if known is None and deployment.spec.may_share and not deployment.spec.preemptible:
        take_prior(deployment, prior_of(situation, shape_key(deployment)))


def prior_of(situation: Situation, shape: str) -> DemandTrace | None:
    """The prior of a shape; None: there is none, or priors are not used."""
    demand = (
        situation.state.shapes.get(shape) if situation.settings.profiles_while_sharing else None
    )
    return None if demand is None else demand.prior


def take_prior(deployment: Deployment, prior: DemandTrace | None) -> None:
    """Plan a deployment without a profile by this prior; None: its demand is unknown."""
    deployment.demand.suppose(prior)


def is_complete(settings: Settings, trace: DemandTrace) -> bool:
    """Whether a measured trace has the cycles of a profile."""
    # After a drift a profile is one of fewer cycles.
    return trace.cycles >= min(settings.config.profile_cycles, DRIFT_CYCLES)


def remember_length(situation: Situation, job: Job, now: float) -> None:
    """Store how long a completed job took, unless it was paced."""
    state, settings = situation.state, situation.settings
    if job.placed_at is None or not settings.config.learns_from_jobs:
        return
    if any(state.deployments[deployment].spec.pace for deployment in job.deployments):
        return
    lengths, key = state.lengths, _name_key(job.tenant, job.name)
    before, took_s = lengths.pop(key, None), now - job.placed_at
    lengths[key] = took_s if before is None else KEPT * before + WEIGHT * took_s
    _keep_newest(lengths, settings.config.profiles)


def usual_length(situation: Situation, tenant: TenantId, name: str) -> float:
    """Length of the tenant's earlier jobs of this name, in seconds; 0: unknown.

    It is rounded to a power of two: waiting jobs of one length are considered once for all.
    """
    length_s = situation.state.lengths.get(_name_key(tenant, name))
    if length_s is None or not situation.settings.config.learns_from_jobs:
        return 0.0
    return 2.0 ** round(math.log2(max(1.0, length_s)))


def _name_key(tenant: TenantId, name: str) -> str:
    return f"{tenant}/{name}"


def profile_key(state: State, deployment: Deployment) -> str:
    """Key of the profile: a later deployment with the same key starts with it."""
    return _profile_key(state.job(deployment.job), deployment)


def _profile_key(job: Job, deployment: Deployment) -> str:
    name = deployment.deployment.rsplit("/", 1)[-1]
    parts = [
        job.tenant,
        job.name,
        name,
        str(deployment.spec.workers),
        str(deployment.spec.state_bytes),
    ]
    # The specification, and so the prior's key, has the pace.
    return "/".join([*parts, deployment.spec.pace] if deployment.spec.pace else parts)


def shape_key(deployment: Deployment) -> str:
    """Key of the prior."""
    size = (
        f"{deployment.spec.workers}/{deployment.spec.state_bytes:.1e}/{deployment.spec.node_type}"
    )
    return f"{deployment.spec.kind}/{size}/{_digest_of_limits(deployment.spec.spec_json)}"


@lru_cache(maxsize=4096)
def _digest_of_limits(spec_json: str) -> str:
    """Digest of a specification without the model, but with its head. The model's description may
    name a tenant's folder: the size of the state stands for it."""
    limits = spec_json
    try:
        spec = json.loads(spec_json)
    except ValueError:
        # Only its sender knows what a specification says.
        spec = None
    if isinstance(spec, dict):
        kept = {name: spec[name] for name in sorted(spec) if name != "model"}
        model = spec.get("model")
        head = model.get("head", "causal") if isinstance(model, dict) else "causal"
        if head != "causal":
            # Without logits a step takes another time.
            kept["head"] = head
        limits = json.dumps(kept)
    return blake2b(limits.encode(errors="backslashreplace"), digest_size=16).hexdigest()


def _add_profile(settings: Settings, demand: ShapeDemand, job: int, trace: DemandTrace) -> None:
    profiles = demand.profiles
    complete = {job for job, each in profiles.items() if is_complete(settings, each)}
    if is_complete(settings, trace):
        for each in [profile for profile in profiles if profile not in complete]:
            del profiles[each]
    elif complete:
        return
    profiles.pop(job, None)
    profiles[job] = trace
    _keep_newest(profiles, PROFILES_OF_SHAPE)


def _keep_newest(entries: dict[Any, Any], count: int) -> None:
    """Remove the oldest entries beyond `count`; there may be several if a setting was reduced."""
    while len(entries) > count:
        del entries[next(iter(entries))]


def _typical(traces: Collection[DemandTrace]) -> DemandTrace:
    """The trace at the lower quartile of duty, or at the median if there are few."""
    ordered = sorted(traces, key=lambda trace: trace.duty)
    return ordered[len(ordered) // (2 if len(ordered) < _FEW else 4)]


def _is_near(trace: DemandTrace, other: DemandTrace, tolerance: float) -> bool:
    """Whether both plan alike: period and busy time differ by a small part only."""
    if len(trace.segments) != len(other.segments):
        return False
    parts = (trace.period_s / other.period_s, trace.busy_s / other.busy_s)
    return all(abs(part - 1.0) <= tolerance for part in parts)
