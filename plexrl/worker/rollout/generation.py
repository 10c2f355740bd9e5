"""One `generate` call in an engine, and its results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plexrl.wire.operations import SamplingParams
from plexrl.wire.tensors import Array, Arrays
from plexrl.worker.interface.backend import Emit

STOP, LENGTH, ABORT = range(3)
"""Why a row ended; the numbers are part of the wire format."""

ODD_1 = -7046029254386353131
ODD_2 = -4658895280553007687
ODD_3 = -7723592293110705685
"""Odd multipliers of splitmix64, as int64."""
_ALL_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """Consecutive tokens of a row, drawn by one version of the weights."""

    start: int
    """Index of the first token; 0 is the row's first drawn token. The next segment ends this
    one."""
    weights_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlacement:
    """The groups of ranks that draw a generation's rows when it begins."""

    tp: int
    """Ranks of a group."""
    groups: tuple[int, ...]
    """Index of the group, for each row."""
    streams: bool
    """Tokens are returned as they are drawn, and not with the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDetails:
    """What the drawn tokens of a row have beside their logprobs, for a generation that wants it:
    arrays with one entry per token, k 0 and no `sampling_logprobs` if these are not wanted."""

    sampling_logprobs: Array
    """float32 `[tokens]`, or `[0]`."""
    top_ids: Array
    """int32 `[tokens, k]`, the likeliest first."""
    top_logprobs: Array
    """float32 `[tokens, k]`."""

    @classmethod
    def room(cls, sampling: SamplingParams, tokens: int) -> "TokenDetails":
        """Arrays for so many tokens, not filled in: the system gives them memory as they fill."""
        shape = (tokens, sampling.top_logprobs)
        return cls(
            sampling_logprobs=np.empty(tokens * sampling.sampling_logprobs, dtype=np.float32),
            top_ids=np.empty(shape, dtype=np.int32),
            top_logprobs=np.empty(shape, dtype=np.float32),
        )

    def fill(self, first: "TokenDetails") -> None:
        """Copy the numbers of the first tokens."""
        self.sampling_logprobs[: len(first.sampling_logprobs)] = first.sampling_logprobs
        self.top_ids[: len(first.top_ids)] = first.top_ids
        self.top_logprobs[: len(first.top_logprobs)] = first.top_logprobs

    def first(self, tokens: int) -> "TokenDetails":
        """A copy for the first tokens, which keeps no memory of the others."""
        return TokenDetails(
            sampling_logprobs=self.sampling_logprobs[:tokens].copy(),
            top_ids=self.top_ids[:tokens].copy(),
            top_logprobs=self.top_logprobs[:tokens].copy(),
        )


class PromptScores:
    """Logprobs of a prompt's tokens, each given those before it. NaN and -1: not computed."""

    def __init__(self, tokens: int, top: int) -> None:
        self.logprobs = np.full(tokens, np.nan, dtype=np.float32)
        self.logprobs[:1] = 0.0
        self.top_ids = np.full((tokens, top), -1, dtype=np.int32)
        self.top_logprobs = np.full((tokens, top), np.nan, dtype=np.float32)

    @property
    def top(self) -> int:
        """Alternatives of each token."""
        return int(self.top_ids.shape[1])

    def keep(self, position: int, logprob: float, ids: Array, logprobs: Array) -> None:
        """Keep the numbers of the token at `position`; of the likeliest tokens the first ones."""
        self.logprobs[position] = logprob
        self.top_ids[position] = ids[: self.top]
        self.top_logprobs[position] = logprobs[: self.top]

    @property
    def is_whole(self) -> bool:
        """Whether the last token has its logprob: passes compute them in order."""
        return not np.isnan(self.logprobs[-1])


