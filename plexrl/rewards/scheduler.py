"""The reward scheduler: grades samples while others are still generated (Flexes §4.3).

Each attempt to grade a sample runs in a thread of its own, so a grader may block, and one that
hangs holds up no other. Results come in the order in which they are ready.
"""

import asyncio
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from plexrl.errors import (
    BatchShapeError,
    DeadlineExceededError,
    ExecutionError,
    InvalidRequestError,
)
from plexrl.limits import check_numbers
from plexrl.rewards.decisions.grading import (
    AttemptFailed,
    AttemptGraded,
    AttemptTimedOut,
    DeliverReward,
    GradingCommand,
    GradingCore,
    GradingEvent,
    GradingSettings,
    OnFailure,
    SampleSubmitted,
    StartAttempt,
    StopGrading,
)
from plexrl.rewards.grade import Grade

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LOG = logging.getLogger(__name__)

SampleT = TypeVar("SampleT")
Reward = Callable[[list[int], SampleT], "Grade | float | None"]
"""Maps a prompt and one of its samples to a grade or a reward. None: the sample shall have none,
and its prompt is dropped with all of its samples. An error: the sample could not be graded."""


class Graded(Generic[SampleT]):
    """A reward function, how many samples it grades at a time, and what happens if it fails."""

    def __init__(
        self,
        reward: Reward[SampleT],
        *,
        on_failure: OnFailure,
        retries: int = 0,
        at_once: int | None = None,
        timeout_s: float | None = 300.0,
    ) -> None:
        """Args:
        reward: called in threads, several at a time.
        on_failure: what it means if `reward` fails for a sample: `drop` the sample's prompt with
            all of its samples, `zero` for a reward of 0, or `raise` the error in the controller.
        retries: calls after a failed one, before `on_failure` decides.
        at_once: calls at the same time; default: twice the number of this process' CPUs.
        timeout_s: a call that takes longer has failed; None: no call does. It includes waiting
            for the sandbox.
        """
        given = {"retries": retries, "at_once": at_once, "timeout_s": timeout_s}
        check_numbers("grading", given)
        cpus = len(os.sched_getaffinity(0))
        self.settings = GradingSettings(
            on_failure=on_failure,
            retries=retries,
            at_once=2 * cpus if at_once is None else at_once,
        )
        self.reward = reward
        self.timeout_s = math.inf if timeout_s is None else timeout_s

    def grade(
        self, prompts: Sequence[list[int]], samples: Sequence[Sequence[SampleT]]
    ) -> "GradedSamples":
        """Grade all samples, `[prompts][samples]`, of a `generate` that has ended.

        Raises:
            Exception: what a grader raised, if `on_failure` is `raise`.
        """
        if len(prompts) != len(samples) or len({len(group) for group in samples}) > 1:
            raise BatchShapeError("grade needs as many samples for each of the prompts")
        width = len(samples[0]) if samples else 0
        finished = (
            (row, column, sample)
            for row, group in enumerate(samples)
            for column, sample in enumerate(group)
        )
        return self.grade_stream(prompts, width, finished)

    def grade_stream(
        self,
        prompts: Sequence[list[int]],
        samples_per_prompt: int,
        finished: Iterable[tuple[int, int, SampleT]],
    ) -> "GradedSamples":
        """Grade samples while others are still generated.

        Args:
            prompts: of the `generate`.
            samples_per_prompt: its `n`.
            finished: (index of the prompt, index of the sample, sample) in any order, such as
                `future.samples()` of a `generate` with `stream="rows"`.

        Raises:
            Exception: what a grader raised, if `on_failure` is `raise`; or what `finished` raised.
        """
        import numpy as np

        scheduler = RewardScheduler[SampleT](self)
        shape = (len(prompts), samples_per_prompt)
        found = GradedSamples(np.full(shape, np.nan), np.ones(len(prompts), dtype=bool), [])
        try:
            for row, column, sample in finished:
                scheduler.submit(row * samples_per_prompt + column, prompts[row], sample)
                for result in scheduler.finished(timeout_s=0.0):
                    found.add(result)
            while scheduler.pending:
                for result in scheduler.finished():
                    found.add(result)
        finally:
            scheduler.stop()
        found.kept[:] &= ~np.isnan(found.rewards).any(axis=1)
        return found


