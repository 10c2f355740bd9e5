"""Both rules of backfilling start jobs when a slow search second by second does."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from plexrl.sim.engine.unshared.backfilling import RigidJob, conservative, easy

GPUS = 8


@st.composite
def traces(draw: st.DrawFn) -> list[RigidJob]:
    """In order of submission, with whole seconds."""
    rows = st.tuples(st.integers(0, 12), st.integers(1, GPUS), st.integers(1, 9))
    submitted, found = 0, []
    for gap_s, gpus, duration_s in draw(st.lists(rows, max_size=12)):
        submitted += gap_s if draw(st.booleans()) else 0
        found.append(RigidJob(float(submitted), gpus, float(duration_s)))
    return found


def used(jobs: Sequence[RigidJob], starts: dict[int, int], second: int) -> int:
    """GPUs in use."""
    return sum(
        jobs[index].gpus
        for index, at in starts.items()
        if at <= second < at + jobs[index].duration_s
    )


def fits(jobs: Sequence[RigidJob], starts: dict[int, int], index: int, at: int) -> bool:
    """Whether a job could run from `at` on, beside the others."""
    seconds = range(at, at + int(jobs[index].duration_s))
    return all(used(jobs, starts, each) + jobs[index].gpus <= GPUS for each in seconds)


def earliest(jobs: Sequence[RigidJob], starts: dict[int, int], index: int, since: int) -> int:
    while not fits(jobs, starts, index, since):
        since += 1
    return since


def slow_conservative(jobs: Sequence[RigidJob]) -> list[float]:
    starts: dict[int, int] = {}
    for index, job in enumerate(jobs):
        starts[index] = earliest(jobs, starts, index, int(job.submit_s))
    return [float(starts[index]) for index in range(len(jobs))]


def slow_easy(jobs: Sequence[RigidJob]) -> list[float]:
    """The first that waits keeps its place among those that run; others start if it still can."""
    starts: dict[int, int] = {}
    second = 0
    while len(starts) < len(jobs):
        waiting = [
            index
            for index, job in enumerate(jobs)
            if index not in starts and job.submit_s <= second
        ]
        while waiting and fits(jobs, starts, waiting[0], second):
            starts[waiting.pop(0)] = second
        if waiting:
            head, *others = waiting
            reserved = earliest(jobs, starts, head, second)
            for index in others:
                tried = {**starts, index: second}
                if fits(jobs, starts, index, second) and fits(jobs, tried, head, reserved):
                    starts = tried
        second += 1
    return [float(starts[index]) for index in range(len(jobs))]


@given(traces())
def test_conservative_gives_each_job_the_earliest_place_beside_earlier_ones(
    jobs: list[RigidJob],
) -> None:
    assert conservative(jobs, GPUS) == slow_conservative(jobs)


@given(traces())
def test_easy_delays_only_jobs_behind_the_first_that_waits(jobs: list[RigidJob]) -> None:
    assert easy(jobs, GPUS) == slow_easy(jobs)


def test_a_short_job_passes_and_a_long_one_does_not() -> None:
    jobs = [RigidJob(0.0, 6, 10.0), RigidJob(0.0, 8, 5.0), RigidJob(0.0, 2, 20.0)]
    assert easy(jobs, GPUS) == [0.0, 10.0, 15.0]
    short = [*jobs[:2], RigidJob(0.0, 2, 10.0)]
    assert easy(short, GPUS) == conservative(short, GPUS) == [0.0, 10.0, 0.0]
