"""Rewards of asynchronous rollouts that are graded several at a time, on a real cluster."""

import threading
from typing import TYPE_CHECKING

import pytest

import plexrl
from plexrl import rewards
from plexrl.errors import SandboxError
from tests.cluster.rollouts.test_asynchronous_rollouts import (
    MODEL,
    SAMPLES,
    SAMPLING,
    asynchronous,
    number_of,
    prompts,
    reward,
    train,
)

if TYPE_CHECKING:
    from plexrl.client.blocking.bounded_rollout import RewardFunction


@pytest.mark.slow
def test_graders_run_together_and_failures_drop_their_prompts(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    rollout = asynchronous(job, actor, 1)
    # Passes only if all samples of a prompt are graded at the same time.
    meetings = [threading.Barrier(SAMPLES) for _ in range(60)]

    def grade(prompt: list[int], sample: plexrl.Sample) -> float:
        number = number_of(prompt)
        meetings[number].wait(120.0)
        if number % 3 == 0:
            raise ValueError(f"prompt {number} cannot be graded")
        return reward(prompt, sample)

    graded = rewards.Graded(grade, on_failure="drop", at_once=60)
    trained = set[int]()
    for batch in rollout.batches(prompts(), graded, steps=2):
        trained |= {number_of(prompt) for prompt in batch.prompts}
        for prompt, samples, values in zip(
            batch.prompts, batch.samples, batch.rewards, strict=True
        ):
            assert values == pytest.approx([reward(prompt, each) for each in samples])
        train(actor, batch.prompts, batch.samples, batch.rewards)
    assert not [each for each in trained if each % 3 == 0]
    assert "cannot be graded" in rollout.status()["dropped_reason"]


def test_error_of_a_grader_ends_the_loop_if_chosen(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    rollout = asynchronous(job, actor, 0)

    def broken(*_: object) -> float:
        raise ValueError("no answer key")

    graded = rewards.Graded[plexrl.Sample](broken, on_failure="raise")
    choices: tuple[RewardFunction | rewards.Graded[plexrl.Sample], ...] = (broken, graded)
    for chosen in choices:
        with pytest.raises(ValueError, match="no answer key") as caught:
            list(rollout.batches(prompts(), chosen, steps=1))
        assert "was not graded" in caught.value.__notes__[0]


def test_programs_in_the_sandbox_give_the_rewards(job: plexrl.Job) -> None:
    try:
        sandbox = rewards.Sandbox()
    except SandboxError as error:
        pytest.skip(f"no sandbox: {error}")
    actor = job.train_deployment("actor", MODEL)
    rollout = asynchronous(job, actor, 1)
    grader = rewards.ProgramGrader(sandbox)

    def grade(_: list[int], sample: plexrl.Sample) -> rewards.Grade:
        # A program that is right for every other length.
        source = f"n = int(input())\nprint(n * 2 if {len(sample.tokens)} % 2 else n)"
        return grader.grade(source, [rewards.ProgramTest("21", "42")])

    with sandbox:
        graded = rewards.Graded(grade, on_failure="raise")
        for batch in rollout.batches(prompts(), graded, steps=2):
            expected = [[float(len(s.tokens) % 2) for s in row] for row in batch.samples]
            assert batch.rewards == expected
            train(actor, batch.prompts, batch.samples, batch.rewards)


def test_samples_of_a_synchronous_rollout_come_one_by_one(job: plexrl.Job) -> None:
    rollout = job.rollout_deployment("rollout", MODEL, max_concurrent_samples=2)
    asked = [[3, 4, 5], [6, 7], [8, 9, 10]]

    def grade(_: list[int], sample: plexrl.Sample) -> float:
        return float(len(sample.tokens))

    future = rollout.generate(asked, n=2, sampling=SAMPLING, stream="rows")
    found = rewards.Graded(grade, on_failure="raise").grade_stream(asked, 2, future.samples())
    samples = future.result().samples
    assert found.rewards.tolist() == [[len(each.tokens) for each in row] for row in samples]
    assert found.kept.all()
    again = {(row, column): each for row, column, each in future.samples()}
    assert len(again) == 6
    for (row, column), sample in again.items():
        whole = samples[row][column]
        assert sample.tokens == whole.tokens
        assert sample.logprobs.tobytes() == whole.logprobs.tobytes()
        assert (sample.finish_reason, sample.weights) == (whole.finish_reason, whole.weights)
