"""Continuous batching: samples join as slots come free, leave as they end.

Every row of the batch is a sample. Running samples occupy the first slots; when some end, the last
ones move into the holes, so that a step computes nothing for the dead. All bookkeeping is arrays
over rows: a step does no Python work per row, but for rows that ended or have stop sequences.

Shapes: N running rows, P prompts prefilled together, L positions, V vocabulary, M tokens at most.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from plexrl.errors import BatchShapeError
from plexrl.wire.operations import SamplingParams
from plexrl.wire.tensors import Arrays
from plexrl.worker.backend import Emit
from plexrl.worker.engine.kv_cache import SlotCache
from plexrl.worker.engine.sampling import RowSampling, draw, stream_of

PREFILL_TOKENS_MAX = 16_384
"""Most prompt tokens, padding included, run through the model at once."""

STOP, LENGTH, ABORT = range(3)


@dataclass(slots=True)
class Generation:
    """One `generate` call on its way."""

    name: str
    prompts: list[list[int]]
    samples_per_prompt: int
    sampling: SamplingParams
    emit: Emit | None
    weights_seq: int
    tokens: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: list[int] = field(default_factory=list)
    unfinished: int = 0

    def __post_init__(self) -> None:
        rows = len(self.prompts) * self.samples_per_prompt
        self.tokens = [np.empty(0, dtype=np.int32)] * rows
        self.logprobs = [np.empty(0, dtype=np.float32)] * rows
        self.finish = [ABORT] * rows
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


@dataclass(slots=True)
class _Row:
    """What is looked up only when a row ends or streams."""

    generation: Generation
    sample: int


class Engine:
    """Generates with one model on one device. Not thread-safe."""

    def __init__(self, model: nn.Module, *, slots: int, sequence_tokens_max: int) -> None:
        self._model: Any = model
        self._decoder: Any = model.get_decoder()  # type: ignore[operator]
        self._head: Any = model.get_output_embeddings()  # type: ignore[operator]
        self._slots = slots
        self._sequence_max = sequence_tokens_max
        self._cache = SlotCache(slots, model.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
        self._eos = _token_ids(model.config.eos_token_id)  # type: ignore[union-attr, arg-type]
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._generations: dict[str, Generation] = {}
        self._position = np.zeros(slots, dtype=np.int64)
        self._drawn = np.zeros(slots, dtype=np.int64)
        self._limit = np.zeros(slots, dtype=np.int64)
        self._last = np.zeros(slots, dtype=np.int64)
        self._ignore_eos = np.zeros(slots, dtype=bool)
        self._temperature = np.ones(slots, dtype=np.float32)
        self._top_p = np.ones(slots, dtype=np.float32)
        self._top_k = np.zeros(slots, dtype=np.int64)
        self._stream = np.zeros(slots, dtype=np.int64)
        self._tokens = np.zeros((slots, sequence_tokens_max), dtype=np.int32)
        self._logprobs = np.zeros((slots, sequence_tokens_max), dtype=np.float32)

    @property
    def has_work(self) -> bool:
        """Some generation is unfinished."""
        return bool(self._generations)

    @property
    def running(self) -> int:
        """Samples being decoded."""
        return len(self._rows)

    def submit(self, generation: Generation) -> None:
        """Queue a generation.

        Raises:
            BatchShapeError: a prompt is empty or leaves no room for a token.
        """
        for index, prompt in enumerate(generation.prompts):
            if not 1 <= len(prompt) < self._sequence_max:
                raise BatchShapeError(
                    f"prompt {index} has {len(prompt)} tokens; between 1 and "
                    f"{self._sequence_max - 1} fit",
                    row=index,
                )
        self._generations[generation.name] = generation
        self._waiting.extend(_Row(generation, row) for row in range(generation.unfinished))

    def abort(self, name: str) -> None:
        """End a generation at the next step, with what its samples have. Unknown: no effect."""
        generation = self._generations.get(name)
        if generation is None:
            return
        for row in [row for row in self._waiting if row.generation is generation]:
            self._waiting.remove(row)
            generation.unfinished -= 1
        for slot, row in enumerate(self._rows):
            if row.generation is generation:
                self._limit[slot] = -1

    def drop_cache(self) -> None:
        """Give the cache's memory back; the engine must be idle.

        Prompts of later generations are computed with whatever weights are there then.
        """
        assert not self._rows, "the cache is in use"
        self._cache.clear()

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Draw one token for every running sample, first those that can join now.

        Returns the generations that this finished.
        """
        finished: dict[str, Generation] = {}
        self._leave(self._limit[: len(self._rows)] < 0, ABORT, finished)
        if self._rows:
            self._advance(self._decode(), np.arange(len(self._rows)), finished)
        while self._waiting and len(self._rows) < self._slots:
            self._join(finished)
        for name, generation in list(self._generations.items()):
            if generation.unfinished == 0:
                finished[name] = self._generations.pop(name)
        return list(finished.values())

    def _decode(self) -> torch.Tensor:
        """Raw logprobs `[N, V]` of the running rows' next tokens."""
        rows = len(self._rows)
        position_N = torch.from_numpy(self._position[:rows].copy())
        self._cache.begin_step(position_N)
        seen_N11L = (torch.arange(self._cache.length)[None, :] <= position_N[:, None])[
            :, None, None
        ]
        hidden = self._decoder(
            input_ids=torch.from_numpy(self._last[:rows].copy())[:, None],
            position_ids=position_N[:, None],
            attention_mask=seen_N11L,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        self._position[:rows] += 1
        return torch.log_softmax(self._head(hidden[:, 0]).float(), dim=-1)

    def _join(self, finished: dict[str, Generation]) -> None:
        """Prefill waiting samples into free slots and draw their first tokens.

        Samples of one prompt share its prefill.
        """
        room = self._slots - len(self._rows)
        prompts: dict[tuple[int, int], int] = {}
        batch: list[tuple[_Row, int]] = []
        longest = 0
        while self._waiting and len(batch) < room:
            row = self._waiting[0]
            index = row.sample // row.generation.samples_per_prompt
            key = (id(row.generation), index)
            length = max(longest, len(row.generation.prompts[index]))
            count = len(prompts) + (key not in prompts)
            if prompts and count * length > PREFILL_TOKENS_MAX:
                break
            longest = length
            batch.append((self._waiting.popleft(), prompts.setdefault(key, len(prompts))))
        first = len(self._rows)
        slots = np.arange(first, first + len(batch))
        texts = [
            batch[i][0].generation.prompts[
                batch[i][0].sample // batch[i][0].generation.samples_per_prompt
            ]
            for i in _first_of_each([prompt for _, prompt in batch])
        ]
        which = torch.tensor([prompt for _, prompt in batch])
        logprobs_PV = self._prefill(texts, longest, slots, which)
        for slot, (row, prompt) in zip(slots, batch, strict=True):
            self._set_up(int(slot), row, len(texts[prompt]))
        self._advance(logprobs_PV[which], slots, finished)

    def _prefill(
        self, texts: list[list[int]], longest: int, slots: np.ndarray[Any, Any], which: torch.Tensor
    ) -> torch.Tensor:
        """Run prompts through the model, copy their cache to `slots`; logprobs `[P, V]`.

        Padding is on the right, where the causal mask hides it from every real token.
        """
        padded_PL = torch.zeros((len(texts), longest), dtype=torch.int64)
        for index, text in enumerate(texts):
            padded_PL[index, : len(text)] = torch.tensor(text)
        output = self._decoder(input_ids=padded_PL, use_cache=True)
        last_P = torch.tensor([len(text) - 1 for text in texts])
        hidden = output.last_hidden_state[torch.arange(len(texts)), last_P]
        places = torch.from_numpy(slots)
        filled = output.past_key_values.layers
        for layer, source in zip(self._cache.slot_layers(), filled, strict=True):
            layer.place(places, source.keys[which], source.values[which])
        return torch.log_softmax(self._head(hidden).float(), dim=-1)

    def _set_up(self, slot: int, row: _Row, prompt_tokens: int) -> None:
        sampling = row.generation.sampling
        self._rows.append(row)
        self._position[slot] = prompt_tokens
        self._drawn[slot] = 0
        self._limit[slot] = min(sampling.max_tokens, self._sequence_max - prompt_tokens)
        self._ignore_eos[slot] = sampling.ignore_eos
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k
        self._stream[slot] = stream_of(sampling.seed or 0, row.sample)

    def _advance(
        self,
        logprobs_NV: torch.Tensor,
        slots: np.ndarray[Any, Any],
        finished: dict[str, Generation],
    ) -> None:
        """Draw a token for each of `slots` (rows at the end, or all) and retire the ended."""
        sampling = RowSampling(
            temperature=torch.from_numpy(self._temperature[slots]),
            top_p=torch.from_numpy(self._top_p[slots]),
            top_k=torch.from_numpy(self._top_k[slots]),
            stream=torch.from_numpy(self._stream[slots]),
        )
        token_N = draw(logprobs_NV, sampling, torch.from_numpy(self._drawn[slots]))
        logprob_N = logprobs_NV.gather(-1, token_N[:, None])[:, 0].numpy()
        tokens = token_N.numpy()
        self._tokens[slots, self._drawn[slots]] = tokens
        self._logprobs[slots, self._drawn[slots]] = logprob_N
        self._drawn[slots] += 1
        self._last[slots] = tokens
        self._emit(slots, tokens, logprob_N)
        ended = np.zeros(len(self._rows), dtype=bool)
        ended[slots] = np.isin(tokens, self._eos) & ~self._ignore_eos[slots]
        self._check_own_stops(slots, ended)
        full = np.zeros(len(self._rows), dtype=bool)
        full[slots] = self._drawn[slots] >= np.maximum(1, self._limit[slots])
        self._retire(ended, full & ~ended, finished)

    def _emit(
        self,
        slots: np.ndarray[Any, Any],
        tokens: np.ndarray[Any, Any],
        logprobs: np.ndarray[Any, Any],
    ) -> None:
        if all(generation.emit is None for generation in self._generations.values()):
            return
        for slot, token, logprob in zip(slots, tokens, logprobs, strict=True):
            row = self._rows[slot]
            if row.generation.emit is not None:
                row.generation.emit(row.sample, [int(token)], [float(logprob)])

    def _check_own_stops(self, slots: np.ndarray[Any, Any], ended: np.ndarray[Any, Any]) -> None:
        """Stop tokens and sequences that a generation brought along."""
        plain = all(
            not generation.sampling.stop_token_ids and not generation.sampling.stop_sequences
            for generation in self._generations.values()
        )
        for slot in () if plain else slots:
            sampling = self._rows[slot].generation.sampling
            drawn = self._tokens[slot, : self._drawn[slot]]
            ended[slot] |= int(drawn[-1]) in sampling.stop_token_ids or any(
                len(stop) <= len(drawn) and tuple(drawn[len(drawn) - len(stop) :]) == stop
                for stop in sampling.stop_sequences
                if stop
            )

    def _retire(
        self,
        stopped: np.ndarray[Any, Any],
        full: np.ndarray[Any, Any],
        finished: dict[str, Generation],
    ) -> None:
        self._record(stopped, STOP, finished)
        self._record(full, LENGTH, finished)
        self._compact(stopped | full)

    def _leave(
        self, leaving: np.ndarray[Any, Any], code: int, finished: dict[str, Generation]
    ) -> None:
        self._record(leaving, code, finished)
        self._compact(leaving)

    def _record(
        self, leaving: np.ndarray[Any, Any], code: int, finished: dict[str, Generation]
    ) -> None:
        """Write down the results of rows that leave."""
        for slot in np.flatnonzero(leaving):
            row = self._rows[slot]
            generation = row.generation
            generation.tokens[row.sample] = self._tokens[slot, : self._drawn[slot]].copy()
            generation.logprobs[row.sample] = self._logprobs[slot, : self._drawn[slot]].copy()
            generation.finish[row.sample] = code
            generation.unfinished -= 1
            if generation.unfinished == 0:
                finished[generation.name] = generation
                self._generations.pop(generation.name, None)

    def _compact(self, leaving: np.ndarray[Any, Any]) -> None:
        """Close the holes that leaving rows left, with rows from the end."""
        kept = int((~leaving).sum())
        if kept == len(leaving):
            return
        holes = np.flatnonzero(leaving[:kept])
        movers = kept + np.flatnonzero(~leaving[kept:])
        for array in (
            *(self._position, self._drawn, self._limit, self._last, self._ignore_eos),
            *(self._temperature, self._top_p, self._top_k, self._stream),
            *(self._tokens, self._logprobs),
        ):
            array[holes] = array[movers]
        for hole, mover in zip(holes, movers, strict=True):
            self._rows[hole] = self._rows[mover]
        del self._rows[kept:]
        if len(holes):
            source, target = torch.from_numpy(movers), torch.from_numpy(holes)
            for layer in self._cache.slot_layers():
                layer.move(source, target)


def _token_ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _first_of_each(values: list[int]) -> list[int]:
    """Index of the first occurrence of 0, 1, 2, … in `values`."""
    found: dict[int, int] = {}
    for index, value in enumerate(values):
        found.setdefault(value, index)
    return [found[value] for value in sorted(found)]
