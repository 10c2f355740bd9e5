"""Random histories of graders against the core, and what each failure means."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plexrl.errors import InvalidRequestError
from plexrl.rewards.decisions.grading import (
    AttemptFailed,
    AttemptGraded,
    AttemptTimedOut,
    DeliverReward,
    GradingCommand,
    GradingCore,
    GradingSettings,
    SampleSubmitted,
    StartAttempt,
    StopGrading,
)


def settings(on_failure: str, retries: int = 0, at_once: int = 1) -> GradingSettings:
    return GradingSettings(on_failure=on_failure, retries=retries, at_once=at_once)  # type: ignore[arg-type]  # any text is tried


class Histories(RuleBasedStateMachine):
    """Graders that answer, fail, hang and answer late."""

    def __init__(self) -> None:
        super().__init__()
        self.core = GradingCore(settings("drop", retries=2, at_once=3))
        self.submitted = 0
        self.running: dict[int, int] = {}
        self.late: set[tuple[int, int]] = set()
        self.failures: dict[int, int] = {}
        self.rewards: dict[int, float] = {}
        self.delivered: dict[int, DeliverReward] = {}

    def obey(self, commands: list[GradingCommand]) -> None:
        for command in commands:
            match command:
                case StartAttempt(sample=sample, attempt=attempt):
                    assert sample not in self.running
                    assert attempt == self.failures.get(sample, 0) + 1
                    self.running[sample] = attempt
                case DeliverReward(sample=sample):
                    assert sample not in self.delivered
                    self.delivered[sample] = command
                case _:
                    raise AssertionError(command)

    @rule()
    def submit(self) -> None:
        self.submitted += 1
        self.obey(self.core.handle(SampleSubmitted(sample=self.submitted)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reward=st.floats())
    def answer(self, data: st.DataObject, reward: float) -> None:
        sample, attempt = data.draw(st.sampled_from(sorted(self.running.items())))
        del self.running[sample]
        if math.isfinite(reward):
            self.rewards[sample] = reward
        else:
            self.failures[sample] = attempt
        self.obey(self.core.handle(AttemptGraded(sample=sample, attempt=attempt, reward=reward)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        sample, attempt = data.draw(st.sampled_from(sorted(self.running.items())))
        del self.running[sample]
        self.failures[sample] = attempt
        self.obey(self.core.handle(AttemptFailed(sample=sample, attempt=attempt, reason="no")))

    @precondition(lambda self: self.running and len(self.late) < 3)
    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        sample, attempt = data.draw(st.sampled_from(sorted(self.running.items())))
        del self.running[sample]
        self.failures[sample] = attempt
        self.late.add((sample, attempt))
        self.obey(self.core.handle(AttemptTimedOut(sample=sample, attempt=attempt, reason="no")))

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def answer_late(self, data: st.DataObject) -> None:
        sample, attempt = data.draw(st.sampled_from(sorted(self.late)))
        self.late.remove((sample, attempt))
        event = AttemptGraded(sample=sample, attempt=attempt, reward=-12345.0)
        assert self.core.handle(event) == []

    @invariant()
    def every_sample_is_delivered_once_with_its_own_reward(self) -> None:
        self.core.check_invariants()
        assert self.core.pending == self.submitted - len(self.delivered)
        assert len(self.running) == min(3, self.core.pending)
        for sample, result in self.delivered.items():
            assert result.reward == self.rewards.get(sample)
            assert (result.failure is None) == (sample in self.rewards)
            assert self.failures.get(sample, 0) == 3 or sample in self.rewards


TestHistories = Histories.TestCase


@given(st.integers(0, 5), st.sampled_from(["drop", "zero", "raise"]))
def test_choice_decides_after_the_last_attempt(retries: int, on_failure: str) -> None:
    core = GradingCore(settings(on_failure, retries))
    found = core.handle(SampleSubmitted(sample=7))
    for attempt in range(1, retries + 2):
        assert found == [StartAttempt(sample=7, attempt=attempt)]
        found = core.handle(AttemptFailed(sample=7, attempt=attempt, reason="broken"))
    last: GradingCommand = DeliverReward(
        sample=7,
        reward=0.0 if on_failure == "zero" else None,
        failure="broken",
        attempts=retries + 1,
    )
    if on_failure == "raise":
        last = StopGrading(sample=7, reason="broken")
    assert found == [last]
    assert core.pending == 0


def test_late_answer_changes_nothing() -> None:
    core = GradingCore(settings("drop", retries=1))
    core.handle(SampleSubmitted(sample=1))
    again = core.handle(AttemptTimedOut(sample=1, attempt=1, reason="slow"))
    assert again == [StartAttempt(sample=1, attempt=2)]
    assert core.handle(AttemptGraded(sample=1, attempt=1, reward=1.0)) == []
    (found,) = core.handle(AttemptGraded(sample=1, attempt=2, reward=0.25))
    assert isinstance(found, DeliverReward)
    assert found.reward == 0.25


def test_grading_stops_when_more_calls_hang_than_run_at_once() -> None:
    core = GradingCore(settings("drop", at_once=2))
    for sample in range(4):
        core.handle(SampleSubmitted(sample=sample))
    for sample in range(2):
        core.handle(AttemptTimedOut(sample=sample, attempt=1, reason="slow"))
    (found,) = core.handle(AttemptTimedOut(sample=2, attempt=1, reason="slow"))
    assert isinstance(found, StopGrading)
    assert "3 calls of the grader hang" in found.reason
    assert core.handle(SampleSubmitted(sample=9)) == []
    assert core.pending == 0


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (("ignore", 0, 1), "on_failure is 'ignore': choose one of drop, zero, raise"),
        (("drop", -1, 1), "retries is -1"),
        (("drop", 0, 0), "at_once is 0"),
    ],
)
def test_choices_without_meaning_are_refused(values: tuple[str, int, int], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        settings(*values)
