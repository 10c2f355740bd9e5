"""Which samples are graded when, and what the failure of a grader means.

Invariants: at most `at_once` attempts run, besides those given up as late; each sample that was
submitted is delivered once, unless the grading is stopped; no sample gets a reward that neither its
grader nor the controller's choice gave.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal, get_args

from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers

OnFailure = Literal["drop", "zero", "raise"]
"""Meaning of the last failed attempt to grade a sample. `drop`: the sample has no reward, and its
prompt is not trained. `zero`: the reward is 0. `raise`: the controller gets the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingSettings:
    """The controller's choice."""

    on_failure: OnFailure
    """After the last attempt."""
    retries: int
    """Attempts after the first one."""
    at_once: int
    """Samples that are graded at the same time."""

    def __post_init__(self) -> None:
        choices = get_args(OnFailure)
        if self.on_failure not in choices:
            raise InvalidRequestError(
                f"on_failure is {self.on_failure!r}: choose one of {', '.join(choices)}"
            )
        check_numbers("grading", {"retries": self.retries, "at_once": self.at_once})


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingEvent:
    """An event of a sample, which the caller numbers."""

    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSubmitted(GradingEvent):
    """A sample shall be graded. Its number is new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptGraded(GradingEvent):
    """The grader gave a reward, or None: it found that the sample shall have none."""

    attempt: int
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed(GradingEvent):
    """The grader raised an error."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimedOut(GradingEvent):
    """The grader has not answered in time. It may answer later."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingCommand:
    """A command to the caller."""

    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAttempt(GradingCommand):
    """Call the grader."""

    attempt: int
    """From 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverReward(GradingCommand):
    """Give the result to the controller."""

    reward: float | None
    """None: the sample has none, and its prompt is to be dropped."""
    failure: str | None
    """Why the last attempt failed; None if it did not."""
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGrading(GradingCommand):
    """Give the error to the controller."""

    reason: str


class GradingCore:
    """Turns events of samples into commands."""

    def __init__(self, settings: GradingSettings) -> None:
        self.settings = settings
        self._waiting: deque[int] = deque()
        self._running: dict[int, int] = {}
        """Attempt of each sample that is graded."""
        self._late: set[tuple[int, int]] = set()
        """Attempts that timed out and have not answered since."""
        self.is_stopped = False
        """After `StopGrading` or `stop`: nothing more is graded."""

    @property
    def pending(self) -> int:
        """Samples that were submitted and not delivered."""
        return len(self._waiting) + len(self._running)

    def handle(self, event: GradingEvent) -> list[GradingCommand]:
        """Return what is to be done now."""
        match event:
            case _ if self.is_stopped:
                return []
            case SampleSubmitted(sample=sample):
                self._waiting.append(sample)
                return self._starts()
            case AttemptGraded() | AttemptFailed() | AttemptTimedOut():
                return self._ended(event)
        raise AssertionError(event)

    def stop(self) -> None:
        """Grade and deliver no more samples, and wait for no attempt."""
        self.is_stopped = True
        self._waiting.clear()
        self._running.clear()

    def _ended(
        self, event: AttemptGraded | AttemptFailed | AttemptTimedOut
    ) -> list[GradingCommand]:
        sample, attempt = event.sample, event.attempt
        if self._running.get(sample) != attempt:
            # The answer of an attempt that was given up.
            self._late.discard((sample, attempt))
            return []
        del self._running[sample]
        if isinstance(event, AttemptGraded):
            reward = event.reward
            if reward is None or math.isfinite(reward):
                return [self._delivered(sample, reward, None, attempt), *self._starts()]
            reason = f"the grader gave {reward}"
        else:
            reason = event.reason
        if isinstance(event, AttemptTimedOut):
            self._late.add((sample, attempt))
            if len(self._late) > self.settings.at_once:
                reason = f"{len(self._late)} calls of the grader hang; the last one: {reason}"
                return self._stopped(sample, reason)
        return [*self._failed(sample, attempt, reason), *self._starts()]

    def _failed(self, sample: int, attempt: int, reason: str) -> list[GradingCommand]:
        if attempt <= self.settings.retries:
            self._running[sample] = attempt + 1
            return [StartAttempt(sample=sample, attempt=attempt + 1)]
        match self.settings.on_failure:
            case "raise":
                return self._stopped(sample, reason)
            case "zero":
                return [self._delivered(sample, 0.0, reason, attempt)]
            case "drop":
                return [self._delivered(sample, None, reason, attempt)]

    def _stopped(self, sample: int, reason: str) -> list[GradingCommand]:
        self.stop()
        return [StopGrading(sample=sample, reason=reason)]

    def _delivered(
        self, sample: int, reward: float | None, failure: str | None, attempts: int
    ) -> GradingCommand:
        return DeliverReward(sample=sample, reward=reward, failure=failure, attempts=attempts)

    def _starts(self) -> list[GradingCommand]:
        starts: list[GradingCommand] = []
        while self._waiting and len(self._running) < self.settings.at_once:
            sample = self._waiting.popleft()
            self._running[sample] = 1
            starts.append(StartAttempt(sample=sample, attempt=1))
        return starts

    def check_invariants(self) -> None:
        """Assert what holds between two events."""
        assert len(self._running) <= self.settings.at_once
        assert not (self._waiting and len(self._running) < self.settings.at_once)
        assert not self._late & set(self._running.items())
        assert not set(self._waiting) & set(self._running)
