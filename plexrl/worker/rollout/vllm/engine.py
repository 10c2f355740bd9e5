"""vLLM as a `RolloutEngine`: one vLLM request for each row of a generation.

vLLM is stepped in this thread, so every row is at a token boundary between two steps. The adapter
stores each row's tokens as they are drawn, so they are available however the row ends.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from plexrl.errors import StaleWeightsError
from plexrl.worker.rollout.engine.tensor_parallel import RankGroup
from plexrl.worker.rollout.generation import (
    ABORT,
    LENGTH,
    STOP,
    Generation,
    WeightSpan,
)
from plexrl.worker.rollout.rollout_engine import EngineStats, RolloutEngine, RowLength
from plexrl.worker.rollout.stops import is_at_stop
from plexrl.worker.rollout.vllm.cache_memory import CacheMemory
from plexrl.worker.rollout.vllm.launch import TOKENS, StartedEngine
from plexrl.worker.rollout.vllm.probe import check_logprobs
from plexrl.worker.rollout.vllm.sampling import draw_arguments
from plexrl.worker.rollout.vllm.weights import ArenaWeights
from plexrl.worker.state.rank_agreement import on_all_ranks

PROBE = "probe"
PROBE_STEPS_MAX = 4


@dataclass(slots=True, eq=False)
class _Row:
    """One running row."""

    generation: Generation
    row: int
    request: str
    internal: str
    """vLLM's internal id of the request."""
    limit: int
    """Most tokens to draw."""
    ends: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[WeightSpan] = field(default_factory=list)


