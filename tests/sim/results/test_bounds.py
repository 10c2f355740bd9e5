"""The bounds match their formulas, and no feasible schedule is faster."""

from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.sim.results.bounds import FIRST_WIDTH_S, RELEASES_MAX, DrainBound
from tests.examples import examples


@dataclass(frozen=True, slots=True)
class Job:
    release: float
    gpus: int
    busy: float
    """Seconds of its training."""
    alone: float
    """At least `busy`: the rest is rollout."""
    node_type: str = ""

    @property
    def work(self) -> float:
        return self.gpus * self.busy


JOBS = st.lists(
    st.builds(
        lambda release, gpus, busy, rest, node_type: Job(
            release, gpus, busy, busy + rest, node_type
        ),
        st.floats(0, 100),
        st.integers(1, 4),
        st.floats(0, 50),
        st.floats(0, 50),
        st.sampled_from(["", "old", "new"]),
    ),
    min_size=1,
    max_size=12,
)
GPUS = {"old": 5, "new": 3}


def bound_of(jobs: list[Job], gpus: dict[str, int]) -> DrainBound:
    bound = DrainBound(gpus)
    for job in jobs:
        bound.add(job.release, job.alone, job.work, job.node_type)
    return bound


def area(jobs: list[Job], gpus: int) -> float:
    """By the formula, at every release."""
    return max(
        (t + sum(job.work for job in jobs if job.release >= t) / gpus)
        for t in [job.release for job in jobs]
    )


@given(jobs=JOBS)
def test_both_bounds_are_what_the_formulas_say_for_each_type_of_nodes(jobs: list[Job]) -> None:
    areas = [area(jobs, sum(GPUS.values()))]
    for name, gpus in GPUS.items():
        typed = [job for job in jobs if job.node_type == name]
        areas += [area(typed, gpus)] if typed else []
    found = bound_of(jobs, GPUS).bounds()
    assert found.critical_path_s == max(job.release + job.alone for job in jobs)
    # Releases within one bin may be counted by the earliest of them.
    assert max(areas) - FIRST_WIDTH_S <= found.area_s <= max(areas) + 1e-9


@given(jobs=JOBS, data=st.data())
def test_the_order_of_telling_is_of_no_account(jobs: list[Job], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(jobs))
    ours, theirs = bound_of(jobs, GPUS).bounds(), bound_of(shuffled, GPUS).bounds()
    assert ours.critical_path_s == theirs.critical_path_s
    assert ours.area_s == pytest.approx(theirs.area_s, rel=1e-12)


def test_in_constant_memory_the_area_is_hardly_lower_and_never_higher() -> None:
    jobs = [Job(number * 3.7, 8, 50.0 + number % 97, 200.0) for number in range(3 * RELEASES_MAX)]
    # A quiet stretch, then another load: the best t lies in the middle of the trace.
    jobs = [job for job in jobs if not 20_000 < job.release < 30_000]
    last = max(job.release for job in jobs)
    for gpus in (64, 200, 280, 1000):
        bound = bound_of(jobs, {"": gpus})
        exact = left = 0.0
        for job in reversed(jobs):
            left += job.work
            exact = max(exact, job.release + left / gpus)
        assert exact - 2 * last / RELEASES_MAX <= bound.bounds().area_s <= exact + 1e-6
        assert len(bound._all._bins) <= RELEASES_MAX


@st.composite
def small_instances(draw: st.DrawFn) -> tuple[list[tuple[int, int, int, int]], int]:
    """(release, gpus, busy, rollout) in whole time steps, and the cluster's GPUs."""
    gpus = draw(st.integers(1, 3))
    job = st.tuples(st.integers(0, 4), st.integers(1, gpus), st.integers(1, 3), st.integers(0, 2))
    return draw(st.lists(job, min_size=1, max_size=4)), gpus


def best_drain(jobs: list[tuple[int, int, int, int]], gpus: int) -> int:
    """Of all schedules that may interrupt any job at any step: each job rolls out first (on GPUs
    outside), then trains on its GPUs at once."""
    now = 0
    states = {tuple((rollout, busy) for _, _, busy, rollout in jobs)}
    while True:
        if any(all(left == (0, 0) for left in state) for state in states):
            return now
        following = set()
        for state in states:
            ready = [
                number
                for number, (rollout, busy) in enumerate(state)
                if rollout == 0 and busy and jobs[number][0] <= now
            ]
            for count in range(len(ready) + 1):
                for chosen in combinations(ready, count):
                    if sum(jobs[number][1] for number in chosen) <= gpus:
                        following.add(_step(jobs, state, chosen, now))
        states = following
        now += 1


def _step(
    jobs: list[tuple[int, int, int, int]],
    state: tuple[tuple[int, int], ...],
    chosen: tuple[int, ...],
    now: int,
) -> tuple[tuple[int, int], ...]:
    return tuple(
        (rollout - 1, busy)
        if rollout and jobs[number][0] <= now
        else (rollout, busy - (number in chosen))
        for number, (rollout, busy) in enumerate(state)
    )


@given(instance=small_instances())
@settings(max_examples=examples(60), deadline=None)
def test_no_schedule_is_done_before_the_bound(
    instance: tuple[list[tuple[int, int, int, int]], int],
) -> None:
    raw, gpus = instance
    jobs = [Job(release, wide, busy, rollout + busy) for release, wide, busy, rollout in raw]
    found = bound_of(jobs, {"": gpus}).bounds()
    assert found.bound_s <= best_drain(raw, gpus) + 1e-9


def test_a_job_alone_and_a_full_backlog_meet_their_bounds() -> None:
    alone = [(1, 2, 3, 2)]
    assert best_drain(alone, 2) == 6
    assert bound_of([Job(1, 2, 3, 5)], {"": 2}).bounds().bound_s == 6
    backlog = [(0, 1, 3, 0)] * 4
    assert best_drain(backlog, 2) == 6
    assert bound_of([Job(0, 1, 3, 3)] * 4, {"": 2}).bounds().bound_s == 6
