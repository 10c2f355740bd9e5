"""The interface of a rollout engine, and what all engines do alike.

One thread calls an engine. Between two calls of `step` every sample is at a token boundary, and all
other calls take effect there.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from plexrl.errors import BatchShapeError, InvalidRequestError
from plexrl.model.memory.kv_cache import KV_BYTES
from plexrl.model.text.files import as_ids
from plexrl.worker.rollout.generation import Generation
from plexrl.worker.rollout.stops import TextDecoder

STEP_TOKENS_MAX = 2048
"""Most tokens in one pass: bounds the time for which a prompt delays the other samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine's current state, and counters since the engine was created."""

    running: int
    """Samples that hold a slot."""
    waiting: int
    """Samples without a slot, including preempted ones."""
    paused: bool
    weights_seq: int
    """Version of the weights."""
    steps: int
    tokens_drawn: int
    tokens_computed: int
    """Tokens run through the model."""
    prefill_s: float = 0.0
    """Duration of the passes in which prompts, or tokens whose cache was dropped, were computed. Of
    an engine with several groups, in the first one of the present size."""
    tokens_recomputed: int
    """Computed tokens whose cache had been dropped: the cost of preemptions and weight updates."""
    prefix_tokens_reused: int
    """Prompt tokens found in the prefix cache."""
    preemptions: int
    """Times that a sample lost its blocks to an older one."""
    kv_bytes_max: int
    """Budget of the KV cache."""
    block_bytes: int
    block_tokens: int
    """Tokens of one block."""
    blocks: int
    blocks_held: int
    """Blocks that samples hold."""
    blocks_kept: int
    """Blocks that no sample holds, kept in the prefix cache."""
    tp: int = 1
    """Ranks of each tensor-parallel group. An engine with several groups counts the samples and
    blocks of all, as its leader knew them after the last step."""
    tp_switches: int = 0
    """Times that `set_tp` changed the size of the groups."""
    tp_switch_s: float = 0.0
    """Duration of the last such change."""
    kv_bytes_moved: int = 0
    """Bytes of keys and values that the last change sent between ranks, over all ranks."""
    groups_made: int = 0
    """Communication groups that this process made, at its start."""


class RowLength(NamedTuple):
    """An unfinished row."""

    name: str
    """Its generation."""
    row: int
    tokens: int
    """Prompt and drawn tokens."""
    runs: bool
    """It holds a slot."""
    group: int = 0
    """Index of the tensor-parallel group that draws it."""


class MeasuredSteps(NamedTuple):
    """Mean of consecutive decode steps with the same number of rows, by groups of the same size.

    In an engine of several groups it tells about the first one: `running` and `kv_tokens` are that
    group's rows and cached tokens, and `seconds` are without the wait for other groups.
    """

    number: int
    """Counts the entries of this engine, from 1."""
    running: int
    kv_tokens: float
    seconds: float
    tp: int = 1
    """Ranks of the tensor-parallel group."""
    other_s: float = 0.0
    """Further seconds of a step: until the results of all groups are together."""


class StepMeter:
    """Measures decode steps: passes in which every row draws a token and no prompt is computed."""

    MEAN_OF = 16
    KEPT = 64

    def __init__(self) -> None:
        self.latest: deque[MeasuredSteps] = deque(maxlen=self.KEPT)
        self._number = 0
        self._tp = 1
        self._running = self._count = 0
        self._kv_tokens = self._seconds = self._other_s = 0.0

    def begin(self, tp: int) -> None:
        """The next steps are those of groups of `tp` ranks; no mean is over two sizes."""
        self._tp, self._running = tp, 0

    def add(self, running: int, kv_tokens: int, seconds: float, other_s: float = 0.0) -> None:
        """A step of `running` rows with `kv_tokens` tokens in their KV caches. `other_s` is as in
        `MeasuredSteps`."""
        if running != self._running:
            # Too few steps for a mean are dropped.
            self._running, self._count = running, 0
            self._kv_tokens = self._seconds = self._other_s = 0.0
        self._count += 1
        self._kv_tokens += kv_tokens
        self._seconds += seconds
        self._other_s += other_s
        if self._count == self.MEAN_OF:
            self._number += 1
            means = self._kv_tokens / self._count, self._seconds / self._count
            other_s = self._other_s / self._count
            self.latest.append(MeasuredSteps(self._number, running, *means, self._tp, other_s))
            self._count, self._kv_tokens, self._seconds, self._other_s = 0, 0.0, 0.0, 0.0


class LastStep(StepMeter):
    """The last decode step, for whoever measures more of it."""

    step: tuple[int, int, float] | None = None

    def add(self, running: int, kv_tokens: int, seconds: float, other_s: float = 0.0) -> None:
        """As `StepMeter`."""
        self.step = running, kv_tokens, seconds + other_s


