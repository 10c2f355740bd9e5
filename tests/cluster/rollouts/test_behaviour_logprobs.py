"""The logprobs of the policy that drew a token, after temperature, top_k and top_p, come with every
way to generate."""

from dataclasses import replace

import numpy as np
import pytest

import plexrl
from plexrl.errors import InvalidRequestError
from tests.cluster.tools import VOCABULARY

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)
PROMPTS = [[3, 4], [5, 6, 7]]
SAMPLING = plexrl.SamplingParams(
    max_tokens=12, temperature=0.7, top_p=0.9, top_k=6, seed=3, sampling_logprobs=True
)


def policy_of(sample: plexrl.Sample) -> list[float]:
    assert sample.sampling_logprobs is not None
    assert len(sample.sampling_logprobs) == len(sample.tokens)
    # Fewer tokens to choose from, and a colder distribution: another one than the model's own.
    assert not np.allclose(sample.sampling_logprobs, sample.logprobs)
    return [float(value) for value in sample.sampling_logprobs]


def test_streams_of_rows_and_asynchronous_rollouts_bring_them_too(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    rollout = job.rollout_deployment("rollout", MODEL)
    wanted = rollout.generate(PROMPTS, n=2, sampling=SAMPLING).result(120).samples
    streamed = rollout.generate(PROMPTS, n=2, sampling=SAMPLING, stream="rows")
    found = {(prompt, number): sample for prompt, number, sample in streamed.samples()}
    bounded = job.rollout(
        *("bounded", MODEL, actor),
        instances=1,
        policy=plexrl.BoundedStaleness(0),
        prompts=len(PROMPTS),
        samples=2,
        sampling=SAMPLING,
    )
    (batch,) = bounded.batches(PROMPTS, lambda _, sample: float(len(sample.tokens)), steps=1)
    for prompt, group in enumerate(wanted):
        for number, sample in enumerate(group):
            for other in (found[prompt, number], batch.samples[prompt][number]):
                assert other.tokens == sample.tokens
                assert np.allclose(policy_of(other), policy_of(sample), atol=1e-5)
    plain = replace(SAMPLING, sampling_logprobs=False)
    futures = rollout.generate(PROMPTS, sampling=plain, stream="rows").samples()
    assert all(sample.sampling_logprobs is None for _, _, sample in futures)


def test_what_an_asynchronous_rollout_does_not_keep_is_refused(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)

    def make(sampling: plexrl.SamplingParams) -> None:
        job.rollout(
            *("rollout", MODEL, actor),
            instances=1,
            prompts=2,
            samples=2,
            sampling=sampling,
        )

    with pytest.raises(InvalidRequestError, match="sampling_logprobs of drawn tokens only"):
        make(replace(SAMPLING, top_logprobs=2))
