"""Profiles of earlier deployments, with which later ones of the same tenant and name start warm."""

from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.records import Deployment, State


def remember(state: State, settings: Settings, deployment: Deployment) -> None:
    """Store the profile for the next job of the same tenant and name (warm start)."""
    assert deployment.trace is not None
    profiles = state.profiles
    key = profile_key(state, deployment)
    profiles.pop(key, None)
    profiles[key] = deployment.trace
    # There may be several if the setting was reduced.
    while len(profiles) > settings.config.profiles:
        del profiles[next(iter(profiles))]


def profile_key(state: State, deployment: Deployment) -> str:
    """Key of the profile: a later deployment with the same key starts with it."""
    job = state.job(deployment.job)
    name = deployment.deployment.rsplit("/", 1)[-1]
    parts = (job.tenant, job.name, name, str(deployment.workers), str(deployment.state_bytes))
    return "/".join(parts)