@dataclass(frozen=True, slots=True)
class SampleReward:
    """The result for one sample."""

    key: Hashable
    """As in `submit`."""
    reward: float | None
    """None: the grader failed, or gave none, and the prompt is to be dropped."""
    failure: str | None
    """Why the grader failed in the last attempt; None if it did not."""
    attempts: int
    grade: Grade | None
    """The grade, if the grader gives grades."""
    wall_s: float
    """From `submit` to the result."""


@dataclass(frozen=True, slots=True)
class GradedSamples:
    """The rewards of all samples of some prompts."""

    rewards: "npt.NDArray[np.float64]"
    """`[prompts, samples]`; NaN where there is none."""
    kept: "npt.NDArray[np.bool_]"
    """`[prompts]`: false for prompts of which a sample has no reward, for `Batch`'s `keep`."""
    failures: list[SampleReward]
    """Samples for which the grader failed."""

    def add(self, result: SampleReward) -> None:
        """Enter a result whose key is its place, counted row by row."""
        assert isinstance(result.key, int)
        row, column = divmod(result.key, self.rewards.shape[1])
        if result.failure is not None:
            self.failures.append(result)
        if result.reward is not None:
            self.rewards[row, column] = result.reward


@dataclass(slots=True)
class _Submitted(Generic[SampleT]):
    key: Hashable
    prompt: list[int]
    sample: SampleT
    submitted_s: float
    attempt: int = 0
    grade: Grade | None = None
    error: Exception | None = None


@dataclass(slots=True)
class _Results:
    """Results that wait for the controller."""

    ready: deque[SampleReward] = field(default_factory=deque)
    failure: Exception | None = None


