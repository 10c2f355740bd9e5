"""Which prompts are started, and in which round those that were aborted are (Flexes §3).

A *round* is the generation of one batch without staleness. A policy with more prompts or samples
than are trained has two kinds:

- A *short* round starts `batch_groups + extra_groups` new prompts. When `batch_groups` of them are
  complete, the others are aborted and join the queue of long prompts.
- A *long* round is the next one as soon as the queue has `batch_groups` prompts: it starts exactly
  these, with `group_size` samples each.

A queued prompt begins anew, with the weights of its round; nothing of its earlier samples is kept.
It has the same trajectories, and so the same random streams, as before.

Unless the policy fixes it, `over_launch` chooses how many prompts and samples of a short round are
extra, from none up to the policy's. A round without extra prompts takes queued ones first, since no
long round would follow.

Every prompt that was added is in `queue`, in `fresh`, or started. If the data set has ended, a
round for which new prompts are lacking takes queued ones, so that the last ones are trained, too.
A policy without rounds starts what is in the queue before new prompts: a change of the policy
leaves nothing behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil

from plexrl.errors import InvariantError
from plexrl.rollout.policies.tail_batching.over_launch import (
    ChosenExtra,
    Extra,
    RoundSetting,
    SeenPrompt,
    choose_extra,
)
from plexrl.rollout.staleness.buffers import Buffers
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import GENERATED, SampleGroupId
from plexrl.rollout.trajectories.server import TrajectoryServer

SEEN_OF_ROUND = 16
"""Trained prompts of a round whose lengths are kept."""
SEEN_MAX = 256
"""Trained prompts in all whose lengths are kept."""


class RoundKind(StrEnum):
    """See the module."""

    SHORT = "short"
    LONG = "long"


@dataclass(slots=True, kw_only=True)
class HeldPrompts:
    """The prompts that are not started, with the numbers of their tokens."""

    queue: dict[SampleGroupId, int] = field(default_factory=dict)
    """Long prompts: those that were aborted, in the order in which they are started again."""
    fresh: dict[SampleGroupId, int] = field(default_factory=dict)
    """Prompts that never started, in the order in which they are started."""
    is_long: bool = False
    """The present round is a long one."""
    is_ended: bool = False
    """The data set has no more prompts."""
    chosen: ChosenExtra | None = None
    """What short rounds start beyond what is trained; None: as the policy says."""
    seen: list[SeenPrompt] = field(default_factory=list)
    """Of the latest trained prompts of each round as many, the latest one last."""


class Rounds:
    """The prompts of a rollout that are not started, and the kind of the present round."""

    def __init__(
        self, sizes: StalenessSettings, held: HeldPrompts | None = None, *, is_fixed: bool = True
    ) -> None:
        """`held` is the state of an earlier one, of which this becomes the owner. `is_fixed`: each
        short round has the extra prompts and samples of `sizes`."""
        self._sizes = sizes
        if held is None:
            held = HeldPrompts(chosen=None if is_fixed else ChosenExtra())
        self.held = held

    @property
    def kind(self) -> RoundKind | None:
        """Kind of the present round; None: the policy has no rounds."""
        if not self._sizes.is_speculative:
            return None
        return RoundKind.LONG if self.held.is_long else RoundKind.SHORT

    @property
    def queue(self) -> dict[SampleGroupId, int]:
        """Long prompts, with the numbers of their tokens."""
        return self.held.queue

    @property
    def extra(self) -> Extra:
        """What the present round starts beyond what is trained."""
        most, chosen = Extra(self._sizes.extra_groups, self._sizes.extra_samples), self.held.chosen
        if self.kind is RoundKind.LONG:
            return Extra(0, 0)
        if chosen is None or self.kind is None:
            return most
        return Extra(*map(min, most, chosen.extra))

    @property
    def samples(self) -> int:
        """Samples that the present round starts of a new prompt."""
        return self._sizes.group_size + self.extra.samples

    @property
    def _started_max(self) -> int:
        """Prompts that may be started and neither trained nor dropped."""
        sizes = self._sizes
        return (sizes.staleness + 1) * (sizes.batch_groups + self.extra.groups)

    @property
    def _takes_queued_first(self) -> bool:
        if self.kind is RoundKind.SHORT:
            return self.held.chosen is not None and not self.extra.groups
        return True

    def wanted(self, started: int) -> int:
        """Number of new prompts that could start now, when so many are started."""
        waiting = len(self.held.fresh)
        if self._takes_queued_first:
            waiting += len(self.held.queue)
        return max(0, self._started_max - started - waiting)

    def progress(self, server: TrajectoryServer) -> tuple[int, int] | None:
        """Samples of the present round that are generated, and all: `group_size` of each prompt.
        None: prompts of the round are not started yet."""
        if len(server.groups) < self._started_max and not self.held.is_ended:
            return None
        size = self._sizes.group_size
        done = [sum(m.state in GENERATED for m in server.members(group)) for group in server.groups]
        return sum(min(count, size) for count in done), len(done) * size

    def add(self, group: SampleGroupId, prompt_tokens: int) -> None:
        """A new prompt."""
        self.held.fresh[group] = prompt_tokens
        self.held.is_ended = False

    def end(self) -> None:
        """There are no more new prompts."""
        self.held.is_ended = True

    def put_back(self, server: TrajectoryServer, buffers: Buffers) -> None:
        """The prompts that no instance got in the present round have not started."""
        groups = sorted(group for group in server.groups if buffers.place(group) is None)
        prompts = {group: server.groups[group].prompt_tokens for group in groups}
        for group in groups:
            server.withdraw(group)
        held = self.held
        if self.kind is RoundKind.LONG:
            held.queue = prompts | held.queue
        else:
            held.fresh = prompts | held.fresh

    def abort(self, group: SampleGroupId, prompt_tokens: int) -> None:
        """A started prompt is not trained in this round."""
        self.held.queue[group] = prompt_tokens

    def trained(self, prompts: Sequence[SeenPrompt]) -> None:
        """A batch of these prompts, one or more, is complete. As many of each round count, spread
        over it, so that long rounds have their share."""
        if self.held.chosen is None:
            return
        kept = min(SEEN_OF_ROUND, len(prompts))
        self.held.seen += [prompts[at * len(prompts) // kept] for at in range(kept)]
        del self.held.seen[:-SEEN_MAX]

    def begin(self, setting: RoundSetting) -> None:
        """A batch is complete, and the next round begins."""
        sizes, held = self._sizes, self.held
        is_cycle_over = not self.extra.groups
        held.is_long = sizes.is_speculative and len(held.queue) >= sizes.batch_groups
        if held.chosen is not None and is_cycle_over:
            most = Extra(sizes.extra_groups, sizes.extra_samples)
            held.chosen = choose_extra(setting, most, held.seen)

    def change(self, sizes: StalenessSettings, *, is_fixed: bool) -> None:
        """Another policy. The present round goes on with what is started."""
        present = self.extra if self._sizes.is_speculative else Extra(0, 0)
        self._sizes = sizes
        self.held.is_long = self.held.is_long and sizes.is_speculative
        self.held.chosen = None if is_fixed else ChosenExtra(extra=present)
        if is_fixed:
            self.held.seen = []

    def start(self, server: TrajectoryServer) -> None:
        """Starts the prompts for which the round has room, in their order. A queued one may have to
        wait until instances have discarded its earlier samples."""
        held, sizes = self.held, self._sizes
        while (held.queue or held.fresh) and len(server.groups) < self._started_max:
            if self._takes_queued(len(server.groups)):
                group = next(iter(held.queue))
                if not server.is_settled(group):
                    return
                server.start(group, held.queue.pop(group), sizes.group_size)
            elif held.fresh:
                group = next(iter(held.fresh))
                server.start(group, held.fresh.pop(group), self.samples)
            else:
                return

    def _takes_queued(self, started: int) -> bool:
        """Whether the next prompt is a queued one. In a short round only if there cannot be a batch
        of new prompts."""
        held = self.held
        if self._takes_queued_first:
            return bool(held.queue)
        lacks_new = held.is_ended and not held.fresh and started < self._sizes.batch_groups
        return lacks_new and bool(held.queue)

    def check_invariants(self, server: TrajectoryServer) -> None:
        """Raises InvariantError: a prompt is in two places, or too many are started."""
        places = [*self.held.queue, *self.held.fresh, *server.groups]
        if len(places) != len(set(places)):
            raise InvariantError("a prompt is in two places", law="one place each")
        if len(server.groups) > self._started_max:
            raise InvariantError(f"{len(server.groups)} groups are started", law="groups started")


def extra_count(over_launch: float, count: int) -> int:
    """The number of prompts or samples that a short round starts beyond `count`: `over_launch ·
    count`, rounded up, without what the product's last bits add (Flexes §3)."""
    return ceil(round(over_launch * count, 6)) - count
