"""The reward scheduler, with graders that block, fail and hang."""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from plexrl.client.blocking.bounded_rollout import _Feeder
from plexrl.client.data.results import Sample
from plexrl.errors import (
    BatchShapeError,
    DeadlineExceededError,
    ExecutionError,
    InvalidRequestError,
)
from plexrl.rewards.decisions.grading import OnFailure
from plexrl.rewards.grade import PASSED, Grade, Outcome, wrong
from plexrl.rewards.scheduler import Graded, RewardScheduler, SampleReward

if TYPE_CHECKING:
    from plexrl.client.blocking.bounded_rollout import BoundedRollout

PROMPT = [1, 2, 3]


def drain(scheduler: RewardScheduler[str]) -> list[SampleReward]:
    found = []
    while scheduler.pending:
        found += scheduler.finished()
    return found


def test_results_come_in_order_of_completion() -> None:
    gates = {name: threading.Event() for name in "abc"}

    def reward(_: list[int], sample: str) -> float:
        gates[sample].wait()
        return 1.0

    scheduler = RewardScheduler(Graded(reward, on_failure="drop", at_once=3))
    for name in "abc":
        scheduler.submit(name, PROMPT, name)
    order = []
    for name in "cab":
        gates[name].set()
        (found,) = scheduler.finished()
        order.append(found.key)
    assert order == ["c", "a", "b"]
    assert scheduler.pending == 0
    assert scheduler.finished() == []


def test_as_many_calls_run_at_once_as_asked_for() -> None:
    meeting, most, running = threading.Barrier(4), [0], [0]
    lock = threading.Lock()

    def reward(_: list[int], sample: str) -> float:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        # Passes only if four calls are here together.
        meeting.wait()
        with lock:
            running[0] -= 1
        return float(sample)

    scheduler = RewardScheduler(Graded(reward, on_failure="drop", at_once=4))
    for index in range(20):
        scheduler.submit(index, PROMPT, str(index))
    found = {each.key: each.reward for each in drain(scheduler)}
    assert found == {index: float(index) for index in range(20)}
    assert most == [4]


def test_controller_is_not_blocked_by_graders() -> None:
    gate = threading.Event()
    scheduler = RewardScheduler[str](Graded(lambda *_: float(gate.wait()), on_failure="drop"))
    for index in range(100):
        scheduler.submit(index, PROMPT, "")
    assert scheduler.finished(timeout_s=0.0) == []
    assert scheduler.pending == 100
    gate.set()
    assert len(drain(scheduler)) == 100


@pytest.mark.parametrize(("choice", "reward"), [("drop", None), ("zero", 0.0)])
def test_failure_is_recorded_whatever_it_means(choice: OnFailure, reward: float | None) -> None:
    calls = []

    def broken(_: list[int], sample: str) -> float:
        calls.append(sample)
        raise ValueError(f"cannot read {sample!r}")

    scheduler = RewardScheduler(Graded(broken, on_failure=choice, retries=2))
    scheduler.submit("key", PROMPT, "text")
    (found,) = drain(scheduler)
    assert (found.reward, found.failure) == (reward, "ValueError: cannot read 'text'")
    assert (found.attempts, calls) == (3, ["text"] * 3)


def test_retry_after_a_failure_may_succeed() -> None:
    attempts = []

    def reward(_: list[int], sample: str) -> Grade:
        attempts.append(sample)
        if len(attempts) < 3:
            raise OSError("the judge does not answer")
        return wrong("no")

    scheduler = RewardScheduler(Graded(reward, on_failure="raise", retries=2))
    scheduler.submit("key", PROMPT, "text")
    (found,) = drain(scheduler)
    assert (found.reward, found.failure, found.attempts) == (0.0, None, 3)
    assert found.grade == Grade(score=0.0, outcome=Outcome.WRONG, detail="no")