class RewardScheduler(Generic[SampleT]):
    """Grades samples concurrently. Threads of graders end with the controller's process."""

    def __init__(self, graded: Graded[SampleT]) -> None:
        self._graded = graded
        self._core = GradingCore(graded.settings)
        self._samples: dict[int, _Submitted[SampleT]] = {}
        self._deadlines_s: dict[int, float] = {}
        """Deadlines of the samples that are graded now."""
        self._count = 0
        self._changed = threading.Condition()
        self._results = _Results()

    @property
    def pending(self) -> int:
        """Samples that were submitted and whose results `finished` has not returned."""
        with self._changed:
            return self._core.pending + len(self._results.ready) + bool(self._results.failure)

    def submit(self, key: Hashable, prompt: list[int], sample: SampleT) -> None:
        """Grade a sample as soon as a call is free; returns at once. Ignored after `stop`."""
        with self._changed:
            if self._core.is_stopped:
                return
            self._count += 1
            self._samples[self._count] = _Submitted(key, prompt, sample, time.monotonic())
            self._handle(SampleSubmitted(sample=self._count))

    def finished(self, timeout_s: float | None = None) -> list[SampleReward]:
        """Results since the last call, in the order in which they were ready.

        Waits for a first one, for at most `timeout_s` seconds, unless nothing is pending.

        Raises:
            Exception: what a grader raised, if `on_failure` is `raise`.
            DeadlineExceededError: more calls hang than run at once.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._results.failure is not None:
                    raise self._results.failure
                next_s = self._give_up_late()
                if self._results.ready or not self._core.pending or time.monotonic() >= until:
                    if self._results.failure is None:
                        break
                    continue
                wait_s = min(next_s, until) - time.monotonic()
                self._changed.wait(None if wait_s == math.inf else max(0.0, wait_s))
            found = list(self._results.ready)
            self._results.ready.clear()
            return found

    def stop(self) -> None:
        """Start no further calls of the grader, and ignore those that run. Nothing is pending."""
        with self._changed:
            self._core.stop()
            self._samples.clear()
            self._deadlines_s.clear()
            self._results = _Results()
            self._changed.notify_all()

    async def finished_async(self, timeout_s: float | None = None) -> list[SampleReward]:
        """As `finished`, for `async` controllers."""
        return await asyncio.to_thread(self.finished, timeout_s)

    def _give_up_late(self) -> float:
        """Give up attempts past their deadlines; the time of the next deadline."""
        now = time.monotonic()
        late = [number for number, deadline_s in self._deadlines_s.items() if deadline_s <= now]
        for number in late:
            sample = self._samples.get(number)
            if sample is not None:
                reason = (
                    f"the grader has not answered in {self._graded.timeout_s:g} s about the prompt "
                    f"{_short(sample.prompt)}"
                )
                sample.error = DeadlineExceededError(reason)
                self._handle(AttemptTimedOut(sample=number, attempt=sample.attempt, reason=reason))
        return min(self._deadlines_s.values(), default=math.inf)

    def _handle(self, event: GradingEvent) -> None:
        for command in self._core.handle(event):
            self._run(command)
        self._changed.notify_all()

    def _run(self, command: GradingCommand) -> None:
        number = command.sample
        match command:
            case StartAttempt(attempt=attempt):
                sample = self._samples[number]
                sample.attempt = attempt
                self._deadlines_s[number] = time.monotonic() + self._graded.timeout_s
                name = f"plexrl-grader-{number}-{attempt}"
                arguments = (number, attempt, sample)
                threading.Thread(
                    target=self._attempt, args=arguments, name=name, daemon=True
                ).start()
            case DeliverReward(reward=reward, failure=failure, attempts=attempts):
                sample = self._samples.pop(number)
                del self._deadlines_s[number]
                wall_s = time.monotonic() - sample.submitted_s
                if failure is not None:
                    LOG.warning("sample %r was not graded: %s", sample.key, failure)
                grade = sample.grade if failure is None else None
                self._results.ready.append(
                    SampleReward(sample.key, reward, failure, attempts, grade, wall_s)
                )
            case StopGrading(reason=reason):
                error = self._samples[number].error or InvalidRequestError(reason)
                error.add_note(f"sample {self._samples[number].key!r} was not graded: {reason}")
                self._results.failure = error
                self._samples.clear()
                self._deadlines_s.clear()

    def _attempt(self, number: int, attempt: int, sample: _Submitted[SampleT]) -> None:
        """Call the grader; runs in a thread."""
        event: GradingEvent
        grade, failed = None, None
        try:
            found = self._graded.reward(sample.prompt, sample.sample)
            if isinstance(found, Grade):
                grade = found
            reward = found.score if isinstance(found, Grade) else found
            if isinstance(reward, str | bytes):
                raise InvalidRequestError(
                    f"the reward is the text {reward[:40]!r}: return a number, a Grade or None"
                )
            event = AttemptGraded(
                sample=number, attempt=attempt, reward=None if reward is None else float(reward)
            )
        except BaseException as error:
            # The controller's own code: it may raise anything, and `on_failure` says what follows.
            reason = f"{type(error).__name__}: {error}"
            failed = error if isinstance(error, Exception) else _as_exception(error)
            event = AttemptFailed(sample=number, attempt=attempt, reason=reason)
        with self._changed:
            if sample.attempt == attempt and number in self._samples:
                sample.grade, sample.error = grade, failed
            self._handle(event)


def _short(prompt: list[int]) -> str:
    return str(prompt) if len(prompt) <= 16 else f"{str(prompt[:16])[:-1]}, …]"


def _as_exception(error: BaseException) -> Exception:
    """The error of a grader that wanted to end its thread, by `sys.exit` for example."""
    found = ExecutionError(f"the grader raised {type(error).__name__}: {error}")
    found.__cause__ = error
    return found
