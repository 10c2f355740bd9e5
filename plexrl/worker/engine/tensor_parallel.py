"""One engine on several ranks: the sums and gathers of a pass, and ranks kept in step.

Every rank keeps the same books and draws from the same gathered logits, so only the caller's
orders travel: the leader carries each out and sends those since its last step along with the next.

Shapes: T tokens, X hidden, R wanted tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from plexrl.worker.engine.engine import Engine
from plexrl.worker.engine.generation import Generation
from plexrl.worker.engine.protocol import EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks that share one copy of the weights."""

    rank: int
    ranks: int
    process_group: Any = None
    """None: all processes."""

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place; bit-equal on every rank."""
        dist.all_reduce(partial, group=self.process_group)
        return partial

    def gather(self, value: str) -> list[str]:
        """Every rank's value, by rank."""
        found = [""] * self.ranks
        dist.all_gather_object(found, value, group=self.process_group)
        return found

    def embed(self, token_T: torch.Tensor, rows: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """`[T, X]` from a vocabulary of which this rank holds `rows`."""
        local_T = token_T - self.rank * -(-vocabulary // self.ranks)
        here_T = (local_T >= 0) & (local_T < len(rows))
        hidden_TX = torch.zeros((len(token_T), rows.shape[1]), dtype=rows.dtype, device=rows.device)
        hidden_TX[here_T] = rows[local_T[here_T]]
        return self.add_up(hidden_TX)

    def gather_logits(self, own_RV: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """`[R, V]` from every rank's part of the vocabulary."""
        part = -(-vocabulary // self.ranks)
        padded = torch.nn.functional.pad(own_RV, (0, part - own_RV.shape[1]))
        parts = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(parts, padded.contiguous(), group=self.process_group)
        return torch.cat(parts, dim=1)[:, :vocabulary]


class LeadingEngine:
    """A `RolloutEngine` whose work the other ranks do too; on rank 0."""

    def __init__(self, engine: Engine, group: RankGroup) -> None:
        self._engine = engine
        self._group = group
        self._orders: list[tuple[str, tuple[Any, ...]]] = []

    @property
    def has_work(self) -> bool:
        """As `RolloutEngine`."""
        return self._engine.has_work

    def submit(self, generation: Generation) -> None:
        """As `RolloutEngine`."""
        self._engine.submit(generation)
        self._order("submit", _bare(generation))

    def step(self) -> list[Generation]:
        """As `RolloutEngine`."""
        self._order("step")
        self._send()
        return self._engine.step()

    def abort(self, name: str) -> None:
        """As `RolloutEngine`."""
        self._engine.abort(name)
        self._order("abort", name)

    def interrupt(self, name: str) -> Generation | None:
        """As `RolloutEngine`."""
        self._order("interrupt", name)
        return self._engine.interrupt(name)

    def pause(self) -> None:
        """As `RolloutEngine`. The other ranks are told now: they may pull weights meanwhile."""
        self._engine.pause()
        self._order("pause")
        self._send()

    def resume(self) -> None:
        """As `RolloutEngine`."""
        self._engine.resume()
        self._order("resume")

    def weights_changed(self, weights_seq: int, *, recompute_kv: bool = True) -> None:
        """As `RolloutEngine`; every other rank has its own part of the weights replaced first."""
        self._engine.weights_changed(weights_seq, recompute_kv=recompute_kv)
        self._order("weights_changed", weights_seq, recompute_kv)

    def drop_cache(self) -> None:
        """As `RolloutEngine`."""
        self._engine.drop_cache()
        self._order("drop_cache")
        self._send()

    def stats(self) -> EngineStats:
        """As `RolloutEngine`; bytes and blocks are each rank's."""
        return self._engine.stats()

    def close(self) -> None:
        """Let the other ranks return from `follow`."""
        self._order("close")
        self._send()

    def _order(self, name: str, *arguments: Any) -> None:
        self._orders.append((name, arguments))

    def _send(self) -> None:
        dist.broadcast_object_list([self._orders], src=0, group=self._group.process_group)
        self._orders = []


def follow(engine: Engine, group: RankGroup, pull: Callable[[int], None]) -> None:
    """Do what the leader does, until it closes; on every other rank.

    `pull(weights_seq)` replaces this rank's part of the weights, and is called before the engine
    goes on with them.
    """
    while True:
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=group.process_group)
        for name, arguments in received[0]:
            match name:
                case "close":
                    return
                case "weights_changed":
                    weights_seq, recompute_kv = arguments
                    pull(weights_seq)
                    engine.weights_changed(weights_seq, recompute_kv=recompute_kv)
                case _:
                    getattr(engine, name)(*arguments)


def _bare(generation: Generation) -> Generation:
    """A copy that can travel: tokens are streamed by the leader alone."""
    return replace(
        generation, emit=None, tokens=[], logprobs=[], finish=[], segments=[], unfinished=0
    )
