"""Headlines of several runs: medians, ranges, whole clusters, and when a policy is best."""

from dataclasses import replace

import pytest

from plexrl.cli.simulate.tables import baselines
from plexrl.sim.results.comparison import compare, recovered
from plexrl.sim.results.headline import headlines, sentences
from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.scenario import Scenario
from tests.sim.report.test_report import run_of
from tests.sim.search.test_sweep import BASE

DAY_S = 86_400.0


def runs(
    drains: dict[str, tuple[float, ...]], rollout_gpu_hours: float = 0.0
) -> list[tuple[Scenario, SimResult]]:
    """Days of drain by policy, one for each seed."""
    return [
        (
            replace(BASE, policy=policy, seed=seed),
            replace(run_of(policy, drain_s=days * DAY_S), rollout_gpu_hours=rollout_gpu_hours),
        )
        for policy, all_days in drains.items()
        for seed, days in enumerate(all_days)
    ]


def test_a_headline_is_the_median_and_the_band_over_seeds_and_never_the_best_run() -> None:
    (found,) = headlines(runs({"isolated": (10.0, 10.0, 10.0), "pack": (8.0, 4.0, 5.0)}))
    assert (found.seeds, found.drain.median, found.drain.values) == (3, 0.5, (0.4, 0.5, 0.8))
    assert "pack drains in 50.0 % (40.0 to 80.0) of the time of isolated" in found.text


def test_each_seed_is_compared_with_the_baseline_of_its_own() -> None:
    (found,) = headlines(runs({"isolated": (10.0, 20.0), "pack": (5.0, 10.0)}))
    assert found.drain.values == (0.5, 0.5)


def test_the_baseline_is_the_one_that_backfills_where_it_was_run() -> None:
    (found,) = headlines(runs({"isolated": (10.0,), "isolated+backfill": (8.0,), "pack": (4.0,)}))
    assert (found.baseline, found.drain.values) == ("isolated+backfill", (0.5,))


def test_the_whole_cluster_counts_the_rollout_gpus() -> None:
    # 64 GPUs for 10 and 5 days, and as many GPU-hours of rollouts again in either.
    hours = 64 * 5 * 24.0
    (found,) = headlines(runs({"isolated": (10.0,), "pack": (5.0,)}, rollout_gpu_hours=hours))
    assert found.drain.values == (0.5,)
    assert found.whole.values == pytest.approx((2 / 3,))
    assert "66.7 % of its GPU-hours on the whole cluster" in found.text


def test_nothing_is_said_of_a_whole_cluster_whose_rollout_gpus_are_not_known() -> None:
    (found,) = headlines(runs({"isolated": (10.0,), "pack": (5.0,)}))
    assert "the trace has no rollout GPUs" in found.text
    assert "whole cluster" not in found.text


def test_seeds_that_are_alike_are_said_to_be_and_have_no_band() -> None:
    text, alike = sentences(headlines(runs({"isolated": (10.0, 10.0), "pack": (5.0, 5.0)})))
    assert "pack drains in 50.0 % of the time of isolated" in text
    assert "All seeds are alike" in alike


def test_a_policy_that_takes_longer_is_said_to() -> None:
    (found,) = headlines(runs({"isolated": (10.0,), "pack": (12.5,)}))
    assert "pack drains 25.0 % longer than isolated" in found.text
    assert found.recovered is None


@pytest.mark.parametrize(
    ("pack", "spread", "said_last"),
    [
        ((6.0, 7.0), (4.0, 5.0), "spread drains first in every seed"),
        ((4.5, 7.0), (4.0, 5.0), "bands of the quickest policies overlap: none is called best"),
        ((6.0,), (4.0,), "no policy is called best"),
        ((6.0, 6.0), (4.0, 4.0), "All seeds are alike"),
    ],
)
def test_a_policy_is_called_the_quickest_only_where_bands_are_apart(
    pack: tuple[float, ...], spread: tuple[float, ...], said_last: str
) -> None:
    isolated = tuple(10.0 for _ in pack)
    found = sentences(headlines(runs({"isolated": isolated, "pack": pack, "spread": spread})))
    assert said_last in found[-1]
    assert len(found) == 3


def test_without_a_baseline_there_is_no_headline() -> None:
    assert headlines(runs({"pack": (4.0,), "spread": (5.0,)})) == ()


def test_no_part_of_a_gap_is_told_that_is_too_small_or_missed() -> None:
    isolated = run_of("isolated", drain_s=216_000.0 / 0.96)
    assert recovered(run_of("pack", drain_s=216_000.0), isolated) is None
    far = run_of("isolated", drain_s=432_000.0)
    assert recovered(run_of("pack", drain_s=500_000.0), far) is None
    assert recovered(run_of("pack", drain_s=324_000.0), far) == pytest.approx(0.5)


def test_tables_bars_and_sentences_have_one_baseline() -> None:
    """`isolated+backfill` where it was run, `isolated` otherwise."""
    results = [
        run_of("isolated", drain_s=800_000.0),
        run_of("isolated+backfill", drain_s=600_000.0),
        run_of("pack", drain_s=480_000.0),
    ]
    pairs = [(replace(BASE, policy=each.policy), each) for each in results]
    (line,) = headlines(pairs)
    assert [run.ratio for run in compare(results)] == pytest.approx([8 / 6, 1.0, 0.8])
    assert {run.baseline for run in compare(results)} == {line.baseline} == {"isolated+backfill"}
    assert line.drain.values == (compare(results)[2].ratio,)
    (alone,) = baselines(pairs).values()
    assert alone is results[1]
    (alone,) = baselines([pairs[0], pairs[2]]).values()
    assert alone is results[0]
    assert compare([results[0], results[2]])[1].ratio == pytest.approx(0.6)
