"""The quote of a job: figures of the job as asked, and of two other ways to submit it.

Each way is simulated beside the same futures without the job, seed by seed, so that a difference is
the job's own effect. Estimates are medians over the seeds. Intervals come from the errors of the
tenant's earlier quotes; without enough of them they are wide guesses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from plexrl.errors import CapacityError, OverloadedError
from plexrl.scheduler.jobs.quoted_jobs import scale_of
from plexrl.scheduler.queries.overview.planned_jobs import ClusterPlan
from plexrl.scheduler.state.demand.wait_intervals import OUTSIDE, adapted_interval
from plexrl.sim.search.quote.planned_scenario import future_of
from plexrl.sim.search.quote.simulated_future import FutureEnds, delays, simulate_future
from plexrl.sim.search.quote.ways import Way, other_ways
from plexrl.wire.messages.overview_views import (
    DelayedJobView,
    DelayedOthersView,
    QuoteFiguresView,
    QuoteView,
)

SEEDS = 5
"""Futures of the job as asked."""
OTHER_SEEDS = 2
"""Futures of each other way."""
ALTERNATIVES = 2
DELAYED_MAX = 20
"""Delayed jobs that are named."""
DELAY_S_MIN = 1.0
DELAY_PART_MIN = 0.001
"""Smaller delays, in seconds and as a part of what is left, come from moves of state."""

SAME_PART = 0.01
"""Ways whose times differ by less than this part are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """One way in several futures, beside the same futures without the job."""

    way: Way
    found: tuple[FutureEnds, ...]
    delay_s: dict[str, float]
    """Median delay of each live job, by its name in the simulation."""


def quote(plan: ClusterPlan, *, price: float | None, seeds: int = SEEDS) -> QuoteView:
    """The quote of the plan's asked job. `price`: of a GPU-hour; None: unknown.

    Raises:
        CapacityError: the cluster cannot hold the job.
        OverloadedError: the cluster has more work than a quote simulates.
    """
    base = [
        simulate_future(future_of(plan, (), seed), plan, has_asked=False) for seed in range(seeds)
    ]
    asked = _outcome(plan, Way(way="as asked", job=plan.asked), base)
    others = _others(plan, asked, base[:OTHER_SEEDS])
    return {
        "asked": _figures(plan, asked, base, price),
        "alternatives": [_figures(plan, other, base, price) for other in others],
        "knowledge": plan.asked.knowledge,
        "errors": len(plan.end_errors),
        "live_jobs": len(plan.jobs),
        "runs": len(base) + len(asked.found) + sum(len(other.found) for other in others),
        "is_cut": any(each.is_cut for each in asked.found),
    }


def estimate(plan: ClusterPlan, *, seeds: int = SEEDS) -> tuple[FutureEnds, ...]:
    """The futures of the asked job alone, one for each seed; raises as `quote`."""
    futures = [future_of(plan, (plan.asked,), seed) for seed in range(seeds)]
    return tuple(simulate_future(each, plan, has_asked=True, only_asked=True) for each in futures)


def _simulate(plan: ClusterPlan, way: Way, seed: int) -> FutureEnds:
    future = future_of(plan, (way.job,), seed, later_s=way.later_s)
    return simulate_future(future, plan, has_asked=True)


def _outcome(plan: ClusterPlan, way: Way, base: Sequence[FutureEnds]) -> _Outcome:
    found = tuple(_simulate(plan, way, seed) for seed in range(len(base)))
    by_job: dict[str, list[float]] = {}
    for without, with_it in zip(base, found, strict=True):
        for name, delay_s in delays(without.ends_s, with_it.ends_s).items():
            by_job.setdefault(name, []).append(delay_s)
    return _Outcome(
        way=way, found=found, delay_s={name: median(each) for name, each in by_job.items()}
    )


