"""A paced engine: continuous batching in a bounded KV cache, as the simulator's instance has it.

A *stretch* is the prefills of what is admitted, and then as many decode steps as end within
`PASS_S`, but no more than the first response needs: a sleep for each step would be shorter than
what a sleep costs. A pass sleeps for at most `PASS_S` of the stretch, so that calls are answered
during a long prefill or step. Calls see token boundaries of all responses.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from plexrl.errors import InvalidRequestError
from plexrl.latency.pace import Decoding
from plexrl.wire.tensors import Array
from plexrl.worker.rollout.generation import ABORT, LENGTH, STOP, Generation, WeightSpan
from plexrl.worker.rollout.paced.lengths import draw_tokens, first_stream, response_tokens
from plexrl.worker.rollout.rollout_engine import EngineStats, RolloutEngine, RowLength
from plexrl.worker.training.paced.pacer import Pacer

PASS_S = 0.005
"""Real seconds of a pass, at most."""


@dataclass(slots=True)
class _Stretch:
    """Prefills and decode steps whose time is passing, in modelled seconds."""

    steps: int
    kv: int
    """Cached tokens before the first step."""
    prefill_s: float
    steps_s: float
    left_s: float
    lasted_s: float = 0.0
    """Real seconds so far."""


@dataclass(slots=True, eq=False)
class _Row:
    """A response that waits or runs."""

    generation: Generation
    row: int
    stream: int
    prompt_tokens: int
    wanted: int
    """Tokens to draw."""
    finish: int
    longest: int
    """Tokens of the longest response of its generation, with those drawn before it."""
    drawn: int = 0
    tokens: list[Array] = field(default_factory=list)
    logprobs: list[Array] = field(default_factory=list)
    has_run: bool = False

    @property
    def known(self) -> int:
        """Tokens in the KV cache while it runs."""
        return self.prompt_tokens + self.drawn


class PacedEngine(RolloutEngine):
    """Draws hashes. Prompts, order, lengths and versions are real."""

    def __init__(
        self,
        decoding: Decoding,
        pacer: Pacer,
        *,
        weights: Callable[[], int],
        vocabulary: int,
        ends: frozenset[int],
        sequence_tokens_max: int,
        slots: int,
    ) -> None:
        """`weights`: a number that depends on all bits of the weights."""
        super().__init__(ends, sequence_tokens_max)
        self.weights_seq = 0
        self._decoding, self._pacer = decoding, pacer
        self._weights, self._word = weights, weights()
        self._vocabulary, self._slots = vocabulary, slots
        self._end = min(ends, default=None)
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._stretch: _Stretch | None = None
        self._recomputed = self._prefilled = self._preemptions = 0
        self._prefill_s = 0.0

    def submit(self, generation: Generation) -> None:
        """As `RolloutEngine.submit`.

        Raises:
            InvalidRequestError: it names tokens or texts at which to stop.
        """
        sampling = generation.sampling
        if sampling.stop_token_ids or sampling.stop_sequences or sampling.stop_strings:
            raise InvalidRequestError(
                "a paced engine draws the lengths of responses by the seed, and stops at no token "
                "or text: leave the stop parameters out",
                parameter="sampling",
            )
        super().submit(generation)

    def abort(self, name: str, rows: Collection[int] | None = None) -> None:
        for generation in [*self._running, *self._waiting]:
            if generation.generation.name == name and (rows is None or generation.row in rows):
                self._remove(generation)
                self._end_with(generation, ABORT)

    def weights_changed(self, weights_seq: int, *, recompute_kv: bool = True) -> None:
        self.weights_seq = weights_seq
        self._word = self._weights()
        if recompute_kv:
            self.drop_cache()

    def drop_cache(self) -> None:
        for row in reversed(self._running):
            self._waiting.appendleft(row)
        self._running.clear()
        self._stretch = None

    def weights_loaded(self) -> None:
        """Draw by the weights that are in the arena now."""
        self._word = self._weights()
        self.drop_cache()

    def stats(self) -> EngineStats:
        held = sum(row.known for row in self._running)
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            paused=self._paused,
            weights_seq=self.weights_seq,
            steps=self._steps,
            tokens_drawn=self._tokens_drawn,
            tokens_computed=self._tokens_drawn + self._prefilled,
            prefill_s=self._prefill_s,
            tokens_recomputed=self._recomputed,
            prefix_tokens_reused=0,
            preemptions=self._preemptions,
            kv_bytes_max=self._decoding.kv_tokens * self._decoding.kv_token_bytes,
            block_bytes=self._decoding.kv_token_bytes,
            block_tokens=1,
            blocks=self._decoding.kv_tokens,
            blocks_held=held,
            blocks_kept=0,
        )

    def lengths(self) -> list[RowLength]:
        found = [(row, True) for row in self._running] + [(row, False) for row in self._waiting]
        return [RowLength(row.generation.name, row.row, row.known, runs) for row, runs in found]

    def _enqueue(self, generation: Generation) -> None:
        rows = [
            self._row(generation, row)
            for row in range(len(generation.finish))
            if generation.rows is None or row in generation.rows
        ]
        longest = max((row.longest for row in rows), default=1)
        for row in rows:
            row.longest = longest
        self._waiting.extend(rows)

    def _row(self, generation: Generation, row: int) -> _Row:
        prompt = len(generation.prompts[row // generation.samples_per_prompt])
        stream, drawn = generation.random_stream(row), generation.drawn_before(row)
        most = min(generation.max_tokens(row), self._sequence_max - prompt)
        whole = response_tokens(first_stream(stream, drawn), drawn + most)
        wanted = most if generation.sampling.ignore_eos else min(most, max(1, whole - drawn))
        return _Row(
            generation=generation,
            row=row,
            stream=stream,
            prompt_tokens=prompt,
            wanted=wanted,
            finish=STOP if wanted < most else LENGTH,
            longest=drawn + wanted,
        )

    def _pass(self) -> None:
        since = self._pacer.now()
        stretch = self._stretch or self._begin()
        if stretch is None:
            return
        part_s = min(stretch.left_s, self._pacer.modelled_s(PASS_S))
        stretch.left_s -= part_s
        # Drawing is a part of the time. Nobody sees a token before the time has passed.
        is_over = stretch.left_s <= 0.0
        ended = self._draw_all(stretch) if is_over else []
        stretch.lasted_s += self._pacer.rest(since, part_s)
        if is_over:
            self._measure(stretch)
            self._stretch = None
            for row in ended:
                self._running.remove(row)
                self._end_with(row, row.finish)
            self._preempt()

    def _begin(self) -> _Stretch | None:
        """The next stretch; None: nothing runs."""
        prefill_s = self._admit()
        running = self._running
        if not running:
            return None
        count, kv = len(running), sum(row.known for row in running)
        longest = max(row.longest for row in running)
        within_s = self._pacer.modelled_s(PASS_S)
        steps = min(
            self._decoding.steps_within(within_s, count, kv, longest),
            (self._decoding.kv_tokens - kv) // count,
            *(row.wanted - row.drawn for row in running),
        )
        steps = max(1, steps)
        steps_s = self._decoding.steps_s(steps, count, kv, longest)
        self._stretch = _Stretch(
            steps=steps, kv=kv, prefill_s=prefill_s, steps_s=steps_s, left_s=prefill_s + steps_s
        )
        return self._stretch

    def _draw_all(self, stretch: _Stretch) -> list[_Row]:
        """Draw the tokens of a stretch; returns the responses that have all of theirs."""
        self._steps += stretch.steps
        ended = [row for row in self._running if self._draw(row, stretch.steps)]
        held = sum(row.known for row in self._running)
        for generation in self._generations.values():
            generation.blocks_max = max(generation.blocks_max, held)
        return ended

    def _measure(self, stretch: _Stretch) -> None:
        """Count the time of a stretch that is over, by its parts."""
        real = stretch.lasted_s / (stretch.prefill_s + stretch.steps_s)
        self._prefill_s += stretch.prefill_s * real
        step_s = stretch.steps_s * real / stretch.steps
        count = len(self._running)
        for at in range(stretch.steps):
            self.meter.add(count, stretch.kv + at * count, step_s)

    def _admit(self) -> float:
        """Give slots to waiting responses while their tokens fit; returns the modelled seconds of
        their prefills."""
        held = sum(row.known for row in self._running)
        seconds = 0.0
        while self._waiting and len(self._running) < self._slots:
            row = self._waiting[0]
            count = len(self._running)
            if count and held + row.known + count + 1 > self._decoding.kv_admitted:
                break
            self._running.append(self._waiting.popleft())
            held += row.known
            seconds += self._decoding.prefill_s(row.known)
            self._prefilled += row.known
            self._recomputed += row.known if row.has_run else 0
            row.has_run = True
        return seconds

    def _preempt(self) -> None:
        """Take the slots of the youngest responses until the cache has room for a step."""
        held = sum(row.known for row in self._running)
        while len(self._running) > 1 and held + len(self._running) > self._decoding.kv_tokens:
            row = self._running.pop()
            held -= row.known
            row.generation.preemptions += 1
            self._preemptions += 1
            self._waiting.appendleft(row)

    def _draw(self, row: _Row, steps: int) -> bool:
        """Draw the next tokens of a response. True: it has all."""
        segments = row.generation.segments[row.row]
        if not segments or segments[-1].weights_seq != self.weights_seq:
            segments.append(WeightSpan(start=row.drawn, weights_seq=self.weights_seq))
        tokens, logprobs = draw_tokens(
            row.stream,
            row.drawn,
            steps,
            weights=self._word,
            vocabulary=self._vocabulary,
            end=self._end,
        )
        row.drawn += steps
        is_ended = row.drawn == row.wanted
        if is_ended and row.finish == STOP and self._end is not None:
            tokens[-1] = self._end
        row.tokens.append(tokens)
        row.logprobs.append(logprobs)
        self._tokens_drawn += steps
        if row.generation.emit is not None:
            row.generation.emit(row.row, tokens.tolist(), logprobs.tolist())
        return is_ended

    def _remove(self, row: _Row) -> None:
        if row in self._running:
            self._running.remove(row)
            if not self._running:
                self._stretch = None
        else:
            self._waiting.remove(row)

    def _end_with(self, row: _Row, code: int) -> None:
        generation = row.generation
        if row.tokens:
            generation.tokens[row.row] = np.concatenate(row.tokens)
            generation.logprobs[row.row] = np.concatenate(row.logprobs)
        self._end_row(generation, row.row, code)
