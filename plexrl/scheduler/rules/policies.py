"""Placement policies: which placement modes are tried for a deployment, and in which order.

`placement.placement` implements the modes; a policy only orders them (PlexRL §6.3).
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from plexrl.errors import InvalidRequestError


class PlacementMode(StrEnum):
    """How a deployment gets GPUs."""

    STRICT = "strict"
    """Join the group where the demand trace fits without overlap at the least cost (Eq. 1, 2)."""
    DEDICATED = "dedicated"
    """Form a new group of free GPUs: for deployments that never share, and for profiling."""
    OVERLAP = "overlap"
    """Join the group with the least overlap."""
    PACKED = "packed"
    """Join the fullest group with capacity; needs no profile."""
    EMPTIEST = "emptiest"
    """Join the group with the fewest members; needs no profile."""
    COLOCATED = "colocated"
    """Join the job's own training or rollout, which works while this deployment does not."""
    SPANNING = "spanning"
    """Use the GPUs of the job's own rollouts, which work while this deployment does not, and others
    beside them: in the gaps of a group, or free ones."""
    SIBLINGS = "siblings"
    """Join other deployments of the job, such as its actor's: one controller uses them in turn."""
    CO_EXECUTED = "co-executed"
    """Join the group whose round has time for it at the least added cost; all states stay in host
    memory."""


WAITING_MODES = frozenset({PlacementMode.OVERLAP, PlacementMode.EMPTIEST})
"""Modes in which a deployment waits for others in its group, or may have to."""


def attempts(
    modes: Sequence[PlacementMode], speeds: Sequence[float]
) -> list[tuple[PlacementMode, float | None]]:
    """The modes to try, each with the speed of the nodes that it may use (None: any), on nodes of
    these speeds, fastest first.

    Where a deployment need not wait for others, the fastest nodes come first: on them all such
    modes are tried in their order, then on the next slower ones. A mode that accepts waiting keeps
    its place: it comes after all modes ahead of it on all nodes.
    """
    found: list[tuple[PlacementMode, float | None]] = []
    block: list[PlacementMode] = []
    for place, mode in enumerate(modes, start=1):
        following = modes[place] if place < len(modes) else None
        block.append(mode)
        if following is None or mode in WAITING_MODES or following in WAITING_MODES:
            # When the slowest nodes are tried, all others have been.
            for speed in (*speeds[:-1], None):
                found += [(each, speed) for each in block]
            block = []
    return found


class PlacementPolicy(Protocol):
    """Orders the placement modes for a deployment that may share."""

    name: str
    backfills: bool
    """A job may use free GPUs although a job ahead of it waits for GPUs."""
    guards_slack: bool
    """At run time, members without exclusive slots keep out of the critical segments of members
    with exclusive slots."""
    repacks: bool
    """Jobs are placed again once their profile is measured."""
    plans_by_profile: bool
    """Profiles decide which deployments a group accepts."""
    keeps_in_host: bool
    """The states of WPGs that share a group stay in host memory, never on NVMe."""

    def modes(
        self, *, has_profile: bool, is_patience_over: bool, is_scarce: bool
    ) -> tuple[PlacementMode, ...]:
        """The modes to try, best first. `is_patience_over`: a job without a profile has waited long
        enough for a group of its own. `is_scarce`: others wait for the GPUs of a new group."""
        ...


class _Unplanned:
    """Defaults of a policy that neither plans by profile nor moves deployments."""

    backfills = True
    guards_slack = False
    repacks = False
    plans_by_profile = False
    keeps_in_host = False


class Isolated(_Unplanned):
    """Each deployment has GPUs of its own."""

    name = "isolated"

    def modes(
        self, *, has_profile: bool, is_patience_over: bool, is_scarce: bool
    ) -> tuple[PlacementMode, ...]:
        """New groups only."""
        del has_profile, is_patience_over, is_scarce
        return (PlacementMode.DEDICATED,)


class Pack(_Unplanned):
    """As few groups as possible, regardless of phases."""

    name = "pack"

    def modes(
        self, *, has_profile: bool, is_patience_over: bool, is_scarce: bool
    ) -> tuple[PlacementMode, ...]:
        """An existing group first, then a new one."""
        del has_profile, is_patience_over, is_scarce
        return (PlacementMode.PACKED, PlacementMode.DEDICATED)


class Spread:
    """The group with the least interference; a job without a profile gets its own group first."""

    name = "spread"
    backfills = False
    guards_slack = True
    repacks = True
    plans_by_profile = True
    keeps_in_host = False

    def modes(
        self, *, has_profile: bool, is_patience_over: bool, is_scarce: bool
    ) -> tuple[PlacementMode, ...]:
        """With a profile: a strict fit, then a new group, then the least overlap; if GPUs are
        scarce, overlap before a new group. Without: a new group; after the patience any group."""
        if has_profile and is_scarce:
            return (PlacementMode.STRICT, PlacementMode.OVERLAP, PlacementMode.DEDICATED)
        if has_profile:
            return (PlacementMode.STRICT, PlacementMode.DEDICATED, PlacementMode.OVERLAP)
        if is_patience_over:
            return (PlacementMode.DEDICATED, PlacementMode.EMPTIEST)
        return (PlacementMode.DEDICATED,)


class SpreadBackfill(Spread):
    """As `Spread`, with backfilling."""

    name = "spread+backfill"
    backfills = True


class CoExecution(_Unplanned):
    """Groups whose members each run once in a round that is no longer than their longest cycle,
    with all states in host memory (RollMux, arXiv 2512.11306). Use it with the ordering
    `round-robin`.
    """

    name = "co-execution"
    plans_by_profile = True
    keeps_in_host = True

    def modes(
        self, *, has_profile: bool, is_patience_over: bool, is_scarce: bool
    ) -> tuple[PlacementMode, ...]:
        """A round with enough time, then a new group. Without a profile: a new group."""
        del is_patience_over, is_scarce
        return (
            (PlacementMode.CO_EXECUTED, PlacementMode.DEDICATED)
            if has_profile
            else (PlacementMode.DEDICATED,)
        )


POLICIES = ("isolated", "pack", "spread", "spread+backfill", "co-execution")


def make_policy(name: str) -> PlacementPolicy:
    """The policy with that name.

    Raises:
        InvalidRequestError: there is no such policy.
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
