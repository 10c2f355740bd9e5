"""Properties of the adaptive timeouts of test cases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.rewards.decisions.timeouts import AdaptiveTimeouts, TimeoutSettings

SECONDS = st.floats(0.0, 1e4, allow_nan=False)
RUNS = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), SECONDS), max_size=30)


@given(RUNS, st.floats(1.0, 4.0), st.floats(0.01, 5.0), st.floats(0.0, 60.0))
def test_timeout_follows_the_slowest_correct_run(
    runs: list[tuple[str, float]], factor: float, min_s: float, more_s: float
) -> None:
    settings = TimeoutSettings(factor=factor, min_s=min_s, max_s=min_s + more_s)
    timeouts = AdaptiveTimeouts(settings, {})
    for test, wall_s in runs:
        timeouts.passed(test, wall_s)
    for test in "abc":
        walls = [wall_s for each, wall_s in runs if each == test]
        if not walls:
            assert timeouts.timeout_s(test) == settings.max_s
            continue
        wanted = max(walls) * factor
        expected = sorted((settings.min_s, wanted, settings.max_s))[1]
        assert timeouts.timeout_s(test) == expected


@given(RUNS)
def test_timeout_never_falls_while_a_test_case_has_correct_runs(
    runs: list[tuple[str, float]],
) -> None:
    timeouts = AdaptiveTimeouts(TimeoutSettings(), {})
    before: dict[str, float] = {}
    for test, wall_s in runs:
        grew = timeouts.passed(test, wall_s)
        assert timeouts.timeout_s(test) >= before.get(test, 0.0)
        assert grew or timeouts.timeout_s(test) == before[test]
        before[test] = timeouts.timeout_s(test)


@given(RUNS)
def test_known_times_continue_those_of_an_earlier_controller(
    runs: list[tuple[str, float]],
) -> None:
    whole = AdaptiveTimeouts(TimeoutSettings(), {})
    known = {test: wall_s for test, wall_s in runs if whole.passed(test, wall_s)}
    again = AdaptiveTimeouts(TimeoutSettings(), known)
    assert [again.timeout_s(test) for test in "abc"] == [whole.timeout_s(test) for test in "abc"]


def test_published_settings() -> None:
    timeouts = AdaptiveTimeouts(TimeoutSettings(), {"quick": 0.1, "medium": 8.0, "slow": 25.0})
    names = ("quick", "medium", "slow", "new")
    assert [timeouts.timeout_s(name) for name in names] == [2.0, 12.0, 30.0, 30.0]


@pytest.mark.parametrize(
    "values",
    [{"factor": 0.9}, {"factor": float("nan")}, {"min_s": 0.0}, {"min_s": 31.0}, {"max_s": 1e999}],
)
def test_settings_without_meaning_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match=r"factor|min_s|max_s"):
        TimeoutSettings(**values)
