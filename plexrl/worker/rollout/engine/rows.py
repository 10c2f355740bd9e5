"""What the engine knows of the samples that hold a slot, as arrays over slots.

A step does no Python work per row but for rows that join, leave, stream, take a block or have stop
sequences of their own; everything else is arithmetic on these arrays.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from plexrl.worker.rollout.generation import Sample
from plexrl.worker.rollout.sampling import stream_of

Ints = npt.NDArray[np.int64]

NOBODY = -1
COLDEST = 1e-20
"""Lowest temperature but 0: divided by less, logprobs would leave float32 and all be alike."""


class Rows:
    """Slots and who sits in them."""

    def __init__(self, slots: int, sequence_tokens_max: int, blocks_max: int) -> None:
        self.slots = slots
        self.sequence_max = sequence_tokens_max
        self.samples: dict[int, Sample] = {}
        self.changes = 0
        """Grows whenever somebody joins, leaves or starts to compute for itself."""
        self._empty = list(range(slots - 1, -1, -1))
        self.active = np.zeros(slots, dtype=bool)
        self.leader = np.full(slots, NOBODY, dtype=np.int64)
        """Slot of the sample of the same prompt that computes it for this one too."""
        self.forked = np.zeros(slots, dtype=bool)
        """Its last block may have another holder."""
        self.stale = np.zeros(slots, dtype=bool)
        """Some of its cache is of former weights, by the caller's wish."""
        self.order = np.zeros(slots, dtype=np.int64)
        self.prompt = np.zeros(slots, dtype=np.int64)
        self.known = np.zeros(slots, dtype=np.int64)
        """Prompt tokens and drawn ones."""
        self.computed = np.zeros(slots, dtype=np.int64)
        """Tokens whose keys and values are in its blocks."""
        self.held = np.zeros(slots, dtype=np.int64)
        self.tables = np.zeros((slots, blocks_max), dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)
        """Most tokens to draw."""
        self.ignore_eos = np.zeros(slots, dtype=bool)
        self.temperature = np.ones(slots, dtype=np.float32)
        self.top_p = np.ones(slots, dtype=np.float32)
        self.top_k = np.zeros(slots, dtype=np.int64)
        self.stream = np.zeros(slots, dtype=np.int64)
        self.tokens = np.zeros((slots, sequence_tokens_max), dtype=np.int32)
        self.logprobs = np.zeros((slots, sequence_tokens_max), dtype=np.float32)
        """Of the drawn tokens, from 0."""

    @property
    def empty(self) -> int:
        """Slots to be had."""
        return len(self._empty)

    def runnable(self) -> Ints:
        """Slots of samples that compute for themselves."""
        return np.flatnonzero(self.active & (self.leader == NOBODY))

    def followers(self, slot: int) -> Ints:
        """Slots that wait for `slot`'s prompt, oldest first."""
        found = np.flatnonzero(self.active & (self.leader == slot))
        return found[np.argsort(self.order[found], kind="stable")]

    def drawn(self, slots: Any) -> Any:
        """Tokens drawn so far."""
        return self.known[slots] - self.prompt[slots]

    def blocks(self, slot: int) -> list[int]:
        """The blocks that `slot` holds, in order."""
        found: list[int] = self.tables[slot, : self.held[slot]].tolist()
        return found

    def seat(self, sample: Sample, leader: int = NOBODY) -> int:
        """Give a sample a slot, with the tokens it has, no block and nothing computed."""
        slot = self._empty.pop()
        self.changes += 1
        self.samples[slot] = sample
        prompt = len(sample.prompt)
        drawn = 0 if sample.tokens is None else len(sample.tokens)
        self.tokens[slot, :prompt] = sample.prompt
        if drawn:
            self.tokens[slot, prompt : prompt + drawn] = sample.tokens
            self.logprobs[slot, :drawn] = sample.logprobs
        sampling = sample.generation.sampling
        self.active[slot] = True
        self.leader[slot] = leader
        self.forked[slot] = self.stale[slot] = False
        self.order[slot] = sample.order
        self.prompt[slot] = prompt
        self.known[slot] = prompt + drawn
        self.computed[slot] = self.held[slot] = 0
        self.limit[slot] = max(1, min(sampling.max_tokens, self.sequence_max - prompt))
        self.ignore_eos[slot] = sampling.ignore_eos
        self.temperature[slot] = max(COLDEST, heat) if (heat := sampling.temperature) else 0.0
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        if sample.tokens is None:
            sample.stream = stream_of(sampling.seed or 0, sample.generation.first_row + sample.row)
        self.stream[slot] = sample.stream
        return slot

    def unseat(self, slot: int) -> Sample:
        """Empty a slot, whose blocks are given back already; the sample takes its tokens along."""
        sample = self.samples.pop(slot)
        self.changes += 1
        drawn = int(self.drawn(slot))
        prompt = int(self.prompt[slot])
        sample.tokens = self.tokens[slot, prompt : prompt + drawn].copy()
        sample.logprobs = self.logprobs[slot, :drawn].copy()
        self.active[slot] = False
        self.leader[slot] = NOBODY
        self.held[slot] = 0
        self._empty.append(slot)
        return sample
