"""What the groups of an engine return to the rank that leads it, between two tokens.

The first rank of each group notes the tokens and the ended rows of its group. After a step it sends
them to the first rank of all, with its counts; most messages are a few numbers.
"""

import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from plexrl.worker.rollout.engine.tensor_parallel.switch_groups import SwitchGroups
from plexrl.worker.rollout.generation import Generation, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """New tokens of a row whose generation streams them."""

    generation: str
    row: int
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRow:
    """A row that has ended, with its results as in `Generation`."""

    generation: str
    row: int
    tokens: Any
    logprobs: Any
    finish: int
    segments: list[Segment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """Samples of a generation lost their blocks."""

    generation: str
    count: int


Result = DrawnTokens | EndedRow | Preempted


class Outbox:
    """The results of one group that its first rank has not sent."""

    def __init__(self) -> None:
        self._results: list[Result] = []

    def listen(self, generation: Generation, *, streams: bool) -> None:
        """Note the results of `generation`, the group's part of a whole one."""
        name = generation.name

        def drawn(row: int, tokens: list[int], logprobs: list[float]) -> None:
            self._results.append(
                DrawnTokens(generation=name, row=row, tokens=tokens, logprobs=logprobs)
            )

        def ended(row: int) -> None:
            self._results.append(
                EndedRow(
                    generation=name,
                    row=row,
                    tokens=generation.tokens[row],
                    logprobs=generation.logprobs[row],
                    finish=generation.finish[row],
                    segments=generation.segments[row],
                )
            )

        generation.emit = drawn if streams else None
        generation.on_end = ended

    def take(self, generations: Collection[Generation]) -> list[Result]:
        """All results of `generations` since the last call. The row that ends a generation comes
        last."""
        preempted = [
            Preempted(generation=each.name, count=each.preemptions)
            for each in generations
            if each.preemptions
        ]
        for each in generations:
            each.preemptions = 0
        taken, self._results = [*preempted, *self._results], []
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a group sent."""

    group: int
    counts: list[int]
    value: Any
    """Absent if it was empty."""


def send_to_leader(
    groups: SwitchGroups, size: int, counts: Sequence[int], value: Any
) -> list[Report]:
    """Send `counts` and `value` from the first rank of each group of `size` to the engine's first
    rank, which returns those of all groups. Every rank calls this; `counts` has the same length on
    all."""
    if groups.rank % size:
        return []
    if groups.rank:
        payload = pickle.dumps(value) if value else b""
        dist.send(_numbers([*counts, len(payload)]), groups.members[0], group=groups.control)
        if payload:
            content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            dist.send(content, groups.members[0], group=groups.control)
        return []
    found = [Report(group=0, counts=list(counts), value=value)]
    for group in range(1, groups.count(size)):
        sender = groups.members[group * size]
        numbers = _numbers([0] * (len(counts) + 1))
        dist.recv(numbers, sender, group=groups.control)
        *theirs, length = numbers.tolist()
        content = torch.empty(length, dtype=torch.uint8)
        if length:
            dist.recv(content, sender, group=groups.control)
        value = pickle.loads(content.numpy().tobytes()) if length else None
        found.append(Report(group=group, counts=theirs, value=value))
    return found


def _numbers(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
