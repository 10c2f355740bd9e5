"""Which group gets which sample and which heads, for random samples and sizes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.worker.rollout.engine.tensor_parallel.redistribution import place_rows, redistribute
from plexrl.worker.rollout.engine.tensor_parallel.switch_groups import SwitchGroups, member
from plexrl.worker.rollout.generation import CarriedSample

BLOCK_TOKENS = 4


def groups_of(rank: int, world: int, sizes: tuple[int, ...]) -> SwitchGroups:
    by_size = {size: member(rank, size, sizes) for size in sizes}
    return SwitchGroups(everyone=by_size[world], by_size=by_size, members=tuple(range(world)))


@given(st.sampled_from([(1, 2, 4, 8), (2, 4), (1, 3, 6), (2, 8), (4, 8)]))
def test_a_group_has_all_heads_once_and_a_rank_never_gets_others(sizes: tuple[int, ...]) -> None:
    world = max(sizes)
    for size in sizes:
        heads: dict[int, list[int]] = {}
        for rank in range(world):
            groups = groups_of(rank, world, sizes)
            own = groups.heads(rank, size, 24)
            heads.setdefault(groups.index(size), []).extend(own)
            for smaller in (each for each in sizes if each <= size):
                before = groups.heads(rank, smaller, 24)
                assert before.start <= own.start < own.stop <= before.stop
            assert groups.of(size).share == groups.everyone.share
        assert [sorted(each) for each in heads.values()] == [list(range(24))] * (world // size)


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="tp is 3; the engine's groups have 1, 2 or 4"):
        groups_of(0, 4, (1, 2, 4)).of(3)


@given(st.integers(0, 9), st.integers(1, 9), st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_new_rows_even_out_the_groups(prompts: int, samples: int, loads: list[int]) -> None:
    placed = place_rows(prompts, samples, loads)
    assert len(placed) == prompts * samples
    after = [load + placed.count(group) for group, load in enumerate(loads)]
    even = -(-sum(after) // len(loads))
    for load, total in zip(loads, after, strict=True):
        assert total <= max(load, even)


def test_the_rows_of_a_prompt_stay_together_where_that_is_even() -> None:
    assert place_rows(4, 3, [0, 0]) == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert place_rows(1, 4, [0, 0]) == [0, 0, 1, 1]


@st.composite
def carried(draw: st.DrawFn) -> list[list[CarriedSample]]:
    """Samples of some groups; those of a family share their first blocks."""
    found: list[list[CarriedSample]] = []
    order = 0
    for _ in range(draw(st.sampled_from([1, 2, 4]))):
        samples: list[CarriedSample] = []
        free = 1
        for _ in range(draw(st.integers(0, 4))):
            shared = draw(st.integers(0, 3))
            family = tuple(range(free, free + shared))
            free += shared
            for _ in range(draw(st.integers(1, 3))):
                own = draw(st.integers(0, 3))
                blocks = (*family, *range(free, free + own))
                free += own
                least = shared * BLOCK_TOKENS
                computed = draw(st.integers(least, len(blocks) * BLOCK_TOKENS))
                samples.append(
                    CarriedSample(
                        generation="g",
                        row=order,
                        order=order,
                        known=computed + draw(st.integers(1, 9)),
                        tokens=None,
                        logprobs=None,
                        details=None,
                        segments=(),
                        blocks=blocks if computed else (),
                        computed=computed,
                    )
                )
                order += 1
        found.append(samples)
    return found


@given(carried(), st.sampled_from([1, 2, 4]), st.integers(1, 20), st.integers(1, 30))
def test_every_sample_goes_to_one_group_and_every_block_moves_once(
    samples: list[list[CarriedSample]], groups: int, slots: int, blocks: int
) -> None:
    plan = redistribute(
        samples, groups, slots=slots, blocks=blocks, block_tokens=BLOCK_TOKENS, migrate=True
    )
    rows = [placed.sample.row for group in plan for placed in group.placed]
    assert sorted(rows) == [each.row for group in samples for each in group]
    for group in plan:
        running = [each for each in group.placed if each.keeps_kv]
        assert len(running) <= slots
        assert group.allocated <= blocks
        assert [each.sample.order for each in group.placed] == sorted(
            each.sample.order for each in group.placed
        )
        moved = {
            (source, block): (target, valid)
            for source, moves in group.moves.items()
            for block, target, valid in zip(moves.blocks, moves.targets, moves.valid, strict=True)
        }
        assert sum(len(moves.blocks) for moves in group.moves.values()) == len(moved)
        assert max(Counter(target for target, _ in moved.values()).values(), default=1) == 1
        for placed, table in zip(group.placed, group.tables, strict=True):
            assert (table is not None) == placed.keeps_kv
            for index, block in enumerate(placed.sample.blocks if table else ()):
                valid = min(BLOCK_TOKENS, placed.sample.computed - index * BLOCK_TOKENS)
                if valid > 0:
                    assert table is not None
                    assert moved[placed.source, block] == (table[index], valid)


@given(carried(), st.sampled_from([1, 2, 4]))
def test_groups_are_balanced_by_tokens(samples: list[list[CarriedSample]], groups: int) -> None:
    plan = redistribute(
        samples, groups, slots=99, blocks=999, block_tokens=BLOCK_TOKENS, migrate=True
    )
    everyone = [each.known for group in samples for each in group]
    tokens = [sum(placed.sample.known for placed in group.placed) for group in plan]
    # The bound of longest-first scheduling, and what staying with one's cache may add.
    assert max(tokens) <= 1.1 * sum(everyone) / groups + max(everyone, default=0)
