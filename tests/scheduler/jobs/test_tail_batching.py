"""The profile of a job follows the rounds of tail batching, whose lengths the rollout coordinator
decides."""

from dataclasses import replace
from random import Random
from statistics import median

import pytest

from plexrl.rollout.policies.tail_batching.rounds import RoundKind
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import TrajectoryId
from plexrl.scheduler.accounting import profiler
from tests.rollout.fleet import Fleet
from tests.rollout.history import settings_from
from tests.scheduler.accounting.test_profiler import BUSY_S, CONFIG, CYCLE, deployment, live

STEP_S = 5.0
"""Seconds of a decode step of the fleet, in which all samples grow by a token."""
SAMPLES = 4


def rounds(batches: int, *, extra_groups: int, extra_samples: int) -> list[tuple[bool, float]]:
    """Whether each round is a long one, and its seconds. The prompts and the lengths of their
    samples are the same ones for all policies; some samples are long."""
    bound = StalenessSettings(
        staleness=0,
        batch_groups=8,
        group_size=SAMPLES,
        extra_groups=extra_groups,
        extra_samples=extra_samples,
    )
    fleet = Fleet(replace(settings_from(Random(1)), staleness=bound, routing="count"))
    random = Random(5)
    for group in range(batches * 8 * 2):
        drawn = [1 + int(random.expovariate(1 / 10)) for _ in range(SAMPLES + 1)]
        for member in range(bound.samples):
            fleet.lengths[TrajectoryId(group * bound.samples + member)] = drawn[member]
    fleet.join(100_000)
    fleet.join(100_000)
    found, steps = list[tuple[bool, float]](), 0
    while len(found) < batches:
        is_long = fleet.core.rounds.kind is RoundKind.LONG
        fleet.round()
        steps += 1
        if len(fleet.trained) > len(found):
            found.append((is_long, steps * STEP_S))
            steps = 0
    return found


def test_the_profile_becomes_that_of_short_rounds_and_long_ones_do_not_change_it() -> None:
    synchronous = rounds(8, extra_groups=0, extra_samples=0)
    tail = rounds(24, extra_groups=2, extra_samples=1)
    assert not any(is_long for is_long, _ in synchronous)
    assert sum(is_long for is_long, _ in tail) >= 3
    one, now = deployment(), 0.0
    runs = [(kind, 0.0, seconds) for kind, seconds in CYCLE]
    for _, seconds in synchronous:
        now = live(one, now, seconds, runs)
        profiler.refresh(one, CONFIG)
    assert one.demand.trace is not None
    before = one.demand.trace
    assert before.period_s == pytest.approx(median(s for _, s in synchronous) + BUSY_S, rel=0.2)
    # The policy changes.
    periods = [before.period_s]
    for _, seconds in tail:
        now = live(one, now, seconds, runs)
        if profiler.refresh(one, CONFIG):
            periods.append(one.demand.trace.period_s)
    assert periods == sorted(periods, reverse=True), "a long round has renewed the profile"
    short_s = median(seconds for is_long, seconds in tail if not is_long)
    assert periods[-1] == pytest.approx(short_s + BUSY_S, rel=0.2)
    assert periods[-1] < 0.8 * before.period_s
    assert one.demand.trace.busy_s == pytest.approx(BUSY_S)
