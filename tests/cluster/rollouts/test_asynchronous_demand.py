"""The scheduler's profile of a real job whose rollouts generate while its trainer trains."""

from itertools import pairwise
from typing import Any

import pytest

import plexrl
from tests.cluster.tools import VOCABULARY, some_batch

STEPS = 8
SAMPLING = plexrl.SamplingParams(max_tokens=64, seed=3, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("pushes", [True, False])
def test_the_profile_of_an_asynchronous_job_is_one_step(job: plexrl.Job, pushes: bool) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=4)
    actor = job.train_deployment("actor", model, workers=1)
    rollouts = [job.rollout_deployment(f"rollout-{number}", model) for number in range(2)]
    for rollout in rollouts:
        rollout.sync_weights(actor).result(120)
    ahead = [rollout.generate([[3, 4, 5]], n=2, sampling=SAMPLING) for rollout in rollouts]
    for step in range(STEPS):
        generated, ahead = ahead, []
        for number, rollout in enumerate(rollouts):
            generated[number].result(120)
            if step:
                # Each rollout pulls, and generates its part of the next batch.
                rollout.sync_weights(actor, published=pushes)
            ahead.append(rollout.generate([[3, 4, 5]], n=2, sampling=SAMPLING))
        actor.forward_backward(some_batch(step), plexrl.losses.grpo())
        done = actor.optim_step(learning_rate=1e-4)
        if pushes:
            actor.publish()
        assert done.result(120)
    for future in ahead:
        future.result(120)
    actor.barrier().result(120)
    trained: Any = next(
        each for each in job.explain()["deployments"] if each["deployment"] == actor.deployment
    )
    profile = trained["profile"]
    operations: list[Any] = [
        each for each in job.operations() if each["deployment"] == actor.deployment
    ]
    steps = [each for each in operations if each["kind"] == "optim_step"]
    publishes = [each for each in operations if each["kind"] == "publish"]
    assert len(publishes) == (STEPS + 2 if pushes else 2 * STEPS)
    # The period of the profile is that of the steps, not that of the publishes.
    gaps = sorted(b["finished_at"] - a["finished_at"] for a, b in pairwise(steps))
    assert gaps[0] <= profile["period_s"] <= gaps[-1]
    assert 0 < profile["busy_s"] <= profile["period_s"]
    assert trained["waiting_part"] <= 0.3