@dataclass(slots=True)
class Generation:
    """One `generate` call. Lists have one entry per row, prompt-major."""

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
    details: list[TokenDetails | None] = field(default_factory=list)
    """None: no token was drawn, or nothing is wanted."""
    finish: list[int] = field(default_factory=list)
    segments: list[list[WeightSpan]] = field(default_factory=list)
    prompt_scores: list[PromptScores] = field(default_factory=list)
    """One entry per prompt, equal prompts share one; empty: not wanted."""
    unfinished: int = 0
    first_row: int = 0
    """Index of this part's first row in the whole call; random streams depend on it."""
    prompt_sampling: Mapping[str, Array] = field(default_factory=dict)
    """Values for each prompt that replace those of `sampling`, by name; see `PROMPT_SAMPLING`."""
    rows: "frozenset[int] | None" = None
    """The rows that this engine draws; None: all."""
    placement: "RowPlacement | None" = None
    """Where its rows are drawn, in an engine of several groups of ranks; set when it is queued."""
    on_end: "Callable[[int], None] | None" = None
    """Called with each row that has ended, after its results are stored."""
    preemptions: int = 0
    """Times that one of its samples lost its blocks."""
    blocks_max: int = 0
    """Most blocks held at a time while it ran, by samples of all generations."""

    def __post_init__(self) -> None:
        rows = len(self.prompts) * self.samples_per_prompt
        self.tokens = [np.empty(0, dtype=np.int32)] * rows
        self.logprobs = [np.empty(0, dtype=np.float32)] * rows
        self.details = [None] * rows
        self.finish = [ABORT] * rows
        self.segments = [[] for _ in range(rows)]
        self.unfinished = rows if self.rows is None else len(self.rows)
        self.prompt_scores = []
        if self.sampling.scores_prompts:
            top, scores = self.sampling.prompt_top_logprobs, dict[tuple[int, ...], PromptScores]()
            for prompt in self.prompts:
                found = scores.setdefault(tuple(prompt), PromptScores(len(prompt), top))
                self.prompt_scores.append(found)

    def max_tokens(self, row: int) -> int:
        """Most tokens to draw for a row."""
        return self._setting("max_tokens", row, self.sampling.max_tokens)

    def random_stream(self, row: int) -> int:
        """Id of a row's random stream, an int64."""
        sampling = self.sampling
        if "first_sample" in self.prompt_sampling:
            number = self._setting("first_sample", row, 0) + row % self.samples_per_prompt
        else:
            number = sampling.first_sample + self.first_row + row
        drawn = self._setting("drawn_tokens", row, sampling.drawn_tokens)
        return stream_of(sampling.seed or 0, number, drawn)

    def drawn_before(self, row: int) -> int:
        """Tokens at the end of the row's prompt that were drawn earlier."""
        prompt = self.prompts[row // self.samples_per_prompt]
        return min(len(prompt), self._setting("drawn_tokens", row, self.sampling.drawn_tokens))

    def _setting(self, name: str, row: int, common: int) -> int:
        values = self.prompt_sampling.get(name)
        return common if values is None else int(values[row // self.samples_per_prompt])

    def arrays(self) -> Arrays:
        """The result, rows prompt-major."""
        empty = np.empty(0)
        return {
            "tokens": np.concatenate([*self.tokens, empty]).astype(np.int32),
            "lengths": np.array([len(row) for row in self.tokens], dtype=np.int32),
            "logprobs": np.concatenate([*self.logprobs, empty]).astype(np.float32),
            "finish": np.array(self.finish, dtype=np.uint8),
            **self._detail_arrays(),
        }

    def _detail_arrays(self) -> Arrays:
        """What the parameters of sampling ask for beside tokens and logprobs."""
        sampling, found = self.sampling, Arrays()
        details = [detail for detail in self.details if detail is not None]
        details.append(TokenDetails.room(sampling, 0))
        if sampling.sampling_logprobs:
            found["sampling_logprobs"] = np.concatenate([row.sampling_logprobs for row in details])
        if sampling.top_logprobs:
            found["top_ids"] = np.concatenate([row.top_ids for row in details])
            found["top_logprobs"] = np.concatenate([row.top_logprobs for row in details])
        if self.prompt_scores:
            scores = self.prompt_scores
            found["prompt_logprobs"] = np.concatenate([score.logprobs for score in scores])
            if sampling.prompt_top_logprobs:
                found["prompt_top_ids"] = np.concatenate([score.top_ids for score in scores])
                found["prompt_top_logprobs"] = np.concatenate(
                    [score.top_logprobs for score in scores]
                )
        return found

    def mixed_segments(self) -> list[list[int]]:
        """`[row, start, weights_seq]` of every segment, for rows that another version than the
        generation's drew, or several versions."""
        return [
            [row, segment.start, segment.weights_seq]
            for row, segments in enumerate(self.segments)
            if any(segment.weights_seq != self.weights_seq for segment in segments)
            for segment in segments
        ]


@dataclass(slots=True, eq=False)
class GeneratedRow:
    """One row of a generation, waiting or running."""

    generation: Generation
    row: int
    order: int
    """Order of submission. Older samples are served first and preempted last."""
    prompt: Any
    """int32 `[prompt tokens]`, shared by the samples of a prompt."""
    prompt_number: int
    """The same for all rows of the generation with these tokens."""
    names: list[bytes] = field(default_factory=list)
    """Names (prefix hashes, see `blocks`) of its first full blocks that are computed."""
    segments: list[WeightSpan] = field(default_factory=list)
    stream: int = 0
    """Id of its random stream; set when the sample first gets a slot."""
    tokens: Any = None
    """int32 `[drawn]`, and `logprobs` float32 `[drawn]`, while a preempted sample waits; None
    before its first run."""
    logprobs: Any = None
    details: TokenDetails | None = None
    """Details of the drawn tokens, as `tokens`; None: nothing is wanted."""

    @property
    def group(self) -> tuple[str, int]:
        """Identifies the prompt: its samples have the same value."""
        return self.generation.name, self.prompt_number

    @property
    def scores(self) -> PromptScores | None:
        """Where the logprobs of its prompt belong; None: they are there, or not wanted."""
        scores = self.generation.prompt_scores
        found = scores[self.prompt_number] if scores else None
        return None if found is None or found.is_whole else found

    @property
    def is_fresh(self) -> bool:
        """Whether no token was drawn yet."""
        return self.tokens is None or len(self.tokens) == 0

    def drawn_with(self, start: int, weights_seq: int) -> None:
        """Record that version `weights_seq` draws the tokens from `start` on."""
        if self.segments and self.segments[-1].start == start:
            self.segments.pop()
        if not self.segments or self.segments[-1].weights_seq != weights_seq:
            self.segments.append(WeightSpan(start=start, weights_seq=weights_seq))


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedSample:
    """An unfinished sample that leaves an engine for another one with the same weights."""

    generation: str
    row: int
    order: int
    """As `GeneratedRow.order`."""
    known: int
    """Prompt tokens and drawn tokens."""
    tokens: Any
    """As `GeneratedRow.tokens`, and `logprobs`."""
    logprobs: Any
    details: TokenDetails | None
    segments: tuple[WeightSpan, ...]
    blocks: tuple[int, ...] = ()
    """The blocks that it held; empty: it has no keys and values."""
    computed: int = 0
    """Tokens whose keys and values are in its blocks."""
    stale: bool = False
    """Part of the keys and values was computed with previous weights."""
    forked: bool = False
    """Its last block may be shared with another sample."""


def stream_of(seed: int, sample: int, drawn: int = 0) -> int:
    """The id of a sample's random stream after its first `drawn` tokens, an int64."""
    mixed = _mix_int((_mix_int(seed) + sample * ODD_1 % (1 << 63)) & _ALL_BITS)
    # Engines add the position times the same number.
    mixed = (mixed + drawn * ODD_2) & _ALL_BITS
    return mixed - (1 << 64) if mixed >> 63 else mixed


def _mix_int(value: int) -> int:
    """splitmix64's finaliser on one unsigned number."""
    value &= _ALL_BITS
    value = (value ^ (value >> 30)) * ODD_2 & _ALL_BITS
    value = (value ^ (value >> 27)) * ODD_3 & _ALL_BITS
    return value ^ (value >> 31)
