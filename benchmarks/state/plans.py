"""Plans of 100 000 slices, from 64 ranks to 8: made, and found again."""

import time

from benchmarks.sizes import sized
from benchmarks.state.baselines import Seconds, timed
from benchmarks.state.rig import Figures, Rows, row
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.layout.plan.balance import PullSource
from plexrl.statemanager.layout.plan.cache import PlanCache
from plexrl.statemanager.layout.plan.columns import Layout

TENSORS, SOURCES, TARGETS = sized(1563, quick=4), 64, 8
"""100 032 slices at the sources, each to be brought to one target."""
EXTENT = 64
REPEATS = sized(5, quick=1)


def measure() -> tuple[Rows, Figures]:
    """All targets at once."""
    held = [_slices(index, SOURCES) for index in range(SOURCES)]
    wanted = [_slices(index, TARGETS) for index in range(TARGETS)]
    columns_s, cold_s, cold_cpu_s, cached_s = [], [], [], []
    for _ in range(REPEATS):
        layouts: list[Layout] = []
        targets: list[Layout] = []
        columns_s.append(timed(lambda: layouts.extend(map(Layout.of, held))))  # noqa: B023
        targets.extend(map(Layout.of, wanted))
        sources = [
            PullSource(id=f"n#{rank}", link=f"n{rank // 8}", layout=layout, bytes_per_s=1e9)
            for rank, layout in enumerate(layouts)
        ]
        cache = PlanCache()
        began = time.process_time()
        cold_s.append(_planned_s(cache, sources, targets))
        cold_cpu_s.append(time.process_time() - began)
        cached_s.append(_planned_s(cache, sources, targets))
        plan = cache.plan(sources, targets)
    moved = sum(copies.nbytes for target in plan.targets for copies in target.copies.values())
    needed = sum(piece.nbytes for slices in wanted for piece in slices)
    figures = {
        "plan_slices": float(TENSORS * SOURCES),
        "plan_cold_s": min(cold_s),
        "plan_cold_cpu_s": min(cold_cpu_s),
        "plan_columns_s": min(columns_s),
        "plan_cached_ms": 1e3 * min(cached_s),
        "bytes_needed_ratio": moved / needed,
    }
    count = f"{TENSORS * SOURCES:,}"
    return [
        row(f"plan of {count} slices, cold", f"{min(cold_s):.3f} s", "", "≤ 0.15 s"),
        row("of a processor's time", f"{min(cold_cpu_s):.3f} s"),
        row("the same, found again", f"{1e3 * min(cached_s):.3f} ms", "", "≤ 1 ms"),
        row("columns of the sources' slices, once a layout", f"{min(columns_s):.3f} s"),
        row("bytes that it moves for each one needed", f"{moved / needed}", "", "1.0"),
    ], figures


def _planned_s(cache: PlanCache, sources: list[PullSource], targets: list[Layout]) -> Seconds:
    return timed(lambda: cache.plan(sources, targets))


def _slices(rank: int, ways: int) -> tuple[StateSlice, ...]:
    extent = EXTENT // ways
    return tuple(
        StateSlice(
            key=StateKey(part=StatePart.PARAMETER, name=f"layer{index}.weight"),
            dtype="F32",
            global_shape=(EXTENT, 256),
            offset=(extent * rank, 0),
            shape=(extent, 256),
            arena_offset=index * extent * 1024,
        )
        for index in range(TENSORS)
    )
