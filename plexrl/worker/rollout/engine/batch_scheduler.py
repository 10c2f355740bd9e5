"""Who computes in a step: admission, growth, preemption and chunks of prompts.

A step serves the oldest first: (1) running samples get the block that their next token needs, and
where none is left the newest sample gives its blocks up and waits again, to be computed anew later;
(2) if nobody had to, waiting samples join in order of age while slots and blocks last;
(3) every sample with one token to compute does so, and what is left of the step's tokens goes to
prompts, oldest first.
"""

from collections import deque

import numpy as np

from plexrl.worker.rollout.engine.blocks import BlockPool, block_names
from plexrl.worker.rollout.engine.rows import NOBODY, Ints, Rows
from plexrl.worker.rollout.engine.step_batch import Work
from plexrl.worker.rollout.generation import Generation, Sample

RESERVE = 8
"""A sample joins only if one block is left over for every so many that run: each will need one
soon, and a sample that must leave again was computed in vain."""


class Seating:
    """The waiting queue, and the blocks of those who wait no more."""

    def __init__(self, rows: Rows, pool: BlockPool, step_tokens_max: int) -> None:
        self._rows = rows
        self._pool = pool
        self._step_tokens = max(step_tokens_max, rows.slots)
        self.waiting: deque[Sample] = deque()
        self.weights_seq = 0
        self.preemptions = 0
        self.prefix_tokens_reused = 0
        self.tokens_recomputed = 0
        """Tokens whose keys and values are computed once more, after a preemption or an update."""

    def plan(self) -> tuple[Work, list[tuple[int, int]]]:
        """The step's work, and the blocks (from, to) to be copied before it."""
        rows = self._rows
        slots = rows.runnable()
        before = self.preemptions
        copies = self._grow(slots)
        if self.preemptions == before and self.waiting and rows.empty:
            self._admit()
            slots = rows.runnable()
        elif self.preemptions != before:
            slots = rows.runnable()
        todo = rows.known[slots] - rows.computed[slots]
        single = todo == 1
        if not single.all():
            order = np.argsort(rows.order[slots], kind="stable")
            slots, todo, single = slots[order], todo[order], single[order]
            room = self._step_tokens - int(single.sum())
            longer = np.where(single, 0, todo)
            earlier = np.cumsum(longer) - longer
            todo = np.where(single, 1, np.clip(room - earlier, 0, longer))
            slots, todo = slots[todo > 0], todo[todo > 0]
        return Work(slots=slots, starts=rows.computed[slots], lengths=todo), copies

    def goes_on(self, slots: Ints, changes: int) -> bool:
        """`slots`, which ran alone when `rows.changes` was `changes`, run alone again, and each
        has room for its next token: there is nothing to plan."""
        rows = self._rows
        if rows.changes != changes or (self.waiting and rows.empty):
            return False
        return bool((rows.computed[slots] % self._pool.block_tokens).all())

    def computed(self, work: Work) -> None:
        """The step's work is done: whole blocks of prompts can be found from now on."""
        rows = self._rows
        rows.computed[work.slots] += work.lengths
        for slot in work.slots[work.lengths > 1].tolist():
            self._name(slot)

    def fork(self, slot: int) -> list[int]:
        """Let those who waited for `slot`'s prompt have it; returns their slots, oldest first."""
        rows = self._rows
        followers: list[int] = rows.followers(slot).tolist()
        blocks = rows.blocks(slot)
        rows.changes += len(followers)
        for follower in followers:
            self._pool.share(blocks)
            rows.tables[follower, : len(blocks)] = blocks
            rows.held[follower] = len(blocks)
            rows.computed[follower] = rows.computed[slot]
            rows.leader[follower] = NOBODY
            rows.stale[follower] = rows.stale[slot]
            rows.forked[follower] = rows.forked[slot] = True
            rows.samples[follower].names = list(rows.samples[slot].names)
        return followers

    def withdraw(self, generation: Generation) -> list[Sample]:
        """Take those of a generation that wait out of the queue; linear, however many others."""
        taken = [sample for sample in self.waiting if sample.generation is generation]
        if taken:
            others = [sample for sample in self.waiting if sample.generation is not generation]
            self.waiting = deque(others)
        return taken

    def leave(self, slot: int) -> Sample:
        """Take a sample from its slot; what it computed is kept for others while there is room."""
        self._name(slot)
        self._pool.give_back(self._rows.blocks(slot))
        return self._rows.unseat(slot)

    def empty(self) -> None:
        """Send all running samples back to wait, and forget what was computed."""
        slots = np.flatnonzero(self._rows.active).tolist()
        self._pool.forget()
        self._rows.stale[slots] = True
        back = []
        for slot in slots:
            self.tokens_recomputed += int(self._rows.computed[slot])
            back.append(self.leave(slot))
        back.sort(key=lambda sample: sample.order)
        # One of each prompt first: the others find its blocks when they come.
        first: dict[tuple[str, int], Sample] = {}
        for sample in back:
            first.setdefault(sample.group, sample)
        others = [sample for sample in back if first[sample.group] is not sample]
        self.waiting.extendleft(reversed([*first.values(), *others]))

    def keep_stale(self) -> None:
        """The weights changed and running samples keep their cache; nobody else may use it."""
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
                # All copies read before any writes, so that `old` may be handed out meanwhile.
                new = pool.take(1)[0]
                pool.give_back([old])
                rows.tables[slot, at_block] = new
                copies.append((old, new))
        return copies

    def _preempt(self) -> None:
        """The newest sample with blocks gives them up, and who waits for it waits again too."""
        rows = self._rows
        holders = np.flatnonzero(rows.active & (rows.held > 0))
        victim = int(holders[np.argmax(rows.order[holders])])
        leaving = [victim, *rows.followers(victim).tolist()]
        self.preemptions += 1
        rows.samples[victim].generation.preemptions += 1
        self.tokens_recomputed += int(rows.computed[victim])
        back = sorted((self.leave(slot) for slot in leaving), key=lambda sample: sample.order)
        self.waiting.extendleft(reversed(back))

    def _admit(self) -> None:
        rows, pool = self._rows, self._pool
        busy = self._under_way()
        while self.waiting and rows.empty:
            sample = self.waiting[0]
            if sample.group in busy:
                # Its prompt's blocks are being computed right now: in a step or two it finds them.
                return
            tokens = sample.prompt
            if not sample.is_fresh:
                tokens = np.concatenate([sample.prompt, sample.tokens])
            # At least one token must be computed, or there are no logits to draw from.
            whole = (len(tokens) - 1) // pool.block_tokens
            if len(sample.names) < whole:
                sample.names = block_names(tokens, pool.block_tokens, sample.names)
            found = pool.find(sample.names[:whole])
            need = -(-len(tokens) // pool.block_tokens) - len(found)
            following = int((rows.active & (rows.leader != NOBODY)).sum())
            spare = len(rows.samples) // RESERVE + following
            room = pool.available - pool.kept_among(found) - need - spare
            if room < 0 and rows.samples:
                return
            self.waiting.popleft()
            pool.share(found)
            slot = self._seat(sample, NOBODY)
            blocks = found + pool.take(need)
            rows.tables[slot, : len(blocks)] = blocks
            rows.held[slot] = len(blocks)
            rows.computed[slot] = len(found) * pool.block_tokens
            self.prefix_tokens_reused += len(found) * pool.block_tokens
            while room > 0 and rows.empty and self._follows(sample):
                self._seat(self.waiting.popleft(), slot)
                room -= 1
            if rows.computed[slot] < len(sample.prompt) // pool.block_tokens * pool.block_tokens:
                busy.add(sample.group)

    def _follows(self, leader: Sample) -> bool:
        """The next that waits needs just what `leader` is about to compute."""
        if not self.waiting or not leader.is_fresh:
            return False
        return self.waiting[0].is_fresh and self.waiting[0].group == leader.group

    def _under_way(self) -> set[tuple[str, int]]:
        """Prompts of which somebody is computing whole blocks."""
        rows, block_tokens = self._rows, self._pool.block_tokens
        whole = rows.prompt // block_tokens * block_tokens
        busy = np.flatnonzero(rows.active & (rows.leader == NOBODY) & (rows.computed < whole))
        return {rows.samples[slot].group for slot in busy.tolist()}

    def _seat(self, sample: Sample, leader: int) -> int:
        slot = self._rows.seat(sample, leader)
        sample.drawn_with(int(self._rows.drawn(slot)), self.weights_seq)
        return slot

    def _name(self, slot: int) -> None:
        rows = self._rows
        if rows.stale[slot] or not rows.held[slot]:
            return
        sample = rows.samples[slot]
        whole = int(rows.computed[slot]) // self._pool.block_tokens
        tokens = rows.tokens[slot, : whole * self._pool.block_tokens]
        sample.names = block_names(tokens, self._pool.block_tokens, sample.names[:whole])
        self._pool.name(rows.blocks(slot), sample.names[:whole])
