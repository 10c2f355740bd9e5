"""The dispatch plan: the ranks of any layout together compute what one process does."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.model.parallelism import Parallelism
from plexrl.router.dispatch.balance import balanced
from plexrl.router.dispatch.micro_batches import packed_count, padded_count
from plexrl.router.dispatch.plan import DispatchPlan, plan_batch
from plexrl.router.dispatch.reductions import gather_metrics
from tests.layouts import DENSE_LAYOUTS, LAYOUTS
from tests.router.dispatch.simulated_model import batch, run_by_plan, run_whole

batches = st.lists(st.integers(1, 40), min_size=1, max_size=40)
layouts = st.sampled_from(LAYOUTS)
bounds = st.integers(1, 400)

RAGGED = (1, 7, 2, 19, 3, 3, 11, 1, 8, 16, 5)


def plan_of(
    layout: Parallelism, lengths: list[int], bound: int = 64, *, packs: bool = True
) -> DispatchPlan:
    return plan_batch(layout, lengths, micro_batch_tokens=bound, packs=packs)


def check_execution(plan: DispatchPlan, lengths: list[int], seed: int = 0) -> None:
    """The ranks' results, joined, are those of one process; so are the metrics."""
    arrays = batch(lengths, seed)
    answers, headers = run_by_plan(plan, arrays)
    expected, sums = run_whole(arrays)
    assert np.array_equal(plan.join(answers), expected)
    metrics = gather_metrics(headers)["metrics"]
    tokens = sums["tokens"]
    assert metrics["loss"] == pytest.approx(sums["loss"])
    assert metrics["tokens"] == tokens
    assert metrics["logprob"] == pytest.approx(sums["logprob"] / tokens if tokens else 0.0)


