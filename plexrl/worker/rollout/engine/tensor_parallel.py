"""One engine on several ranks: the sums and gathers of a pass, and ranks kept in step.

Every rank keeps the same books and draws from the same gathered logits, so only the caller's
orders travel: the leader carries each out and sends those since its last step along with the next.

Shapes: T tokens, X hidden, R wanted tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from plexrl.model.parallelism import Parallelism
from plexrl.worker.rollout.engine.engine import Engine
from plexrl.worker.rollout.generation import Generation
from plexrl.worker.rollout.protocol import EngineStats, RolloutEngine

ORDERS_TIMEOUT = timedelta(days=365)
"""Of ranks that wait for something to do."""

Order = tuple[str, tuple[Any, ...]]
"""A method of `Engine`, or what else the ranks have agreed on, and its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks that share one copy of the weights."""

    rank: int
    """Among these; 0 leads."""
    ranks: int
    process_group: Any = None
    """For the sums of a pass. None: all processes."""
    orders_group: Any = None
    """For what the leader tells, which may be heard on a thread of its own, and waited for however
    long nothing is to be done. None: all processes."""
    leader: int = 0
    """Its number among all processes."""

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place; bit-equal on every rank."""
        dist.all_reduce(partial, group=self.process_group)
        return partial

    def tell(self, orders: list[Order]) -> None:
        """Send orders to the other ranks; on the leader."""
        dist.broadcast_object_list([orders], src=self.leader, group=self.orders_group)

    def hear(self) -> list[Order]:
        """The next orders, on the other ranks; waits for them.

        Raises:
            RuntimeError: the leader is gone.
        """
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=self.leader, group=self.orders_group)
        orders: list[Order] = received[0]
        return orders

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


class Orders:
    """What the leader has the other ranks do, in its order; kept until it is worth a message."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._kept: list[Order] = []

    def add(self, name: str, *arguments: Any) -> None:
        """To be told with the next message."""
        self._kept.append((name, arguments))

    def send(self, name: str, *arguments: Any) -> None:
        """To be told now, behind all that was kept."""
        self._kept.append((name, arguments))
        self._group.tell(self._kept)
        self._kept = []


class LeadingEngine:
    """A `RolloutEngine` whose work the other ranks do too; on rank 0."""

    def __init__(self, engine: RolloutEngine, orders: Orders) -> None:
        self._engine = engine
        self._orders = orders

    @property
    def has_work(self) -> bool:
        """As `RolloutEngine`."""
        return self._engine.has_work

    def submit(self, generation: Generation) -> None:
        """As `RolloutEngine`."""
        self._engine.submit(generation)
        self._orders.add("submit", _bare(generation))

    def step(self) -> list[Generation]:
        """As `RolloutEngine`."""
        self._orders.send("step")
        return self._engine.step()

    def abort(self, name: str) -> None:
        """As `RolloutEngine`."""
        self._engine.abort(name)
        self._orders.add("abort", name)

    def interrupt(self, name: str) -> Generation | None:
        """As `RolloutEngine`."""
        self._orders.add("interrupt", name)
        return self._engine.interrupt(name)

    def pause(self) -> None:
        """As `RolloutEngine`. The other ranks are told now: they may pull weights meanwhile."""
        self._engine.pause()
        self._orders.send("pause")

    def resume(self) -> None:
        """As `RolloutEngine`."""
        self._engine.resume()
        self._orders.add("resume")

    def weights_changed(self, weights_seq: int, *, recompute_kv: bool = True) -> None:
        """As `RolloutEngine`; every other rank has its own part of the weights replaced first."""
        self._engine.weights_changed(weights_seq, recompute_kv=recompute_kv)
        self._orders.add("weights_changed", weights_seq, recompute_kv)

    def drop_cache(self) -> None:
        """As `RolloutEngine`."""
        self._engine.drop_cache()
        self._orders.send("drop_cache")

    def stats(self) -> EngineStats:
        """As `RolloutEngine`; bytes and blocks are each rank's."""
        return self._engine.stats()

    def close(self) -> None:
        """Let the other ranks return from `follow`."""
        self._orders.send("close")


def rank_group(layout: Parallelism, rank: int) -> RankGroup | None:
    """The group that `rank` shares its copy of the weights with; None: it has one of its own.

    All processes of the layout must come to this, and must have met.
    """
    if layout.tp == 1:
        return None
    found: RankGroup | None = None
    for members in layout.groups("tp"):
        # Every process takes part in the making of every group.
        sums = dist.new_group(list(members))
        orders = dist.new_group(list(members), timeout=ORDERS_TIMEOUT, backend="gloo")
        if rank in members:
            found = RankGroup(
                rank=members.index(rank),
                ranks=len(members),
                process_group=sums,
                orders_group=orders,
                leader=members[0],
            )
    return found


def follow(engine: Engine, group: RankGroup, pull: Callable[[int], None]) -> None:
    """Do what the leader does, until it closes; on every other rank.

    `pull(weights_seq)` replaces this rank's part of the weights, and is called before the engine
    goes on with them.
    """
    while True:
        for name, arguments in group.hear():
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


def is_of_lost_rank(error: BaseException) -> bool:
    """It was raised by a collective whose other ranks have gone, or no longer answer."""
    # What gloo raises has no type of its own, but names the place in its source.
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )
