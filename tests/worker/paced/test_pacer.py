"""Sleeps of a paced worker, on a clock that only sleeping moves."""

import pytest

from plexrl.worker.training.paced.pacer import LATE_S_MAX
from tests.worker.paced.clock import Clock


def test_work_lasts_its_modelled_time_at_the_scale() -> None:
    clock = Clock()
    with clock.pacer(0.01).lasts(100.0):
        clock.now_s += 0.25
    assert clock.sleeps == [0.75]


def test_work_that_took_longer_is_not_followed_by_a_sleep() -> None:
    clock = Clock()
    with clock.pacer().lasts(1.0):
        clock.now_s += 3.0
    assert clock.sleeps == []


def test_sleeps_that_end_late_do_not_add_up() -> None:
    clock = Clock(late_s=0.001)
    pacer = clock.pacer()
    for _ in range(100):
        pacer.rest(pacer.now(), 0.01)
    assert clock.now_s == pytest.approx(1.0, abs=0.0011)


@pytest.mark.parametrize("work_s", [1.04, 60.0])
def test_work_that_took_longer_is_not_made_up_for(work_s: float) -> None:
    clock = Clock()
    pacer = clock.pacer()
    with pacer.lasts(1.0):
        clock.now_s += work_s
    with pacer.lasts(0.5):
        pass
    assert clock.sleeps == [0.5]


def test_a_sleep_that_ends_very_late_is_not_made_up_for() -> None:
    clock = Clock(late_s=60.0)
    pacer = clock.pacer()
    for _ in range(3):
        pacer.rest(pacer.now(), 1.0)
    assert sum(clock.sleeps) == pytest.approx(3.0 - 2 * LATE_S_MAX)


def test_lateness_is_kept_until_there_is_a_sleep_to_make_up_for_it() -> None:
    clock = Clock(late_s=0.01)
    pacer = clock.pacer()
    for modelled_s in (1.0, 0.004, 0.004, 1.0):
        pacer.rest(pacer.now(), modelled_s)
    assert clock.sleeps == pytest.approx([1.0, 0.998])


def test_a_rest_returns_what_really_passed() -> None:
    clock = Clock(late_s=0.001)
    pacer = clock.pacer()
    since = pacer.now()
    clock.now_s += 3.0
    assert pacer.rest(since, 1.0) == 3.0
    assert pacer.rest(pacer.now(), 1.0) == pytest.approx(1.001)
    assert pacer.rest(pacer.now(), 1.0) == pytest.approx(1.0)


def test_work_that_fails_is_not_paced() -> None:
    clock = Clock()
    with pytest.raises(KeyError), clock.pacer().lasts(1.0):
        raise KeyError
    assert clock.sleeps == []
