"""Placement policies: which modes of getting GPUs are tried for a deployment, and in which order.

The modes themselves are `plexrl.scheduler.placement.placement`'s; a policy only orders them (PlexRL
§6.3).
"""

from enum import StrEnum
from typing import Protocol

from plexrl.errors import InvalidRequestError


class PlacementMode(StrEnum):
    """One mode of getting GPUs."""

    STRICT = "strict"
    """Join the group in whose free windows the demand trace fits, at the least cost (Eq. 1, 2)."""
    DEDICATED = "dedicated"
    """A new group of free GPUs: for what never shares, and to profile undisturbed (cold start)."""
    OVERLAP = "overlap"
    """Join the group whose residents are busy at the same time least."""
    PACKED = "packed"
    """Join the fullest group that has room; needs no profile."""
    EMPTIEST = "emptiest"
    """Join the group of fewest members; needs no profile."""
    CO_EXECUTED = "co-executed"
    """Join the group in whose round it has a turn, all states staying in host memory, at the least
    added cost."""


class PlacementPolicy(Protocol):
    """Orders the modes for one deployment that may share."""

    name: str
    backfills: bool
    """A job behind one that waits for GPUs may take what is free now."""
    guards_slack: bool
    """At run time, members without time of their own keep out of the critical segments of those
    that have."""
    repacks: bool
    """Jobs are placed again once their profile is known."""
    plans_by_profile: bool
    """Whom a group takes follows from its members' profiles."""
    keeps_in_host: bool
    """Where several WPGs share a group, their states stay in host memory, never on NVMe."""

    def modes(
        self, *, has_profile: bool, is_patience_over: bool, is_scarce: bool
    ) -> tuple[PlacementMode, ...]:
        """The modes to try, best first. `is_patience_over`: a job without a profile has waited long
        enough for a group of its own. `is_scarce`: others wait for the GPUs that a new group would
        take."""
        ...


class _Unplanned:
    """What a policy is that plans nothing and moves nobody."""

    backfills = True
    guards_slack = False
    repacks = False
    plans_by_profile = False
    keeps_in_host = False


class Isolated(_Unplanned):
    """Every deployment on GPUs of its own."""

    name = "isolated"

    def modes(
        self, *, has_profile: bool, is_patience_over: bool, is_scarce: bool
    ) -> tuple[PlacementMode, ...]:
        """Only new groups."""
        del has_profile, is_patience_over, is_scarce
        return (PlacementMode.DEDICATED,)


class Pack(_Unplanned):
    """As few groups as possible, without regard to phases."""

    name = "pack"

    def modes(
        self, *, has_profile: bool, is_patience_over: bool, is_scarce: bool
    ) -> tuple[PlacementMode, ...]:
        """A group that exists before a new one."""
        del has_profile, is_patience_over, is_scarce
        return (PlacementMode.PACKED, PlacementMode.DEDICATED)


class Spread:
    """Where the phases interfere least; jobs without a profile get a group of their own first."""

    name = "spread"
    backfills = False
    guards_slack = True
    repacks = True
    plans_by_profile = True
    keeps_in_host = False

    def modes(
        self, *, has_profile: bool, is_patience_over: bool, is_scarce: bool
    ) -> tuple[PlacementMode, ...]:
        """Warm: fit strictly, else new, else overlap least; where others wait for GPUs, overlap
        before new. Cold: new, in the end any."""
        if has_profile and is_scarce:
            return (PlacementMode.STRICT, PlacementMode.OVERLAP, PlacementMode.DEDICATED)
        if has_profile:
            return (PlacementMode.STRICT, PlacementMode.DEDICATED, PlacementMode.OVERLAP)
        if is_patience_over:
            return (PlacementMode.DEDICATED, PlacementMode.EMPTIEST)
        return (PlacementMode.DEDICATED,)


class SpreadBackfill(Spread):
    """As `Spread`, and what phases leave over is filled with whatever fits."""

    name = "spread+backfill"
    backfills = True


class CoExecution(_Unplanned):
    """Groups whose members have a turn each in a round no longer than their longest cycle, with
    their states in host memory; no group changes for a member's sake (RollMux, arXiv 2512.11306).

    The rule for taking turns that belongs to it is `round-robin`.
    """

    name = "co-execution"
    plans_by_profile = True
    keeps_in_host = True

    def modes(
        self, *, has_profile: bool, is_patience_over: bool, is_scarce: bool
    ) -> tuple[PlacementMode, ...]:
        """A round that has room, else a new group; without a profile no round can be planned."""
        del is_patience_over, is_scarce
        return (
            (PlacementMode.CO_EXECUTED, PlacementMode.DEDICATED)
            if has_profile
            else (PlacementMode.DEDICATED,)
        )


POLICIES = ("isolated", "pack", "spread", "spread+backfill", "co-execution")


def make_policy(name: str) -> PlacementPolicy:
    """The policy of that name.

    Raises:
        InvalidRequestError: there is none.
    """
    match name:
        case "isolated":
            return Isolated()
        case "pack":
            return Pack()
        case "spread":
            return Spread()
        case "spread+backfill":
            return SpreadBackfill()
        case "co-execution":
            return CoExecution()
    raise InvalidRequestError(f"policy {name!r} is unknown: use one of {', '.join(POLICIES)}")
