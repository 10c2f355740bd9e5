"""One engine whose ranks work in groups of changing size (PAT §4.3).

With 4 ranks it is 4 engines of 1 rank, 2 of 2 or 1 of 4. It begins every generation stage with the
smallest groups, which are the quickest for many rows, and `set_tp` changes the size between two
tokens, as often as one likes. Each rank has an engine for every size; all use the same weights and
the same memory for the cache, and one of them has samples.

All ranks make the same calls in the same order. A group draws its own rows. The engine's first rank
has the generations with their results; the others have copies without.

Invariants at every token boundary:
- Every unfinished row is in the engine of exactly one group, and the ranks of that group agree on
  it.
- A row's tokens do not depend on its group, on the size of the groups, or on switches.
"""

import time
from collections.abc import Collection
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from plexrl.errors import InvalidRequestError
from plexrl.model.memory.kv_cache import BLOCK_TOKENS
from plexrl.worker.rollout.engine.engine import Engine
from plexrl.worker.rollout.engine.tensor_parallel.group_results import (
    STEPS_AHEAD,
    DrawnTokens,
    EndedRow,
    Outbox,
    Preempted,
    Report,
    ReportLink,
    Result,
)
from plexrl.worker.rollout.engine.tensor_parallel.kv_exchange import KvExchange, Switch
from plexrl.worker.rollout.engine.tensor_parallel.ranks import EngineCalls, LeadingEngine
from plexrl.worker.rollout.engine.tensor_parallel.redistribution import (
    NewGroup,
    place_rows,
    redistribute,
)
from plexrl.worker.rollout.engine.tensor_parallel.switch_groups import SwitchGroups
from plexrl.worker.rollout.generation import CarriedSample, Generation, RowPlacement
from plexrl.worker.rollout.rollout_engine import (
    STEP_TOKENS_MAX,
    EngineStats,
    LastStep,
    RolloutEngine,
    RowLength,
    end_tokens,
)
from plexrl.worker.rollout.stops import TextDecoder
from plexrl.worker.state.device import Capture

KV_WAYS = ("migrate", "recompute")
"""How unfinished samples get their keys and values in new groups: from the ranks of their old
groups, or by a prefill."""

TOTALS = (
    "tokens_drawn",
    "tokens_computed",
    "tokens_recomputed",
    "prefix_tokens_reused",
    "preemptions",
)
"""Counts since the start that are summed over the groups of all sizes."""
HELD = ("running", "waiting", "blocks_held", "blocks_kept")
"""Numbers that are summed over the present groups."""