def _others(plan: ClusterPlan, asked: _Outcome, base: Sequence[FutureEnds]) -> list[_Outcome]:
    """The two best other ways: the one that ends first, and the one that harms others least."""
    found = []
    for way in other_ways(plan, base):
        try:
            found.append(_outcome(plan, way, base))
        except (CapacityError, OverloadedError):
            # This way is not open; another one may be.
            continue
    # Those that change nothing go last.
    same = {each.way.way: _is_same(each, asked) for each in found}
    soonest = sorted(found, key=lambda each: (same[each.way.way], _end_s(each)))[:1]
    left = [each for each in found if each not in soonest]
    kindest = sorted(left, key=lambda each: (same[each.way.way], _harm_s(each), _hours(each)))
    return [*soonest, *kindest[: ALTERNATIVES - 1]]


def _is_same(other: _Outcome, asked: _Outcome) -> bool:
    """Whether neither the job nor others gain or lose by the other way."""
    before = [getattr(each, name) for each in asked.found[:1] for name in ("start_s", "end_s")]
    after = [getattr(each, name) for each in other.found[:1] for name in ("start_s", "end_s")]
    scale_s = max(before[1], DELAY_S_MIN)
    differs = any(abs(a - b) > SAME_PART * scale_s for a, b in zip(before, after, strict=True))
    return not differs and abs(_harm_s(other) - _harm_s(asked)) <= SAME_PART * scale_s


def _end_s(outcome: _Outcome) -> float:
    return median(each.end_s for each in outcome.found)


def _harm_s(outcome: _Outcome) -> float:
    return sum(max(0.0, delay_s) for delay_s in outcome.delay_s.values())


def _hours(outcome: _Outcome) -> float:
    return median(each.gpu_hours for each in outcome.found)


def _figures(
    plan: ClusterPlan, outcome: _Outcome, base: Sequence[FutureEnds], price: float | None
) -> QuoteFiguresView:
    job, found = outcome.way.job, outcome.found
    start_s = median(each.start_s for each in found)
    end_s = median(each.end_s for each in found)
    alone_s = median(each.alone_s for each in found)
    start_low_s, start_high_s = interval_of(plan.start_errors, start_s, end_s)
    end_low_s, end_high_s = interval_of(plan.end_errors, end_s, end_s, plan.end_outside)
    hours = _hours(outcome)
    delayed, others = _delayed(plan, outcome, base)
    return {
        "way": outcome.way.way,
        "start_s": start_s,
        "start_low_s": start_low_s,
        "start_high_s": start_high_s,
        "end_s": end_s,
        "end_low_s": end_low_s,
        "end_high_s": end_high_s,
        "gpus": job.gpus + job.rollout_gpus,
        "gpu_hours": hours,
        "cost": None if price is None else price * hours,
        "slowdown": max(0.0, (end_s - start_s) / alone_s - 1.0) if alone_s > 0.0 else 0.0,
        "delayed": delayed,
        "others": others,
    }


def interval_of(
    errors: Sequence[float], estimated_s: float, end_s: float, outside: float = OUTSIDE
) -> tuple[float, float]:
    """80 % interval of an estimate, from relative `errors` of earlier quotes; `end_s`: the
    estimated end, which errors are relative to; `outside`: the part of the errors to leave out."""
    seconds = [error * scale_of(end_s) for error in errors]
    return adapted_interval(seconds, estimated_s, outside)


def _delayed(
    plan: ClusterPlan, outcome: _Outcome, base: Sequence[FutureEnds]
) -> tuple[list[DelayedJobView], DelayedOthersView]:
    """Own jobs that are delayed, by name, and those of other tenants as a sum."""
    own: list[DelayedJobView] = []
    others: DelayedOthersView = {"jobs": 0, "delay_s": 0.0}
    for name, delay_s in outcome.delay_s.items():
        left_s = median(each.ends_s[name] for each in base if name in each.ends_s)
        if delay_s < max(DELAY_S_MIN, DELAY_PART_MIN * left_s):
            continue
        job = plan.jobs[int(name)]
        if job.tenant != plan.asked.tenant:
            others["jobs"] += 1
            others["delay_s"] += delay_s
            continue
        slowdown = delay_s / max(left_s, 1.0)
        own.append({"job": job.job, "name": job.name, "delay_s": delay_s, "slowdown": slowdown})
    own.sort(key=lambda each: (-each["delay_s"], each["job"]))
    return own[:DELAYED_MAX], others
