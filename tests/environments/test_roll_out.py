"""Trajectories with a rollout that draws what it is told: faults of environments and of
generations."""

import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

import plexrl
from plexrl.client.data.results import Sample
from plexrl.environments import PlainText, Step, Trajectory, roll_out
from plexrl.errors import ExecutionError, OperationCancelledError

TOKENIZER = plexrl.Tokenizer.from_vocabulary("abcdefgh")


class Answering:
    """Answers each reply with what a function returns."""

    stops: Sequence[str] = ()

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def reset(self) -> str:
        return "abc"

    def step(self, reply: str) -> Step:
        return cast("Step", self._answer(reply))


class Drawn:
    """A generation that draws one token for each prompt; `error` comes in place of the last."""

    def __init__(self, operation: str, prompts: int, error: Exception | None) -> None:
        self.operation, self._prompts, self._error = operation, prompts, error
        self.cancelled = threading.Event()

    reason = "stop"

    def samples(self) -> Iterator[tuple[int, int, Sample]]:
        for at in range(self._prompts):
            if self._error is not None:
                raise self._error
            yield at, 0, Sample([3], np.zeros(1, dtype=np.float32), self.reason)

    def cancel(self) -> None:
        self.cancelled.set()


class Hanging(Drawn):
    """A generation that draws nothing until it is cancelled."""

    def samples(self) -> Iterator[tuple[int, int, Sample]]:
        assert self.cancelled.wait(60)
        yield from ()


class Rollout:
    """Remembers the numbers of the samples."""

    def __init__(self, *errors: Exception | None) -> None:
        self.numbers: list[int] = []
        self.calls: list[Drawn] = []
        self._errors = list(errors)

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> Drawn:
        self.numbers += options["first_samples"]
        error = self._errors.pop(0) if self._errors else None
        self.calls.append(Drawn(f"op-{len(self.calls)}", len(prompts), error))
        return self.calls[-1]


def play(rollout: Rollout, *answers: Any, first_sample: int = 0) -> list[Trajectory]:
    return roll_out(
        cast("Any", rollout),
        [Answering(each) for each in answers],
        PlainText(TOKENIZER),
        sampling=plexrl.SamplingParams(seed=1, first_sample=first_sample),
        turns_max=3,
        step_timeout_s=30.0,
        in_step=True,
    )


def ends(_: str) -> Step:
    return Step(reward=1.0, done=True)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda _: sys.exit("no licence"), ExecutionError),
        (lambda _: None, TypeError),
        (lambda _: Step(reward=cast("Any", "much")), ValueError),
        (lambda _: Step(observation=cast("Any", 7)), TypeError),
        (lambda _: Step(observation=[{"role": "tool"}]), KeyError),
    ],
)
def test_what_is_no_answer_ends_its_trajectory_alone(answer: Any, error: type[Exception]) -> None:
    broken, whole = play(Rollout(), answer, ends)
    assert (broken.ended, type(broken.error)) == ("error", error)
    assert (whole.ended, whole.reward) == ("done", 1.0)


def test_a_reply_that_was_interrupted_is_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drawn, "reason", "abort")
    (played,) = play(Rollout(), ends)
    assert (played.ended, played.reward, type(played.error)) == (
        "error",
        0.0,
        OperationCancelledError,
    )


def test_turns_are_numbered_from_the_first_sample() -> None:
    rollout = Rollout()
    play(rollout, *[lambda _: Step(observation="a")] * 2, first_sample=100)
    assert sorted(rollout.numbers) == list(range(100, 106))


def test_an_error_cancels_the_generations_that_still_run() -> None:
    hanging = Hanging("op-hanging", 1, None)
    made = [Drawn("op-failing", 1, ExecutionError("lost")), hanging]
    begun = threading.Event()

    class TwoCalls(Rollout):
        """The first generation hangs, and the second one fails."""

        def generate(self, *_: Any, **__: Any) -> Drawn:
            begun.set()
            return made.pop()

    class Late(Answering):
        """Begins when the first generation runs."""

        def reset(self) -> str:
            assert begun.wait(60)
            return "a"

    with pytest.raises(ExecutionError, match="lost"):
        roll_out(
            cast("Any", TwoCalls()),
            [Answering(ends), Late(ends)],
            PlainText(TOKENIZER),
            sampling=plexrl.SamplingParams(seed=1),
        )
    assert hanging.cancelled.wait(60)
