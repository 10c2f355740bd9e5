"""The settings of a scheduler that a prediction uses, from a recording or by a name. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.sim.workload.policies import SIM_POLICIES, sim_policy
from plexrl.traces.convert.history import History

FIFO = {"ordering": "fifo-bursts", "anticipation": True}
"""Settings of a first-in-first-out queue. It switches ahead of time, too, as all policies of the
simulator do, so that only orders are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """A placement policy with an ordering."""

    name: str
    """As in `plexrl.sim.workload.policies`, if it is one of them."""
    settings: Mapping[str, Any]
    """Fields of `SchedulerConfig`; those that are absent have their defaults."""

    @property
    def fifo(self) -> "Planning":
        """The same placement with a first-in-first-out queue."""
        return Planning(name=f"{self.name}, FIFO", settings={**self.settings, **FIFO})


def named(policy: str) -> Planning:
    """The planning of that name, with the defaults of all other settings.

    Raises:
        InvalidRequestError: the policy is unknown.
    """
    return Planning(name=policy, settings=sim_policy(policy).settings)


def planning_of(recordings: Sequence[History], policy: str | None) -> Planning:
    """The planning of the cluster that made these recordings, or `policy` in its place.

    Raises:
        InvalidRequestError: the policy is unknown. Without it: a recording holds no settings, or
            they differ between the recordings.
    """
    if policy is not None:
        return named(policy)
    first = recordings[0].planning
    if first is None or any(recording.planning is None for recording in recordings):
        raise InvalidRequestError(
            "a recording does not hold its cluster's policy, because an earlier version made it: "
            "name the policy with --policy"
        )
    differing = sorted(
        {
            name
            for recording in recordings
            for name, value in (recording.planning or {}).items()
            if value != first.get(name)
        }
    )
    if differing:
        raise InvalidRequestError(
            f"the recordings are of clusters with different settings ({', '.join(differing)}): "
            "name the policy with --policy"
        )
    return Planning(name=_name(first), settings=first)


def _name(settings: Mapping[str, Any]) -> str:
    """The placement policy, and the ordering if it is not the default."""
    placement, ordering = str(settings["policy"]), str(settings["ordering"])
    if ordering == "hrrs":
        return placement
    for each in SIM_POLICIES.values():
        if (each.settings["policy"], each.settings.get("ordering")) == (placement, ordering):
            return each.name
    return f"{placement}, {ordering}"
