"""Prompts and the lengths of their responses."""

from pathlib import Path
from statistics import correlation, fmean, pstdev

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.sim.rollout.workload import LONG_TOKENS, Prompts, RolloutWorkload
from plexrl.traces.bundled import bundled
from plexrl.traces.formats import read_histogram


def lengths(workload: RolloutWorkload, prompts: int = 400) -> list[list[int]]:
    drawn = Prompts(workload)
    return [[each.response_tokens for each in drawn.group(at)] for at in range(prompts)]


def test_a_prompt_has_the_same_responses_in_any_order() -> None:
    one, other = Prompts(RolloutWorkload()), Prompts(RolloutWorkload())
    assert [each.response_tokens for each in one.group(7)] == [
        each.response_tokens for each in (other.group(9), other.group(7))[1]
    ]


def test_numbers_follow_from_prompt_and_response() -> None:
    group = Prompts(RolloutWorkload(group_size=4)).group(3)
    assert [each.number for each in group] == [12, 13, 14, 15]
    assert {each.group for each in group} == {3}


def test_lengths_are_scaled_then_cut_at_the_limit() -> None:
    plain = lengths(RolloutWorkload(scale=1.0, limit=100_000))
    scaled = lengths(RolloutWorkload(scale=2.0, limit=20_000))
    wanted = [[min(20_000, 2 * length) for length in group] for group in plain]
    assert scaled == wanted


def test_long_responses_are_those_beyond_the_first_mode() -> None:
    long = [length for group in lengths(RolloutWorkload(scale=1.0)) for length in group]
    every = [
        length for group in lengths(RolloutWorkload(lengths="r1", scale=1.0)) for length in group
    ]
    assert min(long) >= LONG_TOKENS
    bins = read_histogram(bundled("r1-lengths")).bins
    wanted = sum(part for low, _, part in bins if low >= LONG_TOKENS)
    found = sum(length >= LONG_TOKENS for length in every) / len(every)
    assert found == pytest.approx(wanted, abs=0.02)


@pytest.mark.parametrize(("wanted", "low", "high"), [(0.0, -0.1, 0.1), (0.9, 0.8, 0.97)])
def test_responses_to_one_prompt_are_correlated(wanted: float, low: float, high: float) -> None:
    groups = lengths(RolloutWorkload(correlation=wanted))
    assert low < correlation([each[0] for each in groups], [each[1] for each in groups]) < high


def test_correlation_leaves_the_distribution_as_it_is() -> None:
    free, bound = (
        [length for group in lengths(RolloutWorkload(correlation=part), 3000) for length in group]
        for part in (0.0, 0.8)
    )
    assert fmean(bound) == pytest.approx(fmean(free), rel=0.05)
    assert pstdev(bound) == pytest.approx(pstdev(free), rel=0.05)


def test_groups_of_a_trace_stay_together(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    rows = [f"p{prompt},{prompt * 1000 + at}" for prompt in (1, 2, 3) for at in range(5)]
    path.write_text("\n".join(["group,output_tokens", *rows]) + "\n")
    groups = lengths(RolloutWorkload(lengths=str(path), scale=1.0, limit=9999), prompts=60)
    assert {length // 1000 for group in groups for length in group} == {1, 2, 3}
    for group in groups:
        assert len({length // 1000 for length in group}) == 1


def test_a_trace_without_groups_has_the_given_correlation(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("\n".join(["output_tokens", *map(str, range(100, 1100))]) + "\n")
    groups = lengths(RolloutWorkload(lengths=str(path), scale=1.0, correlation=0.9))
    assert 0.8 < correlation([each[0] for each in groups], [each[1] for each in groups]) < 0.97
    assert fmean(length for group in groups for length in group) == pytest.approx(600, rel=0.1)


def test_a_trace_of_jobs_has_no_lengths() -> None:
    with pytest.raises(InvalidRequestError, match="contains jobs, not response lengths"):
        Prompts(RolloutWorkload(lengths="bundled:philly"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 0}, "limit is 0"),
        ({"group_size": 0}, "group_size is 0"),
        ({"correlation": 1.5}, r"correlation is 1\.5"),
        ({"scale": 0.0}, r"scale is 0\.0"),
        ({"scale": float("nan")}, "scale is nan"),
    ],
)
def test_impossible_workloads_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        RolloutWorkload(**changes)  # type: ignore[arg-type]
