"""Named configurations of the simulated scheduler. All rules are the scheduler's own
(`plexrl.scheduler.rules.policies`, `plexrl.scheduler.rules.ordering`). Pure.

The four policies of PlexRL §6.3 use the default ordering rule. The comparison policies model other
systems. A system that defines only an ordering is placed by `pack`. All switch groups ahead of
time, as `pack` does, although those of other systems do not: so orderings and placements are
compared, and not who anticipates.

All have the same rule for jobs that have waited beyond `starvation_bound_s`: the first has a
reservation, and others run if they do not delay it. So `isolated+backfill` is the fair baseline of
a cluster without sharing. Only `isolated` has no reservations: free GPUs stay idle ahead of such a
job. `UNSHARED` are the rules of batch systems, which know how long each job will take; they are no
configurations of the scheduler.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPolicy:
    """A placement policy and an ordering rule."""

    name: str
    settings: Mapping[str, Any]
    """Fields of `SchedulerConfig`."""
    source: str
    """Publication or system of the policy."""


SIM_POLICIES: dict[str, SimPolicy] = {
    policy.name: policy
    for policy in (
        SimPolicy(
            name="isolated",
            settings={"policy": "isolated", "reservations": False},
            source="PlexRL §6.3",
        ),
        SimPolicy(
            name="isolated+backfill",
            settings={"policy": "isolated"},
            source="no sharing, and backfill (EASY) past jobs that have waited long",
        ),
        SimPolicy(name="pack", settings={"policy": "pack"}, source="PlexRL §6.3"),
        SimPolicy(name="spread", settings={"policy": "spread"}, source="PlexRL §6.3"),
        SimPolicy(
            name="spread+backfill", settings={"policy": "spread+backfill"}, source="PlexRL §6.3"
        ),
        SimPolicy(
            name="rollmux",
            settings={
                "policy": "co-execution",
                "ordering": "round-robin",
                "anticipation": True,
            },
            source="RollMux, arXiv 2512.11306: co-execution groups, states in host memory",
        ),
        SimPolicy(
            name="fifo-lock",
            settings={"policy": "pack", "ordering": "fifo-bursts", "anticipation": True},
            source="llm-d RL time-slicing: a first-in-first-out lock for each group",
        ),
        SimPolicy(
            name="least-recently-served",
            settings={
                "policy": "pack",
                "ordering": "least-recently-served",
                "anticipation": True,
            },
            source="OpenRL, pull request 143",
        ),
        SimPolicy(
            name="fcfs",
            settings={
                "policy": "spread+backfill",
                "ordering": "fifo-bursts",
                "anticipation": True,
            },
            source="first come, first served in place of HRRS",
        ),
        SimPolicy(
            name="sjf",
            settings={
                "policy": "spread+backfill",
                "ordering": "shortest-first",
                "anticipation": True,
            },
            source="shortest job first in place of HRRS",
        ),
        SimPolicy(
            name="hrrs-literal",
            settings={
                "policy": "spread+backfill",
                "ordering": "hrrs-operations",
                "anticipation": True,
            },
            source="PlexRL §4.4 read literally: every operation competes",
        ),
    )
}


UNSHARED = ("easy", "conservative")
"""Backfilling by known durations, without sharing (`plexrl.sim.engine.unshared.backfilling`)."""
POLICY_NAMES = (*SIM_POLICIES, *UNSHARED)


def check_policy(name: str) -> str:
    """`name` itself.

    Raises:
        InvalidRequestError: no policy has this name.
    """
    if name not in POLICY_NAMES:
        raise InvalidRequestError(
            f"policy {name!r} is unknown: use one of {', '.join(POLICY_NAMES)}"
        )
    return name


def sim_policy(name: str) -> SimPolicy:
    """The scheduler's configuration of that name.

    Raises:
        InvalidRequestError: the policy is unknown.
    """
    if name not in SIM_POLICIES:
        raise InvalidRequestError(
            f"policy {name!r} is unknown: use one of {', '.join(SIM_POLICIES)}"
        )
    return SIM_POLICIES[name]
