"""One engine on several ranks: the collectives of a forward pass, and how ranks stay in step.

Every rank keeps the same queue and KV-cache bookkeeping and draws from the same gathered logits, so
only calls to the engine have to be broadcast. The leader makes each call at once, buffers it, and
sends the buffered calls with its next step.

Shapes: T tokens, X hidden, R wanted tokens, V vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from plexrl.model.parallelism import Parallelism
from plexrl.worker.rollout.generation import Generation
from plexrl.worker.rollout.rollout_engine import RolloutEngine, RowLength

CALLS_TIMEOUT = timedelta(days=365)
"""Timeout of followers that wait for a call: an idle engine makes none."""

EngineCall = tuple[str, tuple[Any, ...]]
"""(name, arguments): a method of `Engine`, or a name of `plexrl.worker.process.leader_follower`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks that share one copy of the weights."""

    rank: int
    """This rank's index in the group; 0 leads."""
    size: int
    """Ranks in the group."""
    splits: int = 1
    """Parts into which the group divides what each rank keeps. Ranks that also work in smaller
    groups keep the share of the smallest, and compute with one part of it in a larger group."""
    order: tuple[int, ...] = ()
    """The part of the whole model with which each rank computes. Empty: in the order of ranks."""
    process_group: Any = None
    """For the collectives of a pass. None: all processes."""
    calls_group: Any = None
    """Only for the leader's calls: a separate thread may receive them, and no timeout applies.
    None: all processes."""
    leader: int = 0
    """The leader's rank among all processes."""

    @property
    def shares(self) -> int:
        """Shares into which the weights are divided: each rank keeps one."""
        return self.size // self.splits

    @property
    def share(self) -> int:
        """The share that this rank keeps. It does not depend on the size of the group."""
        return self._index // self.splits

    @property
    def part(self) -> int:
        """The part of its share with which this rank computes."""
        return self._index % self.splits

    @property
    def _index(self) -> int:
        return self.order[self.rank] if self.order else self.rank

    def part_of(self, kept: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """A view of this rank's part of the share `kept` of a weight that `axis` divides."""
        extent = kept.shape[axis] // self.splits
        return kept.narrow(axis, self.part * extent, extent)

    def vocabulary_part(self, kept: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """A view of this rank's rows, of those of `vocabulary` that it keeps; maybe none."""
        extent = self._vocabulary_extents(vocabulary)[1]
        return kept[self.part * extent : (self.part + 1) * extent]

    def _vocabulary_extents(self, vocabulary: int) -> tuple[int, int]:
        """Most rows of a share, and of a part of it."""
        share = -(-vocabulary // self.shares)
        return share, -(-share // self.splits)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place; bit-equal on every rank."""
        dist.all_reduce(partial, group=self.process_group)
        return partial

    def broadcast(self, calls: list[EngineCall]) -> None:
        """Send calls to the followers; on the leader."""
        dist.broadcast_object_list([calls], src=self.leader, group=self.calls_group)

    def receive(self) -> list[EngineCall]:
        """The leader's next calls; blocks. On the followers.

        Raises:
            RuntimeError: the leader is gone.
        """
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=self.leader, group=self.calls_group)
        calls: list[EngineCall] = received[0]
        return calls

    def gather(self, value: str) -> list[str]:
        """All-gather of one string per rank, in rank order."""
        found = [""] * self.size
        dist.all_gather_object(found, value, group=self.process_group)
        return found

    def embed(self, token_T: torch.Tensor, rows: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Embeddings `[T, X]`; this rank computes with `rows` of the embedding matrix."""
        share, extent = self._vocabulary_extents(vocabulary)
        local_T = token_T - (self.share * share + self.part * extent)
        if not len(rows):
            return self.all_reduce(rows.new_zeros((len(token_T), rows.shape[1])))
        # Without an index by booleans, whose size the CPU would wait for.
        elsewhere_T = (local_T < 0) | (local_T >= len(rows))
        hidden_TX = rows.index_select(0, local_T.clamp(0, len(rows) - 1))
        return self.all_reduce(hidden_TX.masked_fill_(elsewhere_T[:, None], 0.0))

    def gather_logits(self, own_RV: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Logits `[R, V]` of the whole vocabulary, from every rank's part."""
        share, extent = self._vocabulary_extents(vocabulary)
        padded = torch.nn.functional.pad(own_RV, (0, extent - own_RV.shape[1]))
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded.contiguous(), group=self.process_group)
        if self.splits == 1:
            return torch.cat(parts, dim=1)[:, :vocabulary]
        parts = [parts[self.order.index(index)] for index in range(self.size)]
        # Only whole shares are next to each other in the vocabulary: their last parts have padding.
        shares = [
            torch.cat(parts[first : first + self.splits], dim=1)[:, :share]
            for first in range(0, self.size, self.splits)
        ]
        return torch.cat(shares, dim=1)[:, :vocabulary]


class EngineCalls:
    """The leader's buffer of calls that the followers repeat, in order."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._buffered: list[EngineCall] = []

    def add(self, name: str, *arguments: Any) -> None:
        """Buffer a call for the next message."""
        self._buffered.append((name, arguments))

    def send(self, name: str, *arguments: Any) -> None:
        """Send the buffered calls and this one now."""
        self._buffered.append((name, arguments))
        self._group.broadcast(self._buffered)
        self._buffered = []


class LeadingEngine:
    """The calls of a `RolloutEngine` that the leader makes and the followers repeat.

    Weight updates and moves are no such calls: every rank receives those operations itself.
    """

    def __init__(self, engine: RolloutEngine, calls: EngineCalls) -> None:
        self._engine = engine
        self._calls = calls

    @property
    def has_work(self) -> bool:
        """As `RolloutEngine`."""
        return self._engine.has_work

    def submit(self, generation: Generation) -> None:
        """As `RolloutEngine`."""
        self._engine.submit(generation)
        self._calls.add("submit", _without_results(generation))

    def step(self) -> list[Generation]:
        """As `RolloutEngine`."""
        self._calls.send("step")
        return self._engine.step()

    def abort(self, name: str, rows: Collection[int] | None = None) -> None:
        """As `RolloutEngine`."""
        self._engine.abort(name, rows)
        self._calls.add("abort", name, rows)

    def interrupt(self, name: str) -> Generation | None:
        """As `RolloutEngine`."""
        self._calls.send("interrupt", name)
        return self._engine.interrupt(name)

    def lengths(self) -> list[RowLength]:
        """As `RolloutEngine`."""
        return self._engine.lengths()

    def pause(self) -> None:
        """As `RolloutEngine`. Sent at once, because the followers may pull weights next."""
        self._engine.pause()
        self._calls.send("pause")

    def resume(self) -> None:
        """As `RolloutEngine`."""
        self._engine.resume()
        self._calls.add("resume")


def rank_group(layout: Parallelism, rank: int) -> RankGroup | None:
    """The group that shares one copy of the weights with `rank`; None: `rank` has its own copy.

    Every process of the layout must call this, after the default process group exists.
    """
    if layout.tp == 1:
        return None
    found: RankGroup | None = None
    for members in layout.groups("tp"):
        # `new_group` is collective: every process takes part in making every group.
        sums = dist.new_group(list(members))
        calls = dist.new_group(list(members), timeout=CALLS_TIMEOUT, backend="gloo")
        if rank in members:
            found = RankGroup(
                rank=members.index(rank),
                size=len(members),
                process_group=sums,
                calls_group=calls,
                leader=members[0],
            )
    return found


def _without_results(generation: Generation) -> Generation:
    """A copy to send to the followers; only the leader streams tokens."""
    return replace(
        generation,
        emit=None,
        on_end=None,
        tokens=[],
        logprobs=[],
        details=[],
        finish=[],
        segments=[],
        unfinished=0,
    )


def is_lost_rank_error(error: BaseException) -> bool:
    """Whether a collective failed because other ranks are gone or do not answer."""
    # gloo, and NCCL as vLLM calls it, raise a plain RuntimeError; only its text names them.
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL error" in str(error))
    )