class SwitchingEngine(RolloutEngine):
    """Generates in groups of ranks; `set_tp` changes their size."""

    def __init__(
        self,
        model: nn.Module,
        *,
        groups: SwitchGroups,
        slots: int,
        sequence_tokens_max: int,
        kv_bytes_max: int | None = None,
        block_tokens: int = BLOCK_TOKENS["torch"],
        step_tokens_max: int = STEP_TOKENS_MAX,
        probed: torch.Tensor,
        cache_memory: torch.Tensor | None = None,
        capture: Capture | None = None,
    ) -> None:
        """As `Engine`. The parameters are this rank's share for the smallest groups. All groups
        together have `slots`, and each rank has `kv_bytes_max`.

        Raises:
            InvalidRequestError: as `Engine`; one sequence must fit into the cache of a smallest
                group.
        """
        super().__init__(end_tokens(model), sequence_tokens_max)
        self._groups = groups
        self._last = LastStep()
        self._engines: dict[int, Engine] = {}
        budget = kv_bytes_max
        for size, group in sorted(groups.by_size.items()):
            made = self._engines[size] = Engine(
                model,
                slots=-(-slots // groups.count(size)),
                sequence_tokens_max=sequence_tokens_max,
                kv_bytes_max=budget,
                block_tokens=block_tokens,
                step_tokens_max=step_tokens_max,
                ranks=None if size == 1 else group,
                probed=probed,
                cache_memory=cache_memory,
                capture=capture,
            )
            made.meter = self._last
            # Twice the ranks have half the heads, and so twice the blocks in the same memory. One
            # block is for padding.
            memory = made.kv.nbytes
            larger = min((other for other in groups.by_size if other > size), default=size)
            budget = memory - memory // made.kv.blocks * size // larger
        self._tp = groups.smallest
        self.meter.begin(self._tp)
        self._outbox = Outbox()
        # The last count is of blocks.
        self._link = ReportLink(groups, len(TOTALS) + len(HELD) + 1)
        self._parts: dict[str, Generation] = {}
        """On the first rank of a group: the group's rows of each generation."""
        self._loads = [0] * groups.count(self._tp)
        """On the leader: unfinished rows of each group."""
        self._reports: dict[tuple[int, int], dict[str, int]] = {}
        """On the leader: the latest counts of each group, by size and index."""
        self._owed = False
        self._switches = 0
        self._switch_s = 0.0
        self._kv_bytes_moved = 0

    def use_text(self, text: TextDecoder) -> None:
        """As `RolloutEngine`."""
        super().use_text(text)
        for engine in self._engines.values():
            engine.use_text(text)

    @property
    def _inner(self) -> Engine:
        return self._engines[self._tp]

    @property
    def weights_seq(self) -> int:
        return self._inner.weights_seq

    @weights_seq.setter
    def weights_seq(self, seq: int) -> None:
        self._inner.weights_seq = seq

    @property
    def has_work(self) -> bool:
        """As `RolloutEngine`; also while other groups have results that the leader lacks."""
        return self._owed or (self._paused and self._link.expected > 0) or super().has_work

    def step(self) -> list[Generation]:
        """As `RolloutEngine`, on the leader; on the other ranks it returns nothing of use."""
        self._pass()
        ended, self._ended = self._ended, []
        return ended

    def _pass(self) -> None:
        began, self._last.step = time.perf_counter(), None
        self._steps += 1
        self._inner.step()
        # With no rows of its own, the first group has nothing to do but wait.
        waits = self._owed or self._paused or not self._inner.stats().running
        self._collect(0 if waits else STEPS_AHEAD)
        if self._last.step is not None:
            running, kv_tokens, seconds = self._last.step
            self.meter.add(running, kv_tokens, seconds, time.perf_counter() - began - seconds)

    def abort(self, name: str, rows: Collection[int] | None = None) -> None:
        self._owed = self._owed or name in self._generations
        self._inner.abort(name, rows)

    def interrupt(self, name: str) -> Generation | None:
        """As `RolloutEngine`; all ranks call it at once."""
        self.abort(name)
        self._collect()
        found = super().interrupt(name)
        self.forget(name)
        return found

    def forget(self, name: str) -> None:
        """Drop a generation that has ended, of which only the leader is told."""
        self._generations.pop(name, None)

    def pause(self) -> None:
        super().pause()
        self._inner.pause()

    def resume(self) -> None:
        super().resume()
        self._inner.resume()

    def weights_changed(self, weights_seq: int, *, recompute_kv: bool = True) -> None:
        self._inner.weights_changed(weights_seq, recompute_kv=recompute_kv)

    def drop_cache(self) -> None:
        self._inner.drop_cache()

    def check_tp(self, tp: int, kv: str) -> None:
        """Check the arguments of `set_tp`.

        Raises:
            InvalidRequestError: there are no groups of this size, or there is no such way.
        """
        self._groups.of(tp)
        if kv not in KV_WAYS:
            raise InvalidRequestError(f"kv is {kv!r}: choose {' or '.join(KV_WAYS)}")

    def set_tp(self, tp: int, kv: str) -> None:
        """Continue all rows in groups of `tp` ranks (PAT Alg. 1); all ranks call it at once.

        `kv`: whether keys and values are moved to the ranks of the new groups, or recomputed there.
        Samples for which a new group has no slot or no blocks wait and are recomputed.
        """
        if tp == self._tp:
            return
        began = time.perf_counter()
        self._collect()
        own = self._inner.carry_out()
        carried: list[list[CarriedSample]] = [[]] * self._groups.world
        dist.all_gather_object(
            carried, own if self._groups.of(self._tp).rank == 0 else [], group=self._groups.control
        )
        self._kv_bytes_moved = self._continue_in(tp, carried[:: self._tp], migrate=kv == "migrate")
        self._collect()
        self._switches += 1
        self._switch_s = time.perf_counter() - began

    def stats(self) -> EngineStats:
        """As `RolloutEngine`, on the leader. Blocks are counted in those of a group of all ranks,
        so that their number and their bytes are those of every size."""
        inner, count = self._inner.stats(), self._groups.count(self._tp)
        sums = {name: sum(report[name] for report in self._reports.values()) for name in TOTALS}
        present = [self._reports.get((self._tp, group), {}) for group in range(count)]
        sums |= {name: sum(each.get(name, 0) for each in present) for name in HELD}
        return replace(
            inner,
            **sums,
            paused=self._paused,
            steps=self._steps,
            blocks=inner.blocks * count,
            block_bytes=inner.block_bytes // count,
            tp_switches=self._switches,
            tp_switch_s=self._switch_s,
            kv_bytes_moved=self._kv_bytes_moved,
            groups_made=self._groups.made,
        )

    def lengths(self) -> list[RowLength]:
        """As `RolloutEngine`, on the leader; all ranks call it at once."""
        rows = self._inner.lengths()
        self._collect()
        self._link.post(self._tp, [0] * len(self._counts()), rows)
        if self._groups.rank:
            return rows
        others = self._link.receive(self._tp)
        return rows + [
            row._replace(group=report.group) for report in others for row in report.value or ()
        ]

    def check_invariants(self) -> None:
        """Assert the invariants of the engine of this rank's group."""
        self._inner.check_invariants()
        for size, engine in self._engines.items():
            held = engine.stats()
            assert size == self._tp or held.running == held.waiting == held.blocks_held == 0
        if self._groups.rank == 0 and not self._owed:
            unfinished = sum(generation.unfinished for generation in self._generations.values())
            assert sum(self._loads) == unfinished

    def _enqueue(self, generation: Generation) -> None:
        if generation.placement is None:
            generation.placement = self._place(generation)
        placement = generation.placement
        if placement.tp != self._tp:
            # A new generation stage: no row is unfinished, but reports may be under way.
            while self._link.expected:
                for report in self._link.receive(self._tp):
                    self._take(report)
            self._inner.carry_out()
            self._continue_in(placement.tp, [[]] * self._groups.count(self._tp), migrate=False)
        own = self._groups.index(self._tp)
        rows = frozenset(row for row, group in enumerate(placement.groups) if group == own)
        self._inner.submit(self._part(generation, rows))
        self._loads = [
            load + placement.groups.count(group) for group, load in enumerate(self._loads)
        ]

    def _place(self, generation: Generation) -> RowPlacement:
        """The group in which the leader puts a new generation."""
        is_stage = not any(self._loads)
        tp = self._groups.smallest if is_stage else self._tp
        loads = [0] * self._groups.count(tp) if is_stage else self._loads
        found = place_rows(len(generation.prompts), generation.samples_per_prompt, loads)
        return RowPlacement(tp=tp, groups=tuple(found), streams=generation.emit is not None)

    def _part(self, generation: Generation, rows: frozenset[int]) -> Generation:
        """The group's part of a generation."""
        made = Generation(
            name=generation.name,
            prompts=generation.prompts,
            samples_per_prompt=generation.samples_per_prompt,
            sampling=generation.sampling,
            emit=None,
            weights_seq=generation.weights_seq,
            first_row=generation.first_row,
            prompt_sampling=generation.prompt_sampling,
            rows=rows,
        )
        if self._groups.of(self._tp).rank == 0:
            assert generation.placement is not None, "it was queued"
            self._outbox.listen(made, streams=generation.placement.streams)
            self._parts[made.name] = made
        return made

    def _continue_in(self, tp: int, carried: list[list[CarriedSample]], *, migrate: bool) -> int:
        """Continue the samples of the old groups in groups of `tp`; returns the bytes moved."""
        old, new, before = self._inner, self._engines[tp], self._tp
        found = new.stats()
        plan = redistribute(
            carried,
            self._groups.count(tp),
            slots=new.slots,
            blocks=found.blocks,
            block_tokens=found.block_tokens,
            migrate=migrate,
        )
        new.take_over(old)
        self._tp = tp
        self.meter.begin(tp)
        own = plan[self._groups.index(tp)]
        allocated = new.allocate(own.allocated)
        moved = 0
        if any(group.moves for group in plan):
            switch = Switch(groups=self._groups, before=before, after=tp, plan=plan)
            exchange = KvExchange(switch, old.kv, new.kv, allocated)
            exchange.run()
            moved = exchange.bytes_moved
        self._carry_in(own, allocated)
        self._loads = [len(group.placed) for group in plan]
        return moved

    def _carry_in(self, own: NewGroup, allocated: list[int]) -> None:
        rows: dict[str, set[int]] = {}
        for placed in own.placed:
            rows.setdefault(placed.sample.generation, set()).add(placed.sample.row)
        self._parts.clear()
        parts = [
            self._part(self._generations[name], frozenset(each)) for name, each in rows.items()
        ]
        samples = [
            (placed.sample, None if table is None else [allocated[block] for block in table])
            for placed, table in zip(own.placed, own.tables, strict=True)
        ]
        self._inner.carry_in(parts, samples)

    def _collect(self, behind: int = 0) -> None:
        """Send the group's results; on the leader, take those of all groups. Other groups may be
        `behind` by so many steps."""
        counts = self._counts()
        results = self._outbox.take(self._parts.values())
        for part in list(self._parts.values()):
            part.blocks_max = 0
            if part.unfinished == 0:
                del self._parts[part.name]
        self._link.post(self._tp, counts, results)
        if self._groups.rank == 0:
            self._take(Report(group=0, counts=counts, value=results))
            while self._link.expected > behind:
                for report in self._link.receive(self._tp):
                    self._take(report)
            self._owed = self._owed and self._link.expected > 0

    def _counts(self) -> list[int]:
        found = self._inner.stats()
        # The maximum since the last report, which is one step of all groups.
        blocks = max((part.blocks_max for part in self._parts.values()), default=0)
        return [*(getattr(found, name) for name in (*TOTALS, *HELD)), blocks]

    def _take(self, report: Report) -> None:
        """On the leader: use what a group sent."""
        *counts, blocks = report.counts
        named = dict(zip((*TOTALS, *HELD), counts, strict=True))
        self._reports[self._tp, report.group] = {**named, "blocks": blocks}
        held = sum(
            self._reports.get((self._tp, group), {"blocks": 0})["blocks"]
            for group in range(self._groups.count(self._tp))
        )
        for generation in self._generations.values():
            generation.blocks_max = max(generation.blocks_max, held)
        for result in report.value or ():
            self._apply(result, report.group)

    def _apply(self, result: Result, group: int) -> None:
        generation = self._generations[result.generation]
        match result:
            case DrawnTokens():
                if generation.emit is not None:
                    generation.emit(result.row, result.tokens, result.logprobs)
            case Preempted():
                generation.preemptions += result.count
            case EndedRow():
                generation.tokens[result.row] = result.tokens
                generation.logprobs[result.row] = result.logprobs
                generation.details[result.row] = result.details
                generation.segments[result.row] = result.segments
                self._loads[group] -= 1
                self._end_row(generation, result.row, result.finish)


class SwitchingLeader(LeadingEngine):
    """The calls of a `SwitchingEngine` that its leader makes and the followers repeat."""

    def __init__(self, engine: SwitchingEngine, calls: EngineCalls) -> None:
        super().__init__(engine, calls)
        self._switching = engine

    def step(self) -> list[Generation]:
        """As `RolloutEngine`."""
        ended = super().step()
        for generation in ended:
            self._calls.add("forget", generation.name)
        return ended

    def lengths(self) -> list[RowLength]:
        """As `RolloutEngine`."""
        self._calls.send("lengths")
        return self._switching.lengths()

    def set_tp(self, tp: int, kv: str) -> None:
        """As `SwitchingEngine`.

        Raises:
            InvalidRequestError: as `SwitchingEngine.check_tp`.
        """
        self._switching.check_tp(tp, kv)
        self._calls.send("set_tp", tp, kv)
        self._switching.set_tp(tp, kv)
