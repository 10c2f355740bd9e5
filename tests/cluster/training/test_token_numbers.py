"""What a controller may ask of a token's distribution, from the engine and the trainer alike."""

import math

import numpy as np
import pytest

import plexrl
from plexrl.errors import InvalidRequestError
from tests.cluster.tools import VOCABULARY

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]


def test_engine_and_trainer_agree_on_each_number_whatever_the_ranks(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL, workers=2)
    reference = job.reference_deployment("reference", MODEL)
    rollout = job.rollout_deployment("rollout", MODEL, parallelism=plexrl.Parallelism(dp=2))
    sampling = plexrl.SamplingParams(
        max_tokens=5,
        seed=1,
        temperature=0.5,
        sampling_logprobs=True,
        top_logprobs=3,
        prompt_logprobs=True,
        prompt_top_logprobs=2,
    )
    drawn = rollout.generate(PROMPTS, n=2, sampling=sampling).result(120)
    samples = [sample for group in drawn.samples for sample in group]
    rows = [
        [*prompt, *sample.tokens]
        for prompt, group in zip(PROMPTS, drawn.samples, strict=True)
        for sample in group
    ]
    batch = plexrl.Batch(rows)
    for found in (
        actor.forward(batch, entropy=True, top_logprobs=3).result(120),
        reference.forward(batch, entropy=True, top_logprobs=3).result(120),
    ):
        assert found.entropy is not None
        assert found.top_logprobs is not None
        assert drawn.prompt_logprobs is not None
        assert drawn.prompt_top_logprobs is not None
        for index, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            prompt = len(PROMPTS[index // 2])
            assert sample.top_logprobs is not None
            assert sample.sampling_logprobs is not None
            assert np.allclose(found.logprobs[index][prompt:], sample.logprobs, atol=1e-4)
            own = drawn.prompt_logprobs[index // 2]
            assert np.allclose(found.logprobs[index][:prompt], own, atol=1e-4)
            top = found.top_logprobs[index]
            assert np.array_equal(top.ids[prompt:], sample.top_logprobs.ids)
            assert np.allclose(top.logprobs[prompt:], sample.top_logprobs.logprobs, atol=1e-4)
            before = drawn.prompt_top_logprobs[index // 2]
            assert np.array_equal(top.ids[1:prompt, :2], before.ids[1:])
            assert found.entropy[index].shape == (len(row),)
            assert found.entropy[index][1:].min() > 0
            assert found.entropy[index].max() < math.log(len(VOCABULARY) + 3)
            # A lower temperature draws likely tokens more often.
            assert sample.sampling_logprobs.mean() > sample.logprobs.mean() - 0.5
            assert not np.allclose(sample.sampling_logprobs, sample.logprobs, atol=1e-4)
    plain = rollout.generate(PROMPTS, sampling=plexrl.SamplingParams(max_tokens=2)).result(120)
    assert plain.prompt_logprobs is None
    assert plain.samples[0][0].top_logprobs is None
    with pytest.raises(InvalidRequestError, match="ask for at most"):
        actor.forward(batch, top_logprobs=100)
