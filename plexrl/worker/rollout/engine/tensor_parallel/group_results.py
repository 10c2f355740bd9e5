"""The results that the groups of an engine return to the rank that leads it, between two tokens.

The first rank of each group notes the tokens and the ended rows of its group. After a step it sends
them to the first rank of all, with its counts; most messages are a few numbers. The groups do not
wait for each other: the leader may be a few steps ahead of what it has received.
"""

import pickle
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from plexrl.worker.rollout.engine.tensor_parallel.switch_groups import SwitchGroups
from plexrl.worker.rollout.generation import Generation, TokenDetails, WeightSpan

STEPS_AHEAD = 4
"""Steps by which a group may be behind the first one; streamed tokens and ended rows are late by as
many. Without it, each step would take as long as that of the slowest group."""


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
    details: TokenDetails | None
    finish: int
    segments: list[WeightSpan]


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
                    details=generation.details[row],
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
            Preempted(generation=generation.name, count=generation.preemptions)
            for generation in generations
            if generation.preemptions
        ]
        for generation in generations:
            generation.preemptions = 0
        taken, self._results = [*preempted, *self._results], []
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The message of a group."""

    group: int
    counts: list[int]
    value: Any
    """Absent if it was empty."""


class ReportLink:
    """Sends from the first rank of each group to the engine's first rank, in order."""

    def __init__(self, groups: SwitchGroups, counts: int) -> None:
        """Every report has so many `counts`."""
        self._groups = groups
        self._counts = counts
        self.expected = 0
        """On the leader: reports of each other group that it has not received."""
        self._sent: deque[list[tuple[Any, torch.Tensor]]] = deque()
        """The messages of reports that may not have left yet, with their memory."""

    def post(self, size: int, counts: Sequence[int], value: Any) -> None:
        """Send a report from a group of `size`; returns at once. All ranks call this in each of
        their steps."""
        if self._groups.rank == 0:
            self.expected += 1
        elif self._groups.rank % size == 0:
            payload = pickle.dumps(value) if value else b""
            parts = [torch.tensor([*counts, len(payload)], dtype=torch.int64)]
            if payload:
                parts.append(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            leader, group = self._groups.members[0], self._groups.control
            self._sent.append([(dist.isend(part, leader, group=group), part) for part in parts])
            while len(self._sent) > STEPS_AHEAD + 1:
                # The leader has received it, or is about to.
                for work, _ in self._sent.popleft():
                    work.wait()

    def receive(self, size: int) -> list[Report]:
        """The next report of each other group of `size`; on the leader."""
        self.expected -= 1
        found = []
        for group in range(1, self._groups.count(size)):
            sender = self._groups.members[group * size]
            numbers = torch.empty(self._counts + 1, dtype=torch.int64)
            dist.recv(numbers, sender, group=self._groups.control)
            *counts, length = numbers.tolist()
            value = None
            if length:
                content = torch.empty(length, dtype=torch.uint8)
                dist.recv(content, sender, group=self._groups.control)
                value = pickle.loads(content.numpy().tobytes())
            found.append(Report(group=group, counts=counts, value=value))
        return found