def test_chosen_error_reaches_the_controller_with_its_cause() -> None:
    def broken(_: list[int], sample: str) -> float:
        raise ValueError(sample)

    scheduler = RewardScheduler(Graded(broken, on_failure="raise"))
    scheduler.submit(("row", 4), PROMPT, "text")
    with pytest.raises(ValueError, match="text") as caught:
        drain(scheduler)
    assert caught.value.__notes__ == ["sample ('row', 4) was not graded: ValueError: text"]


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError("late")])
def test_grader_that_ends_its_thread_has_failed(error: BaseException) -> None:
    def broken(_: list[int], sample: str) -> float:
        del sample
        raise error

    scheduler = RewardScheduler(Graded(broken, on_failure="drop", timeout_s=60.0))
    scheduler.submit("key", PROMPT, "text")
    (found,) = drain(scheduler)
    assert (found.reward, found.failure) == (None, f"{type(error).__name__}: {error}")
    scheduler = RewardScheduler(Graded(broken, on_failure="raise", timeout_s=60.0))
    scheduler.submit("key", PROMPT, "text")
    with pytest.raises(ExecutionError, match=type(error).__name__) as caught:
        drain(scheduler)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("found", [float("nan"), float("inf")])
def test_reward_that_is_not_finite_is_a_failure(found: float) -> None:
    scheduler = RewardScheduler[str](Graded(lambda *_: found, on_failure="zero"))
    scheduler.submit("key", PROMPT, "text")
    (result,) = drain(scheduler)
    assert (result.reward, result.failure) == (0.0, f"the grader gave {found}")
    scheduler = RewardScheduler[str](Graded(lambda *_: found, on_failure="raise"))
    scheduler.submit("key", PROMPT, "text")
    with pytest.raises(InvalidRequestError, match=f"the grader gave {found}"):
        drain(scheduler)


@pytest.mark.parametrize("choice", ["drop", "zero", "raise"])
def test_grader_may_decide_that_a_sample_has_no_reward(choice: OnFailure) -> None:
    scheduler = RewardScheduler[str](Graded(lambda *_: None, on_failure=choice, retries=3))
    scheduler.submit("key", PROMPT, "text")
    (result,) = drain(scheduler)
    assert (result.reward, result.failure) == (None, None)
    assert result.attempts == 1


def test_hanging_grader_fails_and_its_late_answer_is_ignored() -> None:
    gate, answered = threading.Event(), threading.Event()

    def reward(_: list[int], sample: str) -> float:
        if sample == "hangs":
            gate.wait()
            answered.set()
        return 1.0

    scheduler = RewardScheduler(Graded(reward, on_failure="drop", at_once=1, timeout_s=0.2))
    scheduler.submit(1, PROMPT, "hangs")
    scheduler.submit(2, PROMPT, "answers")
    first, second = drain(scheduler)
    assert (first.key, first.reward) == (1, None)
    assert (first.failure or "").startswith(
        "the grader has not answered in 0.2 s about the prompt ["
    )
    assert (second.key, second.reward) == (2, 1.0)
    gate.set()
    assert answered.wait(60.0)
    assert scheduler.pending == 0


def test_graders_that_all_hang_end_the_grading() -> None:
    gate = threading.Event()
    scheduler = RewardScheduler[str](
        Graded(lambda *_: float(gate.wait()), on_failure="drop", at_once=2, timeout_s=0.1)
    )
    for index in range(10):
        scheduler.submit(index, PROMPT, "")
    with pytest.raises(DeadlineExceededError) as caught:
        drain(scheduler)
    assert "3 calls of the grader hang" in caught.value.__notes__[0]
    gate.set()


def test_samples_of_a_generate_are_graded_together() -> None:
    def reward(prompt: list[int], sample: str) -> float | Grade:
        if sample == "broken":
            raise ValueError("unreadable")
        return PASSED if sample == "right" else float(prompt[0])

    graded = Graded(reward, on_failure="drop")
    found = graded.grade([[7], [8]], [["right", "wrong"], ["broken", "right"]])
    np.testing.assert_array_equal(found.rewards, [[1.0, 7.0], [np.nan, 1.0]])
    assert found.kept.tolist() == [True, False]
    assert [each.failure for each in found.failures] == ["ValueError: unreadable"]


def test_samples_are_graded_while_others_are_generated() -> None:
    graded_first = threading.Event()

    def generated() -> Iterator[tuple[int, int, str]]:
        yield 1, 0, "first"
        # The second sample is finished only after the first was graded.
        assert graded_first.wait(60.0)
        yield 0, 0, "second"

    def reward(_: list[int], sample: str) -> float:
        graded_first.set()
        return float(len(sample))

    found = Graded(reward, on_failure="drop").grade_stream([[1], [2], [3]], 1, generated())
    np.testing.assert_array_equal(found.rewards, [[6.0], [5.0], [np.nan]])
    # The generation of the third was interrupted.
    assert found.kept.tolist() == [True, True, False]


