"""Start times of jobs that hold their GPUs from start to end, as batch systems choose them. Pure.

Both rules know how long each job takes, and count GPUs without regard to nodes, so that no cluster
without sharing that keeps the order of the queue does better by knowing more.

* EASY (Lifka, 1995): jobs start in their order. The first one that does not fit has a reservation
  at the earliest time at which enough GPUs will be free; later ones may start if they do not
  delay it.
* Conservative (Mu'alem and Feitelson, 2001): each job has a reservation at the earliest time at
  which it fits beside all reservations of earlier jobs.
"""

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple


class RigidJob(NamedTuple):
    """A job that holds its GPUs from start to end."""

    submit_s: float
    gpus: int
    duration_s: float


Rule = Callable[[Sequence[RigidJob], int], list[float]]
"""Start times of jobs, in order of submission, on so many GPUs. No job may need more."""


def easy(jobs: Sequence[RigidJob], gpus: int) -> list[float]:
    """EASY backfilling. At each event it takes time linear in the queue."""
    starts = [0.0] * len(jobs)
    ends: list[tuple[float, int]] = []
    queue: deque[int] = deque()
    free, following, now = gpus, 0, 0.0
    while following < len(jobs) or queue:
        arrival = jobs[following].submit_s if following < len(jobs) else float("inf")
        now = min(arrival, ends[0][0]) if ends else arrival
        while ends and ends[0][0] <= now:
            free += jobs[heapq.heappop(ends)[1]].gpus
        while following < len(jobs) and jobs[following].submit_s <= now:
            queue.append(following)
            following += 1
        for index in _startable(jobs, queue, free, ends, now):
            starts[index] = now
            free -= jobs[index].gpus
            heapq.heappush(ends, (now + jobs[index].duration_s, index))
    return starts


def _startable(
    jobs: Sequence[RigidJob],
    queue: deque[int],
    free: int,
    ends: Sequence[tuple[float, int]],
    now: float,
) -> list[int]:
    """Remove from the queue and return the jobs that start now."""
    found: list[int] = []
    while queue and jobs[queue[0]].gpus <= free:
        found.append(queue.popleft())
        free -= jobs[found[-1]].gpus
    if not queue or not free:
        return found
    reserved_at, spare = _reservation(
        jobs[queue[0]].gpus,
        free,
        sorted(
            [(end_s, jobs[index].gpus) for end_s, index in ends]
            + [(now + jobs[index].duration_s, jobs[index].gpus) for index in found]
        ),
    )
    kept: list[int] = []
    for index in queue:
        job = jobs[index]
        ends_before = now + job.duration_s <= reserved_at
        if not kept or job.gpus > free or not (ends_before or job.gpus <= spare):
            kept.append(index)
            continue
        found.append(index)
        free -= job.gpus
        if not ends_before:
            spare -= job.gpus
    queue.clear()
    queue.extend(kept)
    return found


def _reservation(wanted: int, free: int, ends: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """The time at which `wanted` GPUs will be free, and the GPUs that are then free beyond it."""
    for place, (end_s, gpus) in enumerate(ends):
        free += gpus
        is_last = place + 1 == len(ends) or ends[place + 1][0] > end_s
        if free >= wanted and is_last:
            return end_s, free - wanted
    raise AssertionError(f"a job needs {wanted} GPUs, more than there are")


def conservative(jobs: Sequence[RigidJob], gpus: int) -> list[float]:
    """Conservative backfilling. For each job it takes time linear in the reservations."""
    times, free = [0.0], [gpus]
    starts: list[float] = []
    for job in jobs:
        at = _earliest(times, free, job)
        start_s = max(times[at], job.submit_s)
        starts.append(start_s)
        _subtract(times, free, start_s, start_s + job.duration_s, job.gpus)
        # No later job starts before this one was submitted.
        past = bisect_right(times, job.submit_s) - 1
        del times[:past], free[:past]
    return starts


def _earliest(times: Sequence[float], free: Sequence[int], job: RigidJob) -> int:
    """Index of the interval in which the job starts; it fits there and until its end."""
    at = bisect_right(times, job.submit_s) - 1
    through = at
    while True:
        if free[through] < job.gpus:
            at = through = through + 1
            continue
        through += 1
        start_s = max(times[at], job.submit_s)
        if through == len(times) or times[through] >= start_s + job.duration_s:
            return at


def _subtract(times: list[float], free: list[int], start_s: float, end_s: float, gpus: int) -> None:
    first, last = _cut(times, free, start_s), _cut(times, free, end_s)
    for place in range(first, last):
        free[place] -= gpus


def _cut(times: list[float], free: list[int], time_s: float) -> int:
    """Begin an interval at this time, if none does; returns its index."""
    at = bisect_right(times, time_s) - 1
    if times[at] == time_s:
        return at
    times.insert(at + 1, time_s)
    free.insert(at + 1, free[at])
    return at + 1