@pytest.mark.parametrize("ranks_max", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_every_layout_computes_what_one_process_does(ranks_max: int) -> None:
    layouts = [each for each in DENSE_LAYOUTS if each.world_size <= ranks_max]
    assert len(layouts) > 100
    for layout in layouts:
        check_execution(plan_of(layout, list(RAGGED)), list(RAGGED))


@given(layouts, batches, bounds, st.booleans(), st.integers(0, 100))
@settings(deadline=None)
def test_results_of_ragged_batches_are_whole_and_in_order(
    layout: Parallelism, lengths: list[int], bound: int, packs: bool, seed: int
) -> None:
    if not packs:
        layout = replace(layout, cp=1, ep=1)
    check_execution(plan_of(layout, lengths, bound, packs=packs), lengths, seed)


@given(layouts, batches)
@settings(deadline=None)
def test_a_rows_tokens_reach_the_ranks_of_one_data_rank_and_no_others(
    layout: Parallelism, lengths: list[int]
) -> None:
    plan = plan_of(layout, lengths)
    arrays = batch(lengths)
    arrays["tokens"] = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    parts = plan.inputs(arrays)
    ends = np.cumsum(lengths)
    home = {int(row): dp for dp, shard in enumerate(plan.shards) for row in shard.rows}
    assert sorted(home) == list(range(len(lengths)))
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            seen: list[int] = []
            for dp in range(layout.dp):
                for cp in range(layout.cp):
                    rank = layout.rank(dp=dp, tp=tp, pp=pp, cp=cp)
                    tokens = parts[plan.part_of(rank)]["tokens"]
                    real = tokens[tokens > 0]
                    rows = np.searchsorted(ends, real - 1, side="right")
                    assert {home[int(row)] for row in rows} <= {dp}
                    seen += real.tolist()
            # The ranks of one stage and tensor part hold the batch exactly once.
            assert sorted(seen) == list(range(1, sum(lengths) + 1))


@given(layouts, batches)
def test_replicas_get_the_same_part_and_each_part_has_one_output_rank(
    layout: Parallelism, lengths: list[int]
) -> None:
    plan = plan_of(layout, lengths)
    for ranks in layout.groups("tp", "pp"):
        assert len({plan.part_of(rank) for rank in ranks}) == 1
    parts = [plan.part_of(rank) for rank in layout.output_ranks]
    assert parts == list(range(layout.dp * layout.cp))


@given(st.integers(2, 16), batches)
def test_context_ranks_get_chunk_pairs_of_equal_causal_work(cp: int, lengths: list[int]) -> None:
    plan = plan_of(Parallelism(cp=cp), lengths)
    arrays = batch(lengths)
    ends = np.cumsum(arrays["lengths"]).tolist()
    for cp_rank, part in enumerate(plan.inputs(arrays)):
        tokens, positions, work = [], [], 0
        for row in plan.shards[0].rows.tolist():
            whole = arrays["tokens"][ends[row] - lengths[row] : ends[row]].tolist()
            while len(whole) % (2 * cp):
                whole.append(0)
            chunk = len(whole) // (2 * cp)
            for index in (cp_rank, 2 * cp - 1 - cp_rank):
                span = range(index * chunk, (index + 1) * chunk)
                tokens += [whole[place] for place in span]
                positions += list(span)
            work += sum(place + 1 for place in range(len(whole))) // cp
        assert part["tokens"].tolist() == tokens
        assert part["positions"].tolist() == positions
        assert sum(place + 1 for place in positions) == work


@given(layouts, batches, bounds)
@settings(deadline=None)
def test_packed_micro_batches_are_bounded_and_as_many_on_every_rank(
    layout: Parallelism, lengths: list[int], bound: int
) -> None:
    plan = plan_of(layout, lengths, bound)
    needed = 0
    for part, shard in zip(plan.inputs(batch(lengths))[:: layout.cp], plan.shards, strict=True):
        counts = part["micro_batch_rows"].tolist()
        assert len(counts) == plan.micro_batches
        assert sum(counts) == len(shard.rows) == len(part["lengths"])
        local = part["lengths"]
        if layout.cp > 1:
            local = -(-local // (2 * layout.cp)) * 2
        for rows in np.split(local, np.cumsum(counts)[:-1]):
            assert len(rows) <= 1 or rows.sum() <= bound
        needed = max(needed, packed_count(local.tolist(), bound))
    assert plan.micro_batches == needed


@given(st.integers(1, 16), batches, bounds)
def test_backends_that_pad_get_rows_in_order_and_the_fewest_micro_batches_that_fit_all(
    dp: int, lengths: list[int], bound: int
) -> None:
    plan = plan_of(Parallelism(dp=dp), lengths, bound, packs=False)
    assert [shard.rows.tolist() for shard in plan.shards] == balanced(lengths, dp)
    parts = plan.inputs(batch(lengths))
    assert all(set(part) == {"tokens", "lengths", "mask", "advantages"} for part in parts)
    assert all(part["lengths"].dtype == part["tokens"].dtype == np.int32 for part in parts)
    counts = [padded_count(part["lengths"], bound) for part in parts]
    assert plan.micro_batches == max(counts)


def test_context_parts_contain_the_mask_sums_of_whole_rows() -> None:
    lengths = [5, 1, 9]
    arrays = batch(lengths, seed=3)
    rows = np.split(arrays["mask"], np.cumsum(lengths)[:-1])
    plan = plan_of(Parallelism(cp=2), lengths)
    for part in plan.inputs(arrays):
        expected = [float(rows[row][1:].sum()) for row in plan.shards[0].rows]
        assert part["row_mask"].tolist() == expected
        assert part["row_mask"].dtype == np.float32


def test_context_parts_contain_the_summed_log_weights_of_whole_rows() -> None:
    lengths = [5, 1, 9]
    rng = np.random.default_rng(4)
    arrays = batch(lengths, seed=3)
    for name in ("logprobs", "prox_logprobs"):
        arrays[name] = rng.normal(-3, 0.2, sum(lengths)).astype(np.float32)
    plan = plan_of(Parallelism(cp=2), lengths)
    starts = [0, 5, 6]
    for part in plan.inputs(arrays):
        wanted = []
        for row in plan.shards[0].rows:
            tokens = range(starts[row] + 1, starts[row] + lengths[row])
            gaps = [
                float(arrays["prox_logprobs"][t]) - float(arrays["logprobs"][t]) for t in tokens
            ]
            weights = [float(arrays["mask"][t]) for t in tokens]
            wanted.append(sum(m * gap for m, gap in zip(weights, gaps, strict=True)))
        assert np.allclose(part["row_log_weight"], wanted, atol=1e-6)


def test_ranks_without_rows_get_empty_parts() -> None:
    for packs in (False, True):
        plan = plan_of(Parallelism(dp=3), [4], packs=packs)
        sizes = sorted(len(part["tokens"]) for part in plan.inputs(batch([4])))
        assert sizes == [0, 0, 4]
        assert plan.micro_batches == 1