@pytest.mark.parametrize("kind", ["prompts", "grader"])
def test_grading_that_was_given_up_calls_no_grader_any_more(kind: str) -> None:
    gate, called = threading.Event(), []

    def reward(_: list[int], sample: str) -> float:
        called.append(sample)
        if kind == "grader" and sample == "1":
            raise ValueError("unreadable")
        gate.wait()
        return 1.0

    def generated() -> Iterator[tuple[int, int, str]]:
        for index in range(20):
            yield index, 0, str(index)
        if kind == "prompts":
            raise OSError("the generation ended")

    graded = Graded(reward, on_failure="raise", at_once=2)
    with pytest.raises((OSError, ValueError)):
        graded.grade_stream([[1]] * 20, 1, generated())
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("plexrl-grader-"):
            thread.join()
    assert len(called) == 2


def test_scheduler_that_was_stopped_has_nothing_pending() -> None:
    gate = threading.Event()
    scheduler = RewardScheduler[str](Graded(lambda *_: float(gate.wait()), on_failure="drop"))
    scheduler.submit("key", PROMPT, "text")
    scheduler.stop()
    scheduler.submit("other", PROMPT, "text")
    assert (scheduler.pending, scheduler.finished()) == (0, [])
    gate.set()


def test_rollout_that_is_left_calls_no_grader_any_more() -> None:
    gate, called = threading.Event(), []

    def reward(_: list[int], sample: Sample) -> float:
        called.append(sample)
        return float(gate.wait())

    def no_status() -> dict[str, int]:
        raise OSError("the cluster does not answer")

    rollout = cast("BoundedRollout", SimpleNamespace(name="rollout", status=no_status))
    feeder = _Feeder(rollout, iter(()), Graded(reward, on_failure="drop", at_once=1), 1)
    for key in range(3):
        feeder._scheduler.submit(key, PROMPT, Sample([1], np.zeros(1, np.float32), "stop", ()))
    feeder.start()
    feeder.stop()
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("plexrl-grader-"):
            thread.join()
    assert len(called) == 1


def test_samples_without_a_prompt_are_refused() -> None:
    graded = Graded[str](lambda *_: 1.0, on_failure="drop")
    with pytest.raises(BatchShapeError):
        graded.grade([[1]], [["a"], ["b"]])
    with pytest.raises(BatchShapeError):
        graded.grade([[1], [2]], [["a"], ["b", "c"]])


def test_time_without_meaning_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="timeout_s is 0"):
        Graded[str](lambda *_: 1.0, on_failure="drop", timeout_s=0.0)


def test_event_loop_runs_while_an_async_controller_waits() -> None:
    gate = threading.Event()
    scheduler = RewardScheduler[str](Graded(lambda *_: float(gate.wait()), on_failure="drop"))

    async def control() -> list[SampleReward]:
        scheduler.submit("key", PROMPT, "text")
        waiting = asyncio.create_task(scheduler.finished_async())
        # Only a loop that still runs can open the gate.
        asyncio.get_running_loop().call_later(0.05, gate.set)
        return await waiting

    (found,) = asyncio.run(control())
    assert found.reward == 1.0


def test_a_call_that_hangs_names_its_prompt() -> None:
    release = threading.Event()
    graded = Graded[str](
        lambda _prompt, _sample: float(release.wait()),
        on_failure="raise",
        at_once=1,
        timeout_s=0.05,
    )
    try:
        with pytest.raises(DeadlineExceededError, match=r"0.05 s about the prompt \[7, 8\]"):
            graded.grade([[7, 8]], [["a"]])
    finally:
        release.set()


@pytest.mark.parametrize("text", ["1.0", b"1"])
def test_a_reward_that_is_a_text_is_refused(text: object) -> None:
    graded = Graded[str](lambda _prompt, _sample: text, on_failure="raise")  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidRequestError, match="the reward is the text"):
        graded.grade([[7]], [["a"]])