class RolloutEngine(ABC):
    """Generates with one copy of the weights, many calls at a time. Not thread-safe."""

    weights_seq: int
    """Version of the weights that draw the next token."""

    def __init__(self, ends: frozenset[int], sequence_tokens_max: int) -> None:
        """`ends`: the model's end tokens."""
        self._ends = ends
        self._sequence_max = sequence_tokens_max
        self._generations: dict[str, Generation] = {}
        self._ended: list[Generation] = []
        self._paused = False
        self._submitted = 0
        self._steps = self._tokens_drawn = 0
        self._text: TextDecoder | None = None
        self.meter = StepMeter()

    def use_text(self, text: TextDecoder) -> None:
        """Match stop texts with the tokenizer of the model."""
        self._text = text

    @property
    def has_work(self) -> bool:
        """Whether `step` would draw a token or return a generation. A paused engine draws none."""
        return bool(self._ended) or (bool(self._generations) and not self._paused)

    def submit(self, generation: Generation) -> None:
        """Queue a generation; also while paused. Its `weights_seq` replaces the engine's, if later.

        Raises:
            BatchShapeError: a prompt is empty or as long as the longest sequence.
            InvalidRequestError: it has stop texts, and the model has no tokenizer.
        """
        if generation.sampling.stop_strings:
            assert self._text is not None, "a backend gives its engine the tokenizer"
            self._text.prepare()
        longest = self._sequence_max - 1
        for index, prompt in enumerate(generation.prompts):
            if not 1 <= len(prompt) <= longest:
                raise BatchShapeError(
                    f"prompt {index} has {len(prompt)} tokens; it must have 1 to {longest}",
                    row=index,
                )
        # After a load the engine learns the version of its weights from the first generation. That
        # version may be older than an update since the generation was admitted.
        self.weights_seq = max(self.weights_seq, generation.weights_seq)
        self._generations[generation.name] = generation
        self._enqueue(generation)
        if generation.unfinished == 0:
            self._finish(generation)

    def step(self) -> list[Generation]:
        """Draw at most one token for every sample; returns the generations that have ended."""
        if self._generations and not self._paused:
            self._pass()
        ended, self._ended = self._ended, []
        return ended

    @abstractmethod
    def abort(self, name: str, rows: Collection[int] | None = None) -> None:
        """End a generation's rows, or only `rows`, with the tokens drawn so far; the next step
        returns a generation of which all have ended. No effect on rows that have ended, or for an
        unknown name."""

    def interrupt(self, name: str) -> Generation | None:
        """Remove and return a generation with the tokens drawn so far. None: unknown name."""
        self.abort(name)
        for index, generation in enumerate(self._ended):
            if generation.name == name:
                return self._ended.pop(index)
        return None

    def pause(self) -> None:
        """Draw no tokens until `resume`. Running samples keep their slots and their cache."""
        self._paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = False

    @abstractmethod
    def weights_changed(self, weights_seq: int, *, recompute_kv: bool = True) -> None:
        """Continue with version `weights_seq`: the caller has replaced the weights in place.

        With `recompute_kv`, the cache of running samples is recomputed with the new weights.
        Without it, they keep the cache of the previous weights, which is faster and further
        off-policy. New samples never reuse that cache.
        """

    @abstractmethod
    def drop_cache(self) -> None:
        """Free the cache's memory. Running samples wait and are recomputed later."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Current state and counters."""

    @abstractmethod
    def lengths(self) -> list[RowLength]:
        """All unfinished rows."""

    @abstractmethod
    def _enqueue(self, generation: Generation) -> None:
        """Queue the rows of a generation."""

    @abstractmethod
    def _pass(self) -> None:
        """Draw at most one token for every sample."""

    def _end_row(self, generation: Generation, row: int, code: int) -> None:
        """Record why a row ended, after its results are stored."""
        generation.finish[row] = code
        generation.unfinished -= 1
        if generation.on_end is not None:
            generation.on_end(row)
        if generation.unfinished == 0:
            self._finish(generation)

    def _finish(self, generation: Generation) -> None:
        del self._generations[generation.name]
        self._ended.append(generation)


def end_tokens(model: Any) -> frozenset[int]:
    """The end tokens of a model of `transformers`: those of its generation's configuration, and if
    that has none those of its own."""
    generation = getattr(model, "generation_config", None)
    return as_ids(getattr(generation, "eos_token_id", None)) or as_ids(model.config.eos_token_id)


def block_count(
    budget: int | None, block_bytes: int, block_tokens: int, sequence_tokens_max: int, slots: int
) -> int:
    """Blocks of a KV cache within the budget; without one, no more than all slots need.

    Raises:
        InvalidRequestError: the budget does not hold one sequence.
    """
    sequence_blocks = -(-sequence_tokens_max // block_tokens)
    if budget is None:
        affordable = max(KV_BYTES // block_bytes, sequence_blocks)
        return min(affordable, slots * sequence_blocks)
    if budget < sequence_blocks * block_bytes:
        raise InvalidRequestError(
            f"a KV cache of {budget} bytes holds {budget // block_bytes} blocks of {block_tokens} "
            f"tokens; one sequence of max_sequence_tokens needs {sequence_blocks} "
            f"({sequence_blocks * block_bytes} bytes): raise kv_cache_bytes or lower "
            "max_sequence_tokens"
        )
    return budget // block_bytes
