"""A rollout instance: continuous batching in a bounded KV cache, on a virtual clock.

Decode steps are not simulated one by one: between two events (the shortest trajectory ends, the
cache is full, work arrives) all steps have the same batch, and their times have a closed form.

Invariants (`check_invariants`):
* cached tokens are the sum of the running trajectories' lengths, and fit the cache;
* a trajectory runs or waits, never both;
* the clock `at_s` is the end of the last step, prefill or pull, and never goes back.
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterable

from plexrl.errors import InvariantError
from plexrl.latency.costs import EngineCosts
from plexrl.sim.rollout.engine.trajectory import SimulatedSegment, SimulatedTrajectory


class _Run:
    """A trajectory in the batch."""

    __slots__ = ("base", "offset", "start_s", "trajectory")

    def __init__(self, trajectory: SimulatedTrajectory, base: int, start_s: float) -> None:
        self.trajectory = trajectory
        self.base = base
        """The instance's number of steps minus the tokens of the trajectory, at its admission."""
        self.offset = trajectory.prompt_tokens - base
        """The length minus the number of steps, constant."""
        self.start_s = start_s


class Instance:
    """The engine of one instance."""

    def __init__(self, number: int, costs: EngineCosts, *, version: int = 0) -> None:
        self.number = number
        self.costs = costs
        self.version = version
        self.at_s = 0.0
        self.stopped_s = 0.0
        """End of the step in which the last command took effect."""
        self.completed = 0
        """Trajectories that ended since the last pull."""
        self.steps = 0
        self.kv = 0
        """Cached tokens of the batch."""
        self.waiting: deque[SimulatedTrajectory] = deque()
        self.finished: list[SimulatedTrajectory] = []
        """Completed and not yet collected, with `finished_s`."""
        self.decode_s = 0.0
        self.prefill_s = 0.0
        self.pull_s = 0.0
        self.preemptions = 0
        self.tokens = 0
        """Tokens generated so far."""
        self._running: dict[int, _Run] = {}
        self._ends: list[tuple[int, int]] = []
        """Heap of (number of steps at the end, trajectory); stale entries are skipped."""

    @property
    def running_count(self) -> int:
        """Size of the batch."""
        return len(self._running)

    def running(self) -> list[SimulatedTrajectory]:
        """Trajectories of the batch in the order of admission, with current lengths."""
        for run in self._running.values():
            run.trajectory.done_tokens = self.steps - run.base
        return [run.trajectory for run in self._running.values()]

    def batch(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers and lengths of the trajectories of the batch, in the order of admission."""
        steps = self.steps
        lengths = tuple([steps + run.offset for run in self._running.values()])
        return tuple(self._running), lengths

    def next_event_s(self) -> float | None:
        """The next time at which the batch changes by itself; None if it is empty."""
        if not self._running:
            return None
        steps = self._steps_to_event()
        return self.at_s + self.costs.steps_s(steps, len(self._running), self.kv)

    def advance(self, now: float) -> None:
        """Decode all steps that end at `now` or before; later waiting work is admitted."""
        while self._running and self.at_s < now:
            count = len(self._running)
            most = self._steps_to_event()
            lasting_s = self.costs.steps_s(most, count, self.kv)
            if self.at_s + lasting_s > now:
                steps = min(most - 1, self.costs.steps_within(now - self.at_s, count, self.kv))
                self._decode(steps)
                return
            self._decode(most)
            self._after_event()

    def route(self, trajectories: Iterable[SimulatedTrajectory], now: float) -> None:
        """Append trajectories to the waiting queue; they start at the end of the current step."""
        self._finish_step(now)
        self.waiting.extend(trajectories)
        self._admit()

    def interrupt(self, numbers: Collection[int], now: float) -> list[SimulatedTrajectory]:
        """Remove those of the trajectories that are still here, at the end of the current step."""
        self._finish_step(now)
        removed = []
        for number in numbers:
            run = self._running.pop(number, None)
            if run is not None:
                removed.append(self._stop(run))
        wanted = set(numbers)
        removed += [each for each in self.waiting if each.number in wanted]
        self.waiting = deque(each for each in self.waiting if each.number not in wanted)
        self._admit()
        return removed

    def interrupt_all(self, now: float) -> list[SimulatedTrajectory]:
        """Remove all trajectories at the end of the current step."""
        self._finish_step(now)
        removed = [self._stop(run) for run in self._running.values()]
        for each in removed:
            each.holds_kv = True
        for each in self.waiting:
            each.holds_kv = False
        self._running.clear()
        self._ends.clear()
        removed += self.waiting
        self.waiting.clear()
        return removed

    def resume(self, trajectories: Iterable[SimulatedTrajectory], at_s: float) -> None:
        """Go on at `at_s` with trajectories whose KV cache has been moved here; the instance must
        be empty. What does not fit is preempted."""
        if self._running or self.waiting:
            raise InvariantError(f"instance {self.number} resumes trajectories beside others")
        self.at_s = max(self.at_s, at_s)
        for trajectory in trajectories:
            self._run(trajectory)
            self.kv += trajectory.length
        self._preempt()

    def pull(self, version: int, now: float, pull_s: float | None = None) -> float:
        """Load `version`, which takes `pull_s`, by default that of the costs; the instance must be
        empty. Returns the end."""
        if self._running or self.waiting:
            raise InvariantError(f"instance {self.number} pulls parameters with work in progress")
        lasting_s = self.costs.pull_s if pull_s is None else pull_s
        self.at_s = max(self.at_s, now) + lasting_s
        self.pull_s += lasting_s
        self.version = version
        self.completed = 0
        return self.at_s

    def check_invariants(self) -> None:
        """Raises:
        InvariantError: an invariant of this module is broken.
        """
        lengths = sum(each.length for each in self.running())
        waiting = {each.number for each in self.waiting}
        for holds, what in (
            (lengths == self.kv, f"{self.kv} cached tokens instead of {lengths}"),
            (self.kv <= self.costs.kv_tokens, f"{self.kv} tokens in {self.costs.kv_tokens}"),
            (not waiting & self._running.keys(), "a trajectory that runs and waits"),
            (len(waiting) == len(self.waiting), "a trajectory that waits twice"),
        ):
            if not holds:
                raise InvariantError(f"instance {self.number} at {self.at_s:.3f} s has {what}")

    def _steps_to_event(self) -> int:
        """Steps until the first trajectory ends or the cache has no token for each."""
        while self._ends:
            end, number = self._ends[0]
            run = self._running.get(number)
            if run is not None and run.base + run.trajectory.response_tokens == end:
                break
            heapq.heappop(self._ends)
        until_end = self._ends[0][0] - self.steps
        until_full = (self.costs.kv_tokens - self.kv) // len(self._running)
        return max(1, min(until_end, until_full))

    def _decode(self, steps: int) -> None:
        if steps:
            count = len(self._running)
            lasting_s = self.costs.steps_s(steps, count, self.kv)
            self.at_s += lasting_s
            self.decode_s += lasting_s
            self.steps += steps
            self.tokens += steps * count
            self.kv += steps * count

    def _after_event(self) -> None:
        """Take out what ended; free memory for the next step; admit what fits now."""
        ended = False
        while self._ends and self._ends[0][0] <= self.steps:
            end, number = heapq.heappop(self._ends)
            run = self._running.get(number)
            if run is not None and run.base + run.trajectory.response_tokens == end:
                del self._running[number]
                self._stop(run).finished_s = self.at_s
                self.finished.append(run.trajectory)
                self.completed += 1
                ended = True
        if ended:
            self._admit()
        self._preempt()

    def _preempt(self) -> None:
        """Move the youngest of the batch to the head of the queue until a step fits."""
        while len(self._running) > 1 and self.kv + len(self._running) > self.costs.kv_tokens:
            _, run = self._running.popitem()
            self.waiting.appendleft(self._stop(run))
            self.preemptions += 1

    def _finish_step(self, now: float) -> None:
        """Advance to the end of the step, prefill or pull that is in progress at `now`."""
        self.advance(now)
        if self._running and self.at_s < now:
            self._decode(1)
            self.stopped_s = self.at_s
            self._after_event()
            return
        self.at_s = self.stopped_s = max(self.at_s, now)

    def _admit(self) -> None:
        """Admit waiting trajectories in order while they fit, with one prefill for all."""
        room = self.costs.kv_admitted
        admitted = []
        kv = self.kv
        count = len(self._running)
        while self.waiting:
            length = self.waiting[0].length
            if count and kv + length + count + 1 > room:
                break
            kv += length
            count += 1
            admitted.append(self.waiting.popleft())
        if not admitted:
            return
        lasting_s = sum(self.costs.prefill_s(each.length) for each in admitted)
        self.at_s += lasting_s
        self.prefill_s += lasting_s
        self.kv = kv
        for each in admitted:
            each.admissions += 1
            each.prefill_tokens += each.length
            self._run(each)

    def _run(self, trajectory: SimulatedTrajectory) -> None:
        """Put a trajectory into the batch."""
        base = self.steps - trajectory.done_tokens
        self._running[trajectory.number] = _Run(trajectory, base, self.at_s)
        heapq.heappush(self._ends, (base + trajectory.response_tokens, trajectory.number))

    def _stop(self, run: _Run) -> SimulatedTrajectory:
        """Record the segment of a trajectory that leaves the batch, and free its cache."""
        trajectory = run.trajectory
        trajectory.done_tokens = self.steps - run.base
        before = sum(segment.tokens for segment in trajectory.segments)
        tokens = trajectory.done_tokens - before
        if tokens:
            trajectory.segments.append(
                SimulatedSegment(self.number, self.version, run.start_s, self.at_s, tokens)
            )
        self.kv -= trajectory.length
        return trajectory
