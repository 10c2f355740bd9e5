"""Judges of samples: models of the job that share GPUs with its trainer, on a real cluster."""

import asyncio
from collections import Counter

import numpy as np
import pytest

import plexrl
from plexrl import rewards
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.errors import InvalidRequestError
from tests.cluster.rollouts.test_asynchronous_rollouts import (
    MODEL,
    VOCABULARY,
    asynchronous,
    prompts,
    train,
)
from tests.cluster.tools import kill_worker

JUDGE = plexrl.tiny_qwen2(VOCABULARY, seed=5, hidden=32, layers=1)
YES, NO = [7, 8], [9]


def judged(prompt: list[int], sample: plexrl.Sample) -> list[int]:
    return [*prompt, *sample.tokens[:20], 11]


def sample_of(*tokens: int) -> plexrl.Sample:
    return plexrl.Sample(list(tokens), np.zeros(len(tokens), dtype=np.float32), "stop")


def test_probability_of_yes_is_the_score(job: plexrl.Job) -> None:
    reference = job.reference_deployment("judge", JUDGE)
    judge = reference.judge(prompt=judged, answers=[(YES, 1.0), (NO, 0.0)])
    row = judged([3, 4], sample_of(5, 6))
    logprobs = reference.forward(plexrl.Batch([[*row, *YES], [*row, *NO]])).result().logprobs
    yes, no = float(logprobs[0][-2:].sum()), float(logprobs[1][-1])
    assert judge.score([3, 4], sample_of(5, 6)) == pytest.approx(1 / (1 + np.exp(no - yes)))
    with pytest.raises(InvalidRequestError, match="two different answers"):
        reference.judge(prompt=judged, answers=[(YES, 1.0), (YES, 0.0)])


def test_reply_is_read_and_a_reply_without_a_score_is_a_failure(job: plexrl.Job) -> None:
    rollout = job.rollout_deployment("judge", JUDGE)
    sampling = plexrl.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    asked = [[3 + index, 4] for index in range(8)]
    samples = [[sample_of(5 + index, 6)] for index in range(8)]
    rows = [judged(prompt, group[0]) for prompt, group in zip(asked, samples, strict=True)]
    replies = rollout.generate(rows, sampling=sampling).result().samples

    def score(reply: plexrl.Sample) -> float:
        if reply.tokens[0] % 2:
            raise ValueError("no score in the reply")
        return float(sum(reply.tokens))

    judge = rollout.judge(prompt=judged, score=score, sampling=sampling)
    found = rewards.Graded(judge.score, on_failure="drop", at_once=8).grade(asked, samples)
    for index, (reply,) in enumerate(replies):
        assert found.kept[index] == (reply.tokens[0] % 2 == 0)
        if found.kept[index]:
            assert found.rewards[index, 0] == sum(reply.tokens)


def test_reward_model_scores_many_samples_in_few_operations(job: plexrl.Job) -> None:
    model = job.reward_deployment("judge", JUDGE)
    asked = [[3 + index % 30, 4 + index // 30] for index in range(96)]
    samples = [[sample_of(5, 6), sample_of(7)] for _ in asked]
    judge = model.judge(prompt=judged)
    found = rewards.Graded(judge.score, on_failure="raise", at_once=64).grade(asked, samples)
    rows = [judged(a, s) for a, group in zip(asked, samples, strict=True) for s in group]
    wanted = model.score(plexrl.Batch(rows)).result().scores
    assert np.allclose(found.rewards.reshape(-1), wanted, atol=1e-5)
    kinds = Counter(each["kind"] for each in job.operations())
    assert kinds["forward"] < 40, "192 samples, 64 at a time"


def test_samples_that_the_judge_refuses_cost_no_other_its_score(job: plexrl.Job) -> None:
    model = job.reward_deployment("judge", JUDGE, max_sequence_tokens=16)
    judge = model.judge(prompt=lambda prompt, sample: [*prompt, *sample.tokens])
    asked = [[3, 4, 5]] * 12
    samples = [[sample_of(*[6] * (30 if index == 7 else index + 1))] for index in range(12)]
    found = rewards.Graded(judge.score, on_failure="drop", at_once=12).grade(asked, samples)
    assert found.kept.tolist() == [index != 7 for index in range(12)]
    assert "16" in str(found.failures[0].failure)


def test_a_judge_that_is_late_fails_the_sample_and_leaves_nothing_waiting(job: plexrl.Job) -> None:
    rollout = job.rollout_deployment("judge", JUDGE)
    judge = rollout.judge(prompt=judged, score=lambda _: 1.0)
    assert judge.score([3, 4], sample_of(5)) == 1.0
    rollout.pause(for_s=60)
    hasty = rollout.judge(prompt=judged, score=lambda _: 1.0, timeout_s=0.5)
    graded = rewards.Graded(hasty.score, on_failure="zero", at_once=4)
    found = graded.grade([[3, 4]], [[sample_of(5)]])
    assert found.rewards.tolist() == [[0.0]]
    assert "judge gave no score" in str(found.failures[0].failure)
    assert "0.5 s" in str(found.failures[0].failure)
    rollout.resume()
    assert judge.score([3, 4], sample_of(5)) == 1.0


def test_judge_shares_the_trainers_gpu_while_samples_are_generated(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    reference = job.reference_deployment("judge", JUDGE)
    judge = reference.judge(prompt=judged, answers=[(YES, 1.0), (NO, 0.0)])
    rollout = asynchronous(job, actor, 1)
    graded = rewards.Graded(judge.score, on_failure="raise", at_once=16)
    for batch in rollout.batches(prompts(), graded, steps=3):
        rows = [
            judged(prompt, sample)
            for prompt, group in zip(batch.prompts, batch.samples, strict=True)
            for sample in group
        ]
        both = [[*row, *text] for row in rows for text in (YES, NO)]
        logprobs = reference.forward(plexrl.Batch(both)).result().logprobs
        odds = [
            float(yes[-len(YES) :].sum() - no[-len(NO) :].sum())
            for yes, no in zip(logprobs[::2], logprobs[1::2], strict=True)
        ]
        assert np.allclose(np.ravel(batch.rewards), 1 / (1 + np.exp(-np.array(odds))), atol=1e-5)
        train(actor, batch.prompts, batch.samples, batch.rewards)
        if batch.version == 0:
            kill_worker(reference, 0)
    assert actor.status()["group"] == reference.status()["group"]


def test_async_controllers_have_judges_too(embedded: EmbeddedCluster) -> None:
    async def control() -> rewards.GradedSamples:
        async with (
            await plexrl.connect_async(embedded.url, embedded.api_key) as cluster,
            await cluster.create_job("judged") as job,
        ):
            reference = await job.reference_deployment("judge", JUDGE)
            judge = await reference.judge(prompt=judged, answers=[(YES, 1.0), (NO, 3.0)])
            graded = rewards.Graded(judge.score, on_failure="raise", at_once=8)
            samples = [[sample_of(5), sample_of(6)], [sample_of(7), sample_of(8)]]
            return await asyncio.to_thread(graded.grade, [[3, 4], [4]], samples)

    found = asyncio.run(control()).rewards
    assert found.shape == (2, 2)
    assert ((found > 1.0) & (found < 3.0)).all()
