"""Plans a step of the engine: admission, block allocation, preemption and chunked prefill.

A step serves the oldest sample first:
(1) Running samples get the block that their next token needs. If no block is left, the newest
    sample is preempted: it frees its blocks, waits again, and is recomputed later.
(2) If no sample was preempted, waiting samples are admitted by age while slots and blocks last.
(3) Every sample with one token to compute computes it. Prompts get the rest of the step's token
    budget, oldest first.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from plexrl.worker.rollout.engine.blocks import BlockPool, block_names
from plexrl.worker.rollout.engine.slot_table import NO_LEADER, SlotTable
from plexrl.worker.rollout.engine.step_batch import Ints, Work
from plexrl.worker.rollout.generation import CarriedSample, GeneratedRow, Generation

RUNNING_PER_SPARE_BLOCK = 8
"""A sample is admitted only if one spare block remains for every 8 running samples. Each of
them needs a block soon, and the work of a preempted sample is lost."""


class BatchScheduler:
    """Owns the waiting queue, and decides which samples hold slots and blocks."""

    def __init__(self, rows: SlotTable, pool: BlockPool, step_tokens_max: int) -> None:
        self._rows = rows
        self._pool = pool
        self._step_tokens = max(step_tokens_max, rows.slots)
        self.waiting: deque[GeneratedRow] = deque()
        self.weights_seq = 0
        self.preemptions = 0
        self.prefix_tokens_reused = 0
        self.tokens_recomputed = 0
        """Tokens whose keys and values are recomputed, after a preemption or a weight update."""

    def plan(self) -> tuple[Work, list[tuple[int, int]]]:
        """The step's work, and the block copies (source, target) to make before it."""
        rows = self._rows
        slots = rows.runnable()
        before = self.preemptions
        copies = self._grow(slots)
        if self.preemptions == before and self.waiting and rows.free:
            self._admit()
            slots = rows.runnable()
        elif self.preemptions != before:
            slots = rows.runnable()
        todo = rows.known[slots] - rows.computed[slots]
        single = todo == 1
        if not single.all():
            order = np.argsort(rows.order[slots], kind="stable")
            slots, todo, single = slots[order], todo[order], single[order]
            budget = self._step_tokens - int(single.sum())
            longer = np.where(single, 0, todo)
            earlier = np.cumsum(longer) - longer
            todo = np.where(single, 1, np.clip(budget - earlier, 0, longer))
            slots, todo = slots[todo > 0], todo[todo > 0]
        return Work(slots=slots, starts=rows.computed[slots], lengths=todo), copies

    def is_unchanged(self, slots: Ints, changes: int) -> bool:
        """Whether the next step needs no plan: exactly `slots` ran when `rows.changes` was
        `changes`, the same slots run again, and each one's last block has space for a token."""
        rows = self._rows
        if rows.changes != changes or (self.waiting and rows.free):
            return False
        return bool((rows.computed[slots] % self._pool.block_tokens).all())

    def computed(self, work: Work) -> None:
        """Record that the step's work is done; full blocks of prompts can be reused from then."""
        rows = self._rows
        rows.computed[work.slots] += work.lengths
        for slot in work.slots[work.lengths > 1].tolist():
            self._publish_blocks(slot)

    def fork(self, slot: int) -> list[int]:
        """Share `slot`'s prompt blocks with its followers; returns their slots, oldest first."""
        rows = self._rows
        followers: list[int] = rows.followers(slot).tolist()
        blocks = rows.blocks(slot)
        rows.changes += len(followers)
        for follower in followers:
            self._pool.share(blocks)
            rows.tables[follower, : len(blocks)] = blocks
            rows.held[follower] = len(blocks)
            rows.computed[follower] = rows.computed[slot]
            rows.leader[follower] = NO_LEADER
            rows.stale[follower] = rows.stale[slot]
            rows.forked[follower] = rows.forked[slot] = True
            rows.samples[follower].names = list(rows.samples[slot].names)
        return followers

    def withdraw(self, generation: Generation, rows: Collection[int]) -> list[GeneratedRow]:
        """Remove these waiting rows of a generation from the queue. Linear in its length."""
        taken: list[GeneratedRow] = []
        others: list[GeneratedRow] = []
        for sample in self.waiting:
            is_taken = sample.generation is generation and sample.row in rows
            (taken if is_taken else others).append(sample)
        if taken:
            self.waiting = deque(others)
        return taken

    def requeue_followers(self, leaving: Collection[int]) -> None:
        """Return other samples that wait for the prompts of slots that are to be released."""
        for leader in leaving:
            followers: list[int] = self._rows.followers(leader).tolist()
            back = [self.release(follower) for follower in followers if follower not in leaving]
            self.waiting.extendleft(reversed(back))

    def release(self, slot: int) -> GeneratedRow:
        """Remove a sample from its slot. Its full blocks stay cached until they are evicted."""
        self._publish_blocks(slot)
        self._pool.give_back(self._rows.blocks(slot))
        return self._rows.release(slot)

    def requeue_all(self) -> None:
        """Return all running samples to the queue, and drop the prefix cache."""
        slots = np.flatnonzero(self._rows.active).tolist()
        self._pool.forget()
        self._rows.stale[slots] = True
        back = []
        for slot in slots:
            self.tokens_recomputed += int(self._rows.computed[slot])
            back.append(self.release(slot))
        self.waiting.extendleft(reversed(_in_order_of_prefill(back)))

    def carry_out(self) -> list[CarriedSample]:
        """Remove all samples, oldest first, and drop the prefix cache."""
        rows = self._rows
        found = [_carried(sample) for sample in self.waiting]
        self.waiting.clear()
        for slot in list(rows.samples):
            blocks, computed = rows.blocks(slot), int(rows.computed[slot])
            self._pool.give_back(blocks)
            waiting = _carried(rows.release(slot))
            if not computed:
                found.append(waiting)
                continue
            stale, forked = bool(rows.stale[slot]), bool(rows.forked[slot])
            found.append(
                replace(
                    waiting, blocks=tuple(blocks), computed=computed, stale=stale, forked=forked
                )
            )
        self._pool.clear()
        return sorted(found, key=lambda sample: sample.order)

    def carry_in(
        self,
        running: Sequence[tuple[GeneratedRow, CarriedSample, Sequence[int]]],
        others: list[GeneratedRow],
    ) -> None:
        """Take the samples of another engine: `running` with their blocks here, which have the keys
        and values that the blocks of the other engine had, and `others` without."""
        rows = self._rows
        self.waiting.extend(_in_order_of_prefill(others))
        wanted = {sample.group for sample in others}
        for sample, carried, blocks in running:
            slot = rows.assign(sample)
            rows.tables[slot, : len(blocks)] = blocks
            rows.held[slot] = len(blocks)
            rows.computed[slot] = carried.computed
            rows.stale[slot], rows.forked[slot] = carried.stale, carried.forked
            if sample.group in wanted:
                self._publish_blocks(slot)

    def keep_stale(self) -> None:
        """After a weight update: running samples keep the cache of the old weights; no other reuses
        it."""
        self._pool.forget()
        self._rows.stale[self._rows.computed > 0] = True

    def _grow(self, slots: Ints) -> list[tuple[int, int]]:
        rows, pool = self._rows, self._pool
        wanting = (rows.computed[slots] == rows.held[slots] * pool.block_tokens) | rows.forked[
            slots
        ]
        copies: list[tuple[int, int]] = []
        if not wanting.any():
            return copies
        slots = slots[wanting]
        for slot in slots[np.argsort(rows.order[slots], kind="stable")].tolist():
            rows.forked[slot] = False
            while rows.active[slot] and pool.available == 0:
                self._preempt()
            if not rows.active[slot]:
                continue
            at_block = int(rows.computed[slot]) // pool.block_tokens
            if at_block == rows.held[slot]:
                rows.tables[slot, at_block] = pool.take(1)[0]
                rows.held[slot] += 1
            elif pool.counts[old := int(rows.tables[slot, at_block])] > 1:
                # All copies read before any writes, so `old` may be allocated again meanwhile.
                new = pool.take(1)[0]
                pool.give_back([old])
                rows.tables[slot, at_block] = new
                copies.append((old, new))
        return copies

    def _preempt(self) -> None:
        """Preempt the newest sample that holds blocks, and its followers."""
        rows = self._rows
        holders = np.flatnonzero(rows.active & (rows.held > 0))
        victim = int(holders[np.argmax(rows.order[holders])])
        leaving = [victim, *rows.followers(victim).tolist()]
        self.preemptions += 1
        rows.samples[victim].generation.preemptions += 1
        self.tokens_recomputed += int(rows.computed[victim])
        back = sorted((self.release(slot) for slot in leaving), key=lambda sample: sample.order)
        self.waiting.extendleft(reversed(back))

    def _admit(self) -> None:
        rows, pool = self._rows, self._pool
        busy = self._prompts_in_prefill()
        while self.waiting and rows.free:
            sample = self.waiting[0]
            if sample.group in busy:
                # Another sample computes this prompt's blocks: they can be reused in a step or two.
                return
            tokens = sample.prompt
            if not sample.is_fresh:
                tokens = np.concatenate([sample.prompt, sample.tokens])
            # At least one token must be computed, or there are no logits to draw from.
            whole = (len(tokens) - 1) // pool.block_tokens
            if len(sample.names) < whole:
                sample.names = block_names(tokens, pool.block_tokens, sample.names)
            # Without a pass over a token there is no logprob of the next one.
            found = [] if sample.scores is not None else pool.find(sample.names[:whole])
            need = -(-len(tokens) // pool.block_tokens) - len(found)
            following = int((rows.active & (rows.leader != NO_LEADER)).sum())
            spare = len(rows.samples) // RUNNING_PER_SPARE_BLOCK + following
            free_blocks = pool.available - pool.kept_among(found) - need - spare
            if free_blocks < 0 and rows.samples:
                return
            self.waiting.popleft()
            pool.share(found)
            slot = self._assign_slot(sample, NO_LEADER)
            blocks = found + pool.take(need)
            rows.tables[slot, : len(blocks)] = blocks
            rows.held[slot] = len(blocks)
            rows.computed[slot] = len(found) * pool.block_tokens
            self.prefix_tokens_reused += len(found) * pool.block_tokens
            while free_blocks > 0 and rows.free and self._next_follows(sample):
                self._assign_slot(self.waiting.popleft(), slot)
                free_blocks -= 1
            if rows.computed[slot] < len(sample.prompt) // pool.block_tokens * pool.block_tokens:
                busy.add(sample.group)

    def _next_follows(self, leader: GeneratedRow) -> bool:
        """Whether the next waiting sample needs exactly the prompt that `leader` will compute."""
        if not self.waiting or not leader.is_fresh:
            return False
        return self.waiting[0].is_fresh and self.waiting[0].group == leader.group

    def _prompts_in_prefill(self) -> set[tuple[str, int]]:
        """Prompts of which some full block is still to be computed by a running sample."""
        rows, block_tokens = self._rows, self._pool.block_tokens
        whole = rows.prompt // block_tokens * block_tokens
        busy = np.flatnonzero(rows.active & (rows.leader == NO_LEADER) & (rows.computed < whole))
        return {rows.samples[slot].group for slot in busy.tolist()}

    def _assign_slot(self, sample: GeneratedRow, leader: int) -> int:
        slot = self._rows.assign(sample, leader)
        sample.drawn_with(int(self._rows.drawn(slot)), self.weights_seq)
        return slot

    def _publish_blocks(self, slot: int) -> None:
        """Register a slot's full blocks in the prefix cache, under their names."""
        rows = self._rows
        if rows.stale[slot] or not rows.held[slot]:
            return
        sample = rows.samples[slot]
        whole = int(rows.computed[slot]) // self._pool.block_tokens
        tokens = rows.tokens[slot, : whole * self._pool.block_tokens]
        sample.names = block_names(tokens, self._pool.block_tokens, sample.names[:whole])
        self._pool.name(rows.blocks(slot), sample.names[:whole])


def _in_order_of_prefill(samples: Iterable[GeneratedRow]) -> list[GeneratedRow]:
    """By age, but one sample of each prompt first: the others then find its blocks in the prefix
    cache."""
    ordered = sorted(samples, key=lambda sample: sample.order)
    first: dict[tuple[str, int], GeneratedRow] = {}
    for sample in ordered:
        first.setdefault(sample.group, sample)
    others = [sample for sample in ordered if first[sample.group] is not sample]
    return [*first.values(), *others]


def _carried(sample: GeneratedRow) -> CarriedSample:
    drawn = 0 if sample.tokens is None else len(sample.tokens)
    return CarriedSample(
        generation=sample.generation.name,
        row=sample.row,
        order=sample.order,
        known=len(sample.prompt) + drawn,
        tokens=sample.tokens,
        logprobs=sample.logprobs,
        details=sample.details,
        segments=tuple(sample.segments),
    )
