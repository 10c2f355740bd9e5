"""One `generate` call on its way, and what becomes of it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plexrl.wire.operations import SamplingParams
from plexrl.wire.tensors import Arrays
from plexrl.worker.process.backend import Emit

STOP, LENGTH, ABORT = range(3)
"""Why a row ended, as the wire numbers it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of a row that one version of the weights drew."""

    start: int
    """Index of the first, from 0 at the row's first drawn token; the next segment ends it."""
    weights_seq: int


@dataclass(slots=True)
class Generation:
    """One `generate` call. Lists have one entry for each row, prompt-major."""

    name: str
    prompts: list[list[int]]
    samples_per_prompt: int
    sampling: SamplingParams
    emit: Emit | None
    weights_seq: int
    """Version of the weights when it was admitted."""
    tokens: list[Any] = field(default_factory=list)
    """int32 `[drawn]`."""
    logprobs: list[Any] = field(default_factory=list)
    """float32 `[drawn]`."""
    finish: list[int] = field(default_factory=list)
    segments: list[list[Segment]] = field(default_factory=list)
    unfinished: int = 0
    first_row: int = 0
    """Number of its first row in the call that it is a part of: random streams go by it."""
    preemptions: int = 0
    """Times that one of its samples gave its blocks up."""
    blocks_max: int = 0
    """Most blocks that samples held at a time while it ran, others' included."""

    def __post_init__(self) -> None:
        rows = len(self.prompts) * self.samples_per_prompt
        self.tokens = [np.empty(0, dtype=np.int32)] * rows
        self.logprobs = [np.empty(0, dtype=np.float32)] * rows
        self.finish = [ABORT] * rows
        self.segments = [[] for _ in range(rows)]
        self.unfinished = rows

    def arrays(self) -> Arrays:
        """The result, rows prompt-major."""
        empty = np.empty(0)
        return {
            "tokens": np.concatenate([*self.tokens, empty]).astype(np.int32),
            "lengths": np.array([len(row) for row in self.tokens], dtype=np.int32),
            "logprobs": np.concatenate([*self.logprobs, empty]).astype(np.float32),
            "finish": np.array(self.finish, dtype=np.uint8),
        }

    def mixed_segments(self) -> list[list[int]]:
        """`[row, start, weights_seq]` of every segment, of rows that another version than that of
        the generation drew, or several did."""
        return [
            [row, segment.start, segment.weights_seq]
            for row, segments in enumerate(self.segments)
            if any(segment.weights_seq != self.weights_seq for segment in segments)
            for segment in segments
        ]


@dataclass(slots=True, eq=False)
class Sample:
    """One row of a generation, waiting or running."""

    generation: Generation
    row: int
    order: int
    """Age: smaller is older. Older samples are served first and lose their blocks last."""
    prompt: Any
    """int32 `[prompt tokens]`, shared by the samples of a prompt."""
    names: list[bytes] = field(default_factory=list)
    """Names of its first full blocks, as far as they were computed."""
    segments: list[Segment] = field(default_factory=list)
    stream: int = 0
    """Names its random numbers; set when it first takes a slot."""
    tokens: Any = None
    """int32 `[drawn]` and float32 `[drawn]` while it waits again; None before its first run."""
    logprobs: Any = None

    @property
    def group(self) -> tuple[str, int]:
        """Samples of one prompt share it."""
        return self.generation.name, self.row // self.generation.samples_per_prompt

    @property
    def is_fresh(self) -> bool:
        """Nothing was drawn for it yet."""
        return self.tokens is None or len(self.tokens) == 0

    def drawn_with(self, start: int, weights_seq: int) -> None:
        """Tokens from `start` on are drawn with `weights_seq`."""
        if self.segments and self.segments[-1].start == start:
            self.segments.pop()
        if not self.segments or self.segments[-1].weights_seq != weights_seq:
            self.segments.append(Segment(start=start, weights_seq=weights_seq))
