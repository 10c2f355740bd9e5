"""What a sync costs when every target pulls its slices, and when whole tensors are broadcast. Pure.

Slice pulls move each target's own bytes and no other, but every piece costs a request. A broadcast
moves whole tensors to every target over a chain of links, whatever they want of them, in few large
messages. So slices win nearly always; whole tensors win where they are small and many, or where
every target wants all of them. Whole tensors are more than a target wants, and are chosen only
where the caller allows that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.plan import Plan
from plexrl.statemanager.plan_balance import Source
from plexrl.statemanager.plan_layout import ITEM_BYTES, Layout


class SyncWay(StrEnum):
    """How bytes travel."""

    SLICES = "slices"
    WHOLE_TENSORS = "whole_tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a network does, as measured."""

    bytes_per_s: float
    """Of one node's link, in one direction."""
    request_s: float
    """Of one message, on top of its bytes."""
    message_bytes_max: int = 64 << 20
    """Whole tensors travel in messages of this size, as many to a message as fit."""

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.request_s < 0 or self.message_bytes_max < 1:
            raise InvalidRequestError(
                "a link has a positive rate and size, and no negative latency"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCost:
    """Of one way."""

    seconds: float
    """Until the last target has everything."""
    bytes_received: int
    """By all targets together."""
    requests: int
    """Of the busiest source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncChoice:
    """The cheaper way, and why."""

    way: SyncWay
    reason: str
    slices: SyncCost
    whole_tensors: SyncCost


def choose_way(
    plan: Plan,
    sources: Sequence[Source],
    targets: Sequence[Layout],
    link: Link,
    *,
    allow_overfetch: bool = False,
) -> SyncChoice:
    """Compare the plan with a broadcast of every tensor that any target wants.

    Without `allow_overfetch` whole tensors are chosen only where they are exactly what every target
    wants.
    """
    slices = _slices_cost(plan, sources, link)
    whole = _whole_cost(targets, link)
    is_exact = whole.bytes_received == slices.bytes_received
    if whole.seconds >= slices.seconds:
        way = SyncWay.SLICES
        reason = (
            f"slices take {slices.seconds:.3g} s and whole tensors {whole.seconds:.3g} s, which "
            f"move {whole.bytes_received / max(1, slices.bytes_received):.2f} times the bytes"
        )
    elif is_exact or allow_overfetch:
        way = SyncWay.WHOLE_TENSORS
        reason = (
            f"whole tensors take {whole.seconds:.3g} s and slices {slices.seconds:.3g} s, of which "
            f"{slices.requests * link.request_s:.3g} s are the requests' latency"
        )
    else:
        way = SyncWay.SLICES
        reason = (
            f"whole tensors would take {whole.seconds:.3g} s, not {slices.seconds:.3g} s, but "
            f"bring {whole.bytes_received - slices.bytes_received} bytes that nobody wants, which "
            "allow_overfetch does not permit"
        )
    return SyncChoice(way=way, reason=reason, slices=slices, whole_tensors=whole)


def _slices_cost(plan: Plan, sources: Sequence[Source], link: Link) -> SyncCost:
    """Every link sends its pieces one after the other, and every target receives its own so."""
    sent: dict[str, list[float]] = {}
    requests: dict[str, int] = {}
    seconds = 0.0
    for target in plan.targets:
        received_s = 0.0
        for index, runs in target.runs.items():
            name = sources[index].link or f"\0{index}"
            took = runs.nbytes / link.bytes_per_s + len(runs) * link.request_s
            sent.setdefault(name, []).append(took)
            requests[name] = requests.get(name, 0) + len(runs)
            received_s += took
        seconds = max(seconds, received_s)
    seconds = max(seconds, *(sum(each) for each in sent.values())) if sent else seconds
    return SyncCost(
        seconds=seconds,
        bytes_received=plan.nbytes,
        requests=max(requests.values(), default=0),
    )


def _whole_cost(targets: Sequence[Layout], link: Link) -> SyncCost:
    """A chain of links passes message after message on, so the last target is done one message a
    link after the first."""
    sizes: dict[str, int] = {}
    for layout in targets:
        nbytes = layout.global_shapes.prod(axis=1) * ITEM_BYTES[layout.dtypes]
        sizes.update(zip(layout.tokens, nbytes.tolist(), strict=True))
    total = int(np.sum(list(sizes.values()), dtype=np.int64)) if sizes else 0
    messages = -(-total // link.message_bytes_max)
    one = min(total, link.message_bytes_max) / link.bytes_per_s + link.request_s
    seconds = (messages + max(0, len(targets) - 1)) * one if total else 0.0
    return SyncCost(seconds=seconds, bytes_received=total * len(targets), requests=messages)
