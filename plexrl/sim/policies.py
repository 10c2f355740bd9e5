"""Policies by name: what a simulated scheduler is configured with. No rule stands here; all are the
scheduler's own (`plexrl.scheduler.policies`, `plexrl.scheduler.ordering`). Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPolicy:
    """A placement policy and a rule for taking turns."""

    name: str
    settings: Mapping[str, Any]
    """Of `SchedulerConfig`."""
    source: str
    """Whose it is."""


SIM_POLICIES: dict[str, SimPolicy] = {
    policy.name: policy
    for policy in (
        SimPolicy(name="isolated", settings={"policy": "isolated"}, source="PlexRL §6.3"),
        SimPolicy(name="pack", settings={"policy": "pack"}, source="PlexRL §6.3"),
        SimPolicy(name="spread", settings={"policy": "spread"}, source="PlexRL §6.3"),
        SimPolicy(
            name="spread+backfill", settings={"policy": "spread+backfill"}, source="PlexRL §6.3"
        ),
    )
}


def sim_policy(name: str) -> SimPolicy:
    """The policy of that name.

    Raises:
        InvalidRequestError: there is none.
    """
    if name not in SIM_POLICIES:
        raise InvalidRequestError(
            f"policy {name!r} is unknown: use one of {', '.join(SIM_POLICIES)}"
        )
    return SIM_POLICIES[name]
