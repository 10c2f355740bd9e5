"""Instances of an asynchronous rollout with adapters, and with several ranks each."""

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