class VllmEngine(RolloutEngine):
    """Generates with vLLM."""

    def __init__(
        self,
        started: StartedEngine,
        weights: ArenaWeights,
        *,
        ends: frozenset[int],
        sequence_tokens_max: int,
        dtype: torch.dtype,
        probe: list[int],
        wanted: Callable[[list[int]], torch.Tensor],
        ranks: RankGroup | None = None,
    ) -> None:
        """`ends`: the model's end tokens. `wanted` computes the probe's logprobs `[tokens - 1]`
        from the current weights, without vLLM. `ranks`: this rank's tensor-parallel group; absent:
        the engine has the whole model.

        Raises:
            StaleWeightsError: vLLM's logprobs differ from those of `wanted`.
        """
        super().__init__(ends, sequence_tokens_max)
        self._llm = started.llm
        self._scheduler = started.scheduler
        self.model = started.model
        """vLLM's module."""
        self.weights = weights
        self._cache = CacheMemory(started.runner)
        self._dtype = dtype
        self._probe = probe
        self._wanted = wanted
        self._rows: dict[str, _Row] = {}
        """By vLLM's request id, oldest first."""
        self._ranks = ranks
        self._refusal: StaleWeightsError | None = None
        self._is_verified = False
        self._updates = 0
        self.weights_seq = 0
        if ranks is None:
            self._verify()

    def submit(self, generation: Generation) -> None:
        """As `RolloutEngine`.

        Raises:
            StaleWeightsError: the last update did not reach vLLM.
        """
        if self._refusal is not None:
            raise self._refusal
        super().submit(generation)

    def abort(self, name: str, rows: Collection[int] | None = None) -> None:
        found = [
            row
            for row in self._rows.values()
            if row.generation.name == name and (rows is None or row.row in rows)
        ]
        if found:
            self._llm.abort_request([each.request for each in found])
        for each in found:
            self._record(each, ABORT)

    def weights_changed(self, weights_seq: int, *, recompute_kv: bool = True) -> None:
        """As `RolloutEngine`.

        Raises:
            StaleWeightsError: vLLM does not compute with the new weights. Running generations end
                with the tokens drawn so far, and new ones are refused until an update succeeds.
                With several ranks the next step raises it: another rank may have failed to load.
        """
        self.weights_seq = weights_seq
        # The salt of new requests, so that none reuses the cache of previous weights.
        self._updates += 1
        if recompute_kv:
            self._llm.reset_prefix_cache(reset_running_requests=True)
        self.weights.refresh()
        self._is_verified = False
        if self._ranks is None:
            self._verify()

    def drop_cache(self) -> None:
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._cache.release()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        running = len(scheduler.running)
        block_bytes = self._cache.nbytes // (scheduler.blocks + 1)
        return EngineStats(
            running=running,
            waiting=len(self._rows) - running,
            paused=self._paused,
            weights_seq=self.weights_seq,
            steps=self._steps,
            tokens_drawn=self._tokens_drawn,
            tokens_computed=scheduler.tokens_computed,
            tokens_recomputed=scheduler.tokens_recomputed,
            prefix_tokens_reused=scheduler.prefix_tokens_reused,
            preemptions=scheduler.preemptions,
            kv_bytes_max=scheduler.blocks * block_bytes,
            block_bytes=block_bytes,
            block_tokens=TOKENS,
            blocks=scheduler.blocks,
            blocks_held=scheduler.blocks_held,
            blocks_kept=scheduler.blocks_kept,
            tp=1 if self._ranks is None else self._ranks.size,
        )

    def lengths(self) -> list[RowLength]:
        running = {request.request_id for request in self._scheduler.running}
        return [
            RowLength(
                row.generation.name,
                row.row,
                len(row.generation.prompts[row.row // row.generation.samples_per_prompt])
                + len(row.tokens),
                row.internal in running,
            )
            for row in self._rows.values()
        ]

    @property
    def cache_bytes_held(self) -> int:
        """Memory of the KV cache now."""
        return self._cache.held_bytes

    def _enqueue(self, generation: Generation) -> None:
        for row in range(generation.unfinished):
            self._add(generation, row)

    def _pass(self) -> None:
        if not self._is_verified:
            self._verify()
        self._cache.ensure()
        self._steps += 1
        began = time.perf_counter()
        outputs = self._llm.step()
        if self._scheduler.decode is not None:
            self.meter.add(*self._scheduler.decode, time.perf_counter() - began)
        self._count_blocks()
        for output in outputs:
            row = self._rows.get(output.request_id)
            if row is not None:
                self._take(row, output.outputs[0])

    def _add(self, generation: Generation, row: int) -> None:
        sampling = generation.sampling
        prompt = generation.prompts[row // generation.samples_per_prompt]
        ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= self._ends
        limit = min(generation.max_tokens(row), self._sequence_max - len(prompt))
        # Names of generations may repeat; vLLM's request ids must be unique.
        request = f"{self._submitted}:{generation.name}:{row}"
        self._submitted += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=limit,
            stop_token_ids=sorted(ends),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=draw_arguments(sampling, generation.random_stream(row)),
        )
        internal = self._llm.add_request(request, self._prompt(prompt), params)
        self._rows[request] = _Row(
            generation=generation,
            row=row,
            request=request,
            internal=internal,
            limit=limit,
            ends=ends,
        )

    def _prompt(self, tokens: list[int]) -> Any:
        return tokens_input(tokens, cache_salt=str(self._updates))

    def _take(self, row: _Row, output: Any) -> None:
        """Store the tokens that vLLM drew for a row, and end the row if it is complete."""
        start = len(row.tokens)
        for token, choices in zip(output.token_ids, output.logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(choices[token].logprob)
        drawn = len(row.tokens) - start
        if not drawn:
            return
        self._tokens_drawn += drawn
        if not row.segments or row.segments[-1].weights_seq != self.weights_seq:
            row.segments.append(WeightSpan(start=start, weights_seq=self.weights_seq))
        if row.generation.emit is not None:
            row.generation.emit(row.row, row.tokens[start:], row.logprobs[start:])
        generation = row.generation
        prompt = generation.prompts[row.row // generation.samples_per_prompt]
        before = prompt[len(prompt) - generation.drawn_before(row.row) :]
        stopped = row.tokens[-1] in row.ends or is_at_stop(
            [*before, *row.tokens], generation.sampling, self._text
        )
        if stopped or len(row.tokens) >= row.limit:
            if output.finish_reason is None:
                self._llm.abort_request([row.request])
            self._record(row, STOP if stopped else LENGTH)

    def _count_blocks(self) -> None:
        held, preempted = self._scheduler.blocks_held_then, self._scheduler.preempted
        for generation in self._generations.values():
            generation.blocks_max = max(generation.blocks_max, held)
        if preempted:
            rows = {row.internal: row for row in self._rows.values()}
            for request in preempted:
                rows[request].generation.preemptions += 1
            preempted.clear()

    def _record(self, row: _Row, code: int) -> None:
        """Store a row's result in its generation."""
        del self._rows[row.request]
        generation = row.generation
        generation.tokens[row.row] = np.array(row.tokens, dtype=np.int32)
        generation.logprobs[row.row] = np.array(row.logprobs, dtype=np.float32)
        generation.segments[row.row] = row.segments
        self._end_row(generation, row.row, code)

    def _verify(self) -> None:
        """Refuse generations unless vLLM computes with the current weights, on all ranks alike.

        Raises:
            StaleWeightsError: it does not.
        """
        try:
            self._compare()
        except StaleWeightsError as error:
            self._refusal = error
            for name in list(self._generations):
                self.abort(name)
            raise
        self._refusal, self._is_verified = None, True

    def _compare(self) -> None:
        self._agree(self.weights.check)
        found = self._probe_logprobs()
        if found is None:
            # Samples that kept their cache left no free block; they are recomputed.
            self._llm.reset_prefix_cache(reset_running_requests=True)
            found = self._probe_logprobs()
        assert found is not None, "an empty cache has enough blocks for the probe"
        logprobs, wanted = found, self._wanted(self._probe)
        self._agree(lambda: check_logprobs(logprobs, wanted, self._dtype))

    def _agree(self, check: Callable[[], None]) -> None:
        """Run a check; if it raises on one rank, it raises on all."""

        def attempt() -> str:
            check()
            return ""

        if self._ranks is None:
            check()
        else:
            on_all_ranks(self._ranks.gather, attempt)

    def _probe_logprobs(self) -> torch.Tensor | None:
        """vLLM's logprobs of the probe, run without other requests. None: no free block."""
        self._cache.ensure()
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        request = f"{self._submitted}:{PROBE}"
        self._submitted += 1
        found: torch.Tensor | None = None
        with self._scheduler.alone():
            self._llm.add_request(request, self._prompt(self._probe), params)
            for _ in range(PROBE_STEPS_MAX):
                for output in self._llm.step():
                    pairs = zip(self._probe[1:], output.prompt_logprobs[1:], strict=True)
                    found = torch.tensor([choices[token].logprob for token, choices in pairs])
                if found is not None:
                    break
            else:
                self._llm.abort_request([request])
        return found
