"""Continuous batching over a paged KV cache.

Samples join when slots and blocks are free, and leave when they end. Every pass computes the new
tokens of all samples, packed without padding.

Invariants at every token boundary:
- A running sample has computed all its tokens except the last, or is in the middle of its prompt.
- The next token depends only on the sample's tokens, the weights and its own random stream. It does
  not depend on other samples, on when the sample joined, or on preemptions.

Shapes: N rows that draw, V vocabulary.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from plexrl.model.memory.kv_cache import BLOCK_TOKENS
from plexrl.worker.rollout.engine.batch_scheduler import BatchScheduler
from plexrl.worker.rollout.engine.blocks import BlockPool
from plexrl.worker.rollout.engine.forward.decode_graphs import DecodeGraphs
from plexrl.worker.rollout.engine.forward.llama import LlamaForward
from plexrl.worker.rollout.engine.forward.selection import (
    ForwardPass,
    cache_size,
    probe,
    select_forward,
    verify_forward,
    weight_device,
)
from plexrl.worker.rollout.engine.kv_pool import KvPool
from plexrl.worker.rollout.engine.slot_table import SlotTable
from plexrl.worker.rollout.engine.step_batch import (
    Ints,
    StepBatch,
    Work,
    advance,
    build_batch,
    order_work,
)
from plexrl.worker.rollout.engine.tensor_parallel import RankGroup
from plexrl.worker.rollout.generation import (
    ABORT,
    LENGTH,
    STOP,
    CarriedSample,
    GeneratedRow,
    Generation,
)
from plexrl.worker.rollout.rollout_engine import (
    STEP_TOKENS_MAX,
    EngineStats,
    RolloutEngine,
    RowLength,
    end_tokens,
)
from plexrl.worker.rollout.sampling import draw
from plexrl.worker.rollout.stops import is_at_stop
from plexrl.worker.state.device import Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steady:
    """The last pass, if the next one may run the same rows, one token further."""

    work: Work
    batch: StepBatch
    token_N: torch.Tensor
    """The tokens that the pass drew."""
    changes: int
    """`rows.changes` when the pass was planned."""


class Engine(RolloutEngine):
    """Generates with one model on one device."""

    def __init__(
        self,
        model: nn.Module,
        *,
        slots: int,
        sequence_tokens_max: int,
        kv_bytes_max: int | None = None,
        block_tokens: int = BLOCK_TOKENS["torch"],
        step_tokens_max: int = STEP_TOKENS_MAX,
        ranks: RankGroup | None = None,
        probed: torch.Tensor | None = None,
        cache_memory: torch.Tensor | None = None,
        capture: Capture | None = None,
    ) -> None:
        """The engine reads the model's parameters in place, at every step.

        `ranks`: the tensor-parallel group. The engines of all its ranks make the same calls in the
        same order. The parameters are then this rank's parts, and `probed` is the result of `probe`
        on the whole model. `kv_bytes_max` is the KV-cache budget of each rank, and `cache_memory`
        is memory of `cache_size` bytes for it, which may be taken away after `drop_cache`.
        `capture` captures decode steps, whose weights and cache must keep their addresses.

        Raises:
            InvalidRequestError: the budget does not hold one sequence, or the engine would compute
                this kind of model wrongly.
        """
        super().__init__(end_tokens(model), sequence_tokens_max)
        self._device, self._dtype = weight_device(model)
        self._forward: ForwardPass = select_forward(model, sequence_tokens_max, ranks)
        self._tp = 1 if ranks is None else ranks.size
        self.meter.begin(self._tp)
        wanted = probe(model) if probed is None else probed
        verify_forward(self._forward, model, wanted, self._tp)
        if capture is not None and isinstance(self._forward, LlamaForward):
            # Modules of other models may wait for the device.
            self._forward = DecodeGraphs(self._forward, capture, ranks)
        size = cache_size(
            model,
            self._dtype,
            tp=self._tp,
            slots=slots,
            sequence_tokens_max=sequence_tokens_max,
            kv_bytes_max=kv_bytes_max,
            block_tokens=block_tokens,
        )
        self._blocks, self._block_bytes = size.blocks, size.block_bytes
        blocks_max = -(-sequence_tokens_max // block_tokens)
        self._block_tokens = block_tokens
        self._kv = KvPool(
            layers=size.layers,
            heads=size.heads,
            head_size=size.head_size,
            blocks=size.blocks + 1,
            block_tokens=block_tokens,
            dtype=self._dtype,
            device=self._device,
            memory=cache_memory,
        )
        self._pool = BlockPool(self._blocks + 1, block_tokens)
        self._rows = SlotTable(slots, sequence_tokens_max, blocks_max)
        self._scheduler = BatchScheduler(self._rows, self._pool, step_tokens_max)
        # Names of generations whose rows a step must handle one by one, in Python.
        self._streaming: set[str] = set()
        self._with_stops: set[str] = set()
        self._detailed: set[str] = set()
        self._steady: _Steady | None = None
        self._tokens_computed = 0
        self._prefill_s = 0.0

    @property
    def slots(self) -> int:
        """Most samples that run at once."""
        return self._rows.slots

    @property
    def kv(self) -> KvPool:
        """Memory of the cache."""
        return self._kv

    @property
    def weights_seq(self) -> int:
        return self._scheduler.weights_seq

    @weights_seq.setter
    def weights_seq(self, seq: int) -> None:
        self._scheduler.weights_seq = seq

    def _enqueue(self, generation: Generation) -> None:
        self._note_kind(generation)
        numbered = _numbered_prompts(generation)
        rows = range(len(generation.finish))
        for row in rows if generation.rows is None else sorted(generation.rows):
            sample = _sample(generation, numbered, row, self._submitted + row)
            self._scheduler.waiting.append(sample)
        self._submitted += len(rows)

    def _note_kind(self, generation: Generation) -> None:
        if generation.emit is not None:
            self._streaming.add(generation.name)
        sampling = generation.sampling
        if sampling.stop_token_ids or sampling.stop_sequences or sampling.stop_strings:
            self._with_stops.add(generation.name)
        if sampling.details_tokens:
            self._detailed.add(generation.name)

    def carry_out(self) -> list[CarriedSample]:
        """Remove all generations; returns their unfinished samples, oldest first. The memory of the
        cache keeps its content until `carry_in` of another engine takes it."""
        self._generations.clear()
        self._ended.clear()
        self._streaming.clear()
        self._with_stops.clear()
        self._detailed.clear()
        self._steady = None
        return self._scheduler.carry_out()

    def take_over(self, other: "Engine") -> None:
        """Continue instead of `other`, whose samples were carried out, with the memory of its
        cache."""
        self.weights_seq = other.weights_seq
        self._submitted = other._submitted
        self._paused = other._paused
        self._kv.take_memory(other._kv)

    def allocate(self, count: int) -> list[int]:
        """Blocks for samples that are to be carried in; the engine has no samples."""
        return self._pool.take(count)

    def carry_in(
        self,
        generations: Iterable[Generation],
        samples: Iterable[tuple[CarriedSample, Sequence[int] | None]],
    ) -> None:
        """Continue `samples` of `generations`, oldest first, in an engine that has none. Each comes
        with its blocks here, all of which are allocated; None: its keys and values are recomputed.
        """
        numbered: dict[str, list[tuple[int, Any]]] = {}
        for generation in generations:
            self._generations[generation.name] = generation
            self._note_kind(generation)
            numbered[generation.name] = _numbered_prompts(generation)
        running: list[tuple[GeneratedRow, CarriedSample, Sequence[int]]] = []
        waiting: list[GeneratedRow] = []
        held: set[int] = set()
        for each, blocks in samples:
            generation = self._generations[each.generation]
            sample = _sample(generation, numbered[each.generation], each.row, each.order)
            sample.segments = list(each.segments)
            sample.tokens, sample.logprobs = each.tokens, each.logprobs
            sample.details = each.details
            sample.stream = generation.random_stream(each.row)
            if blocks is None:
                self._scheduler.tokens_recomputed += each.computed
                waiting.append(sample)
                continue
            # The first holder of a block allocated it.
            self._pool.share(block for block in blocks if block in held)
            held.update(blocks)
            running.append((sample, each, blocks))
        self._scheduler.carry_in(running, waiting)

    def abort(self, name: str, rows: Collection[int] | None = None) -> None:
        generation = self._generations.get(name)
        if generation is None:
            return
        wanted = range(len(generation.finish)) if rows is None else rows
        for sample in self._scheduler.withdraw(generation, wanted):
            self._record(sample, ABORT)
        running = self._rows.samples.items()
        slots = [s for s, each in running if each.generation is generation and each.row in wanted]
        self._scheduler.requeue_followers(slots)
        for slot in slots:
            self._record(self._scheduler.release(slot), ABORT)

    def weights_changed(self, weights_seq: int, *, recompute_kv: bool = True) -> None:
        self.weights_seq = weights_seq
        if recompute_kv:
            self.drop_cache()
            return
        self._scheduler.keep_stale()
        for slot, sample in self._rows.samples.items():
            sample.drawn_with(int(self._rows.drawn(slot)), weights_seq)

    def drop_cache(self) -> None:
        self._scheduler.requeue_all()
        self._kv.clear()
        self._steady = None

    def stats(self) -> EngineStats:
        scheduler, pool = self._scheduler, self._pool
        return EngineStats(
            running=len(self._rows.samples),
            waiting=len(scheduler.waiting),
            paused=self._paused,
            weights_seq=self.weights_seq,
            steps=self._steps,
            tokens_drawn=self._tokens_drawn,
            tokens_computed=self._tokens_computed,
            prefill_s=self._prefill_s,
            tokens_recomputed=scheduler.tokens_recomputed,
            prefix_tokens_reused=scheduler.prefix_tokens_reused,
            preemptions=scheduler.preemptions,
            kv_bytes_max=self._blocks * self._block_bytes,
            block_bytes=self._block_bytes,
            block_tokens=self._block_tokens,
            blocks=self._blocks,
            blocks_held=pool.held,
            blocks_kept=pool.kept,
            tp=self._tp,
        )

    def lengths(self) -> list[RowLength]:
        rows = self._rows
        found = [
            RowLength(sample.generation.name, sample.row, int(rows.known[slot]), runs=True)
            for slot, sample in rows.samples.items()
        ]
        for sample in self._scheduler.waiting:
            drawn = 0 if sample.tokens is None else len(sample.tokens)
            tokens = len(sample.prompt) + drawn
            found.append(RowLength(sample.generation.name, sample.row, tokens, runs=False))
        return found

    def check_invariants(self) -> None:
        """Assert that no block is lost, and that every sample is either running or waiting."""
        rows = self._rows
        self._pool.check_invariants(rows.blocks(slot) for slot in rows.samples)
        assert set(np.flatnonzero(rows.active)) == set(rows.samples)
        assert len(rows.samples) + rows.free == rows.slots
        here = [*rows.samples.values(), *self._scheduler.waiting]
        assert len(here) == sum(one.unfinished for one in self._generations.values())
        orders = [sample.order for sample in here]
        assert len(set(orders)) == len(orders)
        for slot in rows.samples:
            assert rows.computed[slot] <= rows.held[slot] * self._block_tokens
            assert rows.computed[slot] < rows.known[slot] <= rows.sequence_max

    @torch.inference_mode()
    def _pass(self) -> None:
        began = time.perf_counter()
        rows, steady = self._rows, self._steady
        if steady is not None and self._scheduler.is_unchanged(steady.work.slots, steady.changes):
            work, batch = steady.work, steady.batch
            advance(batch, steady.token_N)
        else:
            work, batch = self._plan()
        changes = rows.changes
        logits_NV = self._forward(batch, self._kv)
        self._steps += 1
        self._tokens_computed += len(batch.token_T)
        self._scheduler.computed(work)
        self._steady = None
        slots = work.slots
        if batch.wanted is not None:
            slots = slots[rows.computed[slots] == rows.known[slots]]
            if not len(slots):
                self._prefill_s += time.perf_counter() - began
                return
        logprobs_NV = torch.log_softmax(logits_NV.float(), dim=-1)
        if (rows.leader >= 0).any():
            slots, which = self._fork(slots)
            logprobs_NV = logprobs_NV[torch.from_numpy(which).to(self._device)]
        kv_tokens = int(rows.computed[slots].sum())
        token_N = self._draw(logprobs_NV, slots)
        if batch.wanted is None:
            self.meter.add(len(slots), kv_tokens, time.perf_counter() - began)
        else:
            self._prefill_s += time.perf_counter() - began
        if batch.wanted is None and rows.changes == changes:
            self._steady = _Steady(work=work, batch=batch, token_N=token_N, changes=changes)

    def _plan(self) -> tuple[Work, StepBatch]:
        rows = self._rows
        self._kv.prepare()
        work, copies = self._scheduler.plan()
        # Only a plan allocates blocks, so this records the maximum held at any time.
        for generation in self._generations.values():
            generation.blocks_max = max(generation.blocks_max, self._pool.held)
        assert len(work.slots), "some sample can always run"
        if copies:
            self._kv.copy([old for old, _ in copies], [new for _, new in copies])
        work, cuts = order_work(work, self._block_tokens)
        batch = build_batch(
            work,
            cuts,
            tokens=rows.tokens,
            tables=rows.tables,
            known=rows.known,
            block_tokens=self._block_tokens,
            device=self._device,
            dtype=self._dtype,
        )
        if any(generation.prompt_scores for generation in self._generations.values()):
            batch = replace(batch, scored=rows.scored(work, self._device))
        return work, batch

    def _is_detailed(self, slot: int) -> bool:
        return self._rows.samples[slot].generation.name in self._detailed

    def _fork(self, slots: Ints) -> tuple[Ints, Ints]:
        """The drawing slots with their followers, and the row of logits for each of them."""
        everyone: list[int] = []
        which: list[int] = []
        for index, slot in enumerate(slots.tolist()):
            family = [slot, *self._scheduler.fork(slot)]
            everyone += family
            which += [index] * len(family)
        return np.array(everyone), np.array(which)

    def _draw(self, logprobs_NV: torch.Tensor, slots: Ints) -> torch.Tensor:
        """Draw a token for each of `slots`, and record the samples that end with it."""
        rows, device = self._rows, self._device
        drawn = rows.drawn(slots)
        if rows.temperature[slots].any():
            sampling = rows.sampling(slots, device)
            token_N = draw(logprobs_NV, sampling, torch.from_numpy(drawn).to(device))
        else:
            token_N = logprobs_NV.argmax(dim=-1)
        if self._detailed:
            own = [n for n, slot in enumerate(slots.tolist()) if self._is_detailed(slot)]
            rows.note_details(logprobs_NV, token_N, slots, own)
        logprobs = logprobs_NV.gather(-1, token_N[:, None])[:, 0].cpu().numpy()
        tokens = token_N.cpu().numpy()
        rows.tokens[slots, rows.known[slots]] = tokens
        rows.logprobs[slots, drawn] = logprobs
        rows.known[slots] += 1
        self._tokens_drawn += len(slots)
        self._emit(slots, tokens, logprobs)
        stopped = np.zeros(len(slots), dtype=bool)
        for end in self._ends:
            stopped |= tokens == end
        stopped &= ~rows.ignore_eos[slots]
        self._check_stop_sequences(slots, stopped)
        full = drawn + 1 >= rows.limit[slots]
        for index in np.flatnonzero(stopped | full).tolist():
            sample = self._scheduler.release(int(slots[index]))
            self._record(sample, STOP if stopped[index] else LENGTH)
        return token_N

    def _emit(self, slots: Ints, tokens: Any, logprobs: Any) -> None:
        if not self._streaming:
            return
        for slot, token, logprob in zip(slots.tolist(), tokens, logprobs, strict=True):
            sample = self._rows.samples[slot]
            if sample.generation.emit is not None:
                sample.generation.emit(sample.row, [int(token)], [float(logprob)])

    def _check_stop_sequences(self, slots: Ints, stopped: Any) -> None:
        """Mark in `stopped` the rows that end at a stop token, sequence or text of their
        generation."""
        if not self._with_stops:
            return
        rows = self._rows
        for index, slot in enumerate(slots.tolist()):
            sample = rows.samples[slot]
            generation = sample.generation
            if generation.name not in self._with_stops:
                continue
            first = rows.prompt[slot] - generation.drawn_before(sample.row)
            drawn = rows.tokens[slot, first : rows.known[slot]]
            stopped[index] |= is_at_stop(drawn, generation.sampling, self._text)

    def _record(self, sample: GeneratedRow, code: int) -> None:
        """Store a row's result in its generation."""
        generation = sample.generation
        if sample.tokens is not None:
            generation.tokens[sample.row] = sample.tokens
            generation.logprobs[sample.row] = sample.logprobs
            generation.details[sample.row] = sample.details
            drawn = len(sample.tokens)
            generation.segments[sample.row] = [s for s in sample.segments if s.start < drawn]
        self._end_row(generation, sample.row, code)

    def _finish(self, generation: Generation) -> None:
        super()._finish(generation)
        self._streaming.discard(generation.name)
        self._with_stops.discard(generation.name)
        self._detailed.discard(generation.name)


def _numbered_prompts(generation: Generation) -> list[tuple[int, Any]]:
    """Each prompt's number and tokens. Equal prompts have the same number, and so share their
    blocks, as the samples of one prompt do."""
    numbers: dict[tuple[int, ...], int] = {}
    prompts: list[tuple[int, Any]] = []
    for tokens in generation.prompts:
        number = numbers.setdefault(tuple(tokens), len(prompts))
        same = prompts[number][1] if number < len(prompts) else np.array(tokens, dtype=np.int32)
        prompts.append((number, same))
    return prompts


def _sample(
    generation: Generation, numbered: list[tuple[int, Any]], row: int, order: int
) -> GeneratedRow:
    number, prompt = numbered[row // generation.samples_per_prompt]
    return GeneratedRow(
        generation=generation, row=row, order=order, prompt=prompt, prompt_number=number
    )
