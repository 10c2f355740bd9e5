"""Sleeps of a paced worker, on a clock that only sleeping moves."""

import pytest

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


def test_a_long_delay_is_not_made_up_for() -> None:
    clock = Clock()
    pacer = clock.pacer()
    since = pacer.now()
    clock.now_s += 60.0
    pacer.rest(since, 1.0)
    for _ in range(10):
        pacer.rest(pacer.now(), 1.0)
    assert sum(clock.sleeps) == pytest.approx(10.0, abs=0.051)


def test_work_that_fails_is_not_paced() -> None:
    clock = Clock()
    with pytest.raises(KeyError), clock.pacer().lasts(1.0):
        raise KeyError
    assert clock.sleeps == []
