"""State of the running samples, as arrays over slots.

A step does Python work only for rows that join, leave, stream, take a block, have their own stop
sequences or want more numbers than logprobs. Everything else is arithmetic on these arrays.

Shapes: N slots, V vocabulary, S tokens of prompts.
"""

from typing import Any

import numpy as np
import torch

from plexrl.worker.rollout.engine.step_batch import Ints, Scored, Work
from plexrl.worker.rollout.generation import GeneratedRow, PromptScores, TokenDetails
from plexrl.worker.rollout.sampling import RowSampling, likeliest_tokens, sampling_logprobs

NO_LEADER = -1
TEMPERATURE_MIN = 1e-20
"""Lowest temperature above 0. With a lower one, the scaled logprobs would overflow float32."""


class SlotTable:
    """The slots, and the sample in each of them."""

    def __init__(self, slots: int, sequence_tokens_max: int, blocks_max: int) -> None:
        self.slots = slots
        self.sequence_max = sequence_tokens_max
        self.samples: dict[int, GeneratedRow] = {}
        self.changes = 0
        """Changes so far: a sample joined, left, or stopped waiting for its leader."""
        self._free = list(range(slots - 1, -1, -1))
        self.active = np.zeros(slots, dtype=bool)
        self.leader = np.full(slots, NO_LEADER, dtype=np.int64)
        """Slot of the leader: the sample that computes the same prompt; `NO_LEADER`: itself."""
        self.forked = np.zeros(slots, dtype=bool)
        """The last block may be shared with another sample."""
        self.stale = np.zeros(slots, dtype=bool)
        """Part of the cache was computed with previous weights, as the caller requested."""
        self.order = np.zeros(slots, dtype=np.int64)
        self.prompt = np.zeros(slots, dtype=np.int64)
        """Prompt tokens."""
        self.known = np.zeros(slots, dtype=np.int64)
        """Prompt tokens and drawn tokens."""
        self.computed = np.zeros(slots, dtype=np.int64)
        """Tokens whose keys and values are in the sample's blocks."""
        self.held = np.zeros(slots, dtype=np.int64)
        """Blocks that the sample holds."""
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
        """Logprobs of the drawn tokens, from index 0."""
        self._details: dict[int, TokenDetails] = {}
        """Details of the slots whose generations want them: room for every token that may be
        drawn."""

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def runnable(self) -> Ints:
        """Slots of samples that compute for themselves."""
        return np.flatnonzero(self.active & (self.leader == NO_LEADER))

    def followers(self, slot: int) -> Ints:
        """Slots whose samples wait for `slot`'s prompt, oldest first."""
        found = np.flatnonzero(self.active & (self.leader == slot))
        return found[np.argsort(self.order[found], kind="stable")]

    def drawn(self, slots: Any) -> Any:
        """Tokens drawn so far."""
        return self.known[slots] - self.prompt[slots]

    def blocks(self, slot: int) -> list[int]:
        """The blocks that `slot` holds, in order."""
        found: list[int] = self.tables[slot, : self.held[slot]].tolist()
        return found

    def assign(self, sample: GeneratedRow, leader: int = NO_LEADER) -> int:
        """Put a sample with its tokens into a free slot; it holds no block and has nothing
        computed."""
        slot = self._free.pop()
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
        most = sample.generation.max_tokens(sample.row)
        self.limit[slot] = max(1, min(most, self.sequence_max - prompt))
        if sampling.details_tokens:
            self._details[slot] = TokenDetails.room(sampling, int(self.limit[slot]))
            if sample.details is not None:
                self._details[slot].fill(sample.details)
        self.ignore_eos[slot] = sampling.ignore_eos
        temperature = sampling.temperature
        self.temperature[slot] = max(TEMPERATURE_MIN, temperature) if temperature else 0.0
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        if sample.tokens is None:
            sample.stream = sample.generation.random_stream(sample.row)
        self.stream[slot] = sample.stream
        return slot

    def release(self, slot: int) -> GeneratedRow:
        """Free a slot whose blocks are free already; the sample keeps its tokens."""
        sample = self.samples.pop(slot)
        self.changes += 1
        drawn = int(self.drawn(slot))
        prompt = int(self.prompt[slot])
        sample.tokens = self.tokens[slot, prompt : prompt + drawn].copy()
        sample.logprobs = self.logprobs[slot, :drawn].copy()
        details = self._details.pop(slot, None)
        sample.details = None if details is None else details.first(drawn)
        self.active[slot] = False
        self.leader[slot] = NO_LEADER
        self.held[slot] = 0
        self._free.append(slot)
        return sample

    def sampling(self, slots: Ints, device: torch.device) -> RowSampling:
        """Sampling parameters of these slots, on the device."""
        return RowSampling(
            temperature=torch.from_numpy(self.temperature[slots]).to(device),
            top_p=torch.from_numpy(self.top_p[slots]).to(device),
            top_k=torch.from_numpy(self.top_k[slots]).to(device),
            stream=torch.from_numpy(self.stream[slots]).to(device),
        )

    def note_details(
        self, logprobs_NV: torch.Tensor, token_N: torch.Tensor, slots: Ints, which: list[int]
    ) -> None:
        """Keep what those of `slots` at the indices `which` want to know of the tokens drawn for
        them, beside the logprobs."""
        if not which:
            return
        index = torch.tensor(which, device=logprobs_NV.device)
        logprobs_NV = logprobs_NV.index_select(0, index)
        own = slots[which]
        wanted = [self.samples[slot].generation.sampling for slot in own.tolist()]
        drawn_by: list[float] = []
        if any(asked.sampling_logprobs for asked in wanted):
            sampling = self.sampling(own, logprobs_NV.device)
            drawn_by = sampling_logprobs(logprobs_NV, sampling, token_N[index]).tolist()
        ids, logprobs = likeliest_tokens(logprobs_NV, max(asked.top_logprobs for asked in wanted))
        rows = zip(own.tolist(), self.drawn(own).tolist(), wanted, strict=True)
        for row, (slot, position, each) in enumerate(rows):
            details, top = self._details[slot], each.top_logprobs
            if each.sampling_logprobs:
                details.sampling_logprobs[position] = drawn_by[row]
            if top:
                details.top_ids[position] = ids[row, :top]
                details.top_logprobs[position] = logprobs[row, :top]

    def scored(self, work: Work, device: torch.device) -> Scored | None:
        """The tokens of prompts in `work` whose next tokens' logprobs are wanted."""
        index: list[int] = []
        targets: list[int] = []
        places: list[tuple[PromptScores, int]] = []
        first = 0
        rows = zip(work.slots.tolist(), work.starts.tolist(), work.lengths.tolist(), strict=True)
        for slot, start, length in rows:
            scores = self.samples[slot].scores
            # The last token of a prompt predicts one that is drawn.
            end = start if scores is None else min(start + length, int(self.prompt[slot]) - 1)
            for position in range(start, end):
                assert scores is not None
                index.append(first + position - start)
                targets.append(int(self.tokens[slot, position + 1]))
                places.append((scores, position + 1))
            first += length
        if not index:
            return None
        target_S = torch.tensor(targets, device=device)

        def keep(start: int, logits_SV: torch.Tensor) -> None:
            part = places[start : start + len(logits_SV)]
            logprobs_SV = logits_SV.float().log_softmax(dim=-1)
            own_S = logprobs_SV.gather(-1, target_S[start : start + len(part), None])[:, 0].cpu()
            ids, logprobs = likeliest_tokens(logprobs_SV, max(scores.top for scores, _ in part))
            for row, (scores, position) in enumerate(part):
                scores.keep(position, float(own_S[row]), ids[row], logprobs[row])

        return Scored(index=torch.tensor(index, device=device), keep=keep)
