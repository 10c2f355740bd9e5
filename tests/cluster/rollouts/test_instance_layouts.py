"""Instances of an asynchronous rollout with adapters, and with several ranks each."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest

import plexrl
from tests.cluster.rollouts.test_asynchronous_rollouts import (
    MODEL,
    PROMPTS,
    SAMPLES,
    SAMPLING,
    check,
    prompts,
    reward,
    train,
)


@pytest.mark.slow
def test_preemptions_double_the_tensor_ranks_and_change_no_token(job: plexrl.Job) -> None:
    steps = 4
    layout = plexrl.Parallelism(dp=2)
    long = replace(SAMPLING, ignore_eos=True)
    kv_cache_bytes = 768 * 128  # of each worker: 768 tokens
    actor = job.train_deployment("actor", MODEL)
    rollout = job.rollout(
        "rollout",
        MODEL,
        actor,
        instances=1,
        policy=plexrl.TailBatching(1.0, plans_parallelism=True),
        prompts=PROMPTS,
        samples=4,
        sampling=long,
        parallelism=layout,
        kv_cache_bytes=kv_cache_bytes,
    )
    divided = job.rollout_deployment(
        "rollout-0", MODEL, parallelism=layout, kv_cache_bytes=kv_cache_bytes
    )
    alone = job.rollout_deployment("alone", MODEL)
    layouts = []

    def growing() -> Iterator[list[int]]:
        # Samples of the first batch end at the 512 tokens of the model, and later ones grow.
        for number, prompt in enumerate(prompts()):
            yield [*prompt, *[5] * 500] if number < PROMPTS else prompt

    for batch in rollout.batches(growing(), reward, steps=steps):
        alone.sync_weights(actor)
        sampling = replace(long, first_sample=batch.version * PROMPTS * 4)
        drawn = alone.generate(batch.prompts, n=4, sampling=sampling).result().samples
        for row, wanted in zip(batch.samples, drawn, strict=True):
            assert [each.tokens for each in row] == [each.tokens for each in wanted]
        layouts.append(json.loads(divided.status()["spec_json"])["parallelism"]["tp"])
        train(actor, batch.prompts, batch.samples, batch.rewards)
    assert layouts[0] == 1
    assert layouts[-1] == 2


@pytest.mark.parametrize(
    ("layout", "lora"),
    [
        pytest.param(plexrl.Parallelism(tp=2), None, id="tensor", marks=pytest.mark.slow),
        pytest.param(plexrl.Parallelism(dp=2), plexrl.LoraSpec(rank=4, seed=3), id="adapters"),
    ],
)
def test_instances_of_two_ranks_draw_what_one_rank_draws(
    job: plexrl.Job, layout: plexrl.Parallelism, lora: plexrl.LoraSpec | None
) -> None:
    steps = 3
    actor = job.train_deployment("actor", MODEL, lora=lora)
    rollout = job.rollout(
        "rollout",
        MODEL,
        actor,
        instances=2,
        prompts=PROMPTS,
        samples=SAMPLES,
        sampling=SAMPLING,
        lora=lora,
        parallelism=layout,
    )
    alone = job.rollout_deployment("alone", MODEL, lora=lora)
    found = []
    for batch in rollout.batches(islice(prompts(), steps * PROMPTS), reward, steps=steps):
        alone.sync_weights(actor)
        sampling = replace(SAMPLING, first_sample=batch.version * PROMPTS * SAMPLES)
        drawn = alone.generate(batch.prompts, n=SAMPLES, sampling=sampling).result().samples
        for row, wanted in zip(batch.samples, drawn, strict=True):
            assert [each.tokens for each in row] == [each.tokens for each in wanted]
        train(actor, batch.prompts, batch.samples, batch.rewards)
        found.append(batch)
    check(found, 0)
