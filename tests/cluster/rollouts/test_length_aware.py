"""Length-aware rollouts on a real cluster: what is trained does not depend on where samples are
generated, and what was learned survives `kill -9`."""

from dataclasses import replace

import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.rollout.policies.ranking.ranker import PROMPTS_MIN
from tests.cluster.rollouts.test_asynchronous_rollouts import (
    MODEL,
    PROMPTS,
    SAMPLING,
    check,
    prompts,
    reward,
    train,
)
from tests.cluster.rollouts.test_tail_batching import tail_rollout
from tests.cluster.tools import checkpoint_weights, process_of, wait_until

STEPS = PROMPTS_MIN // PROMPTS + 3
# A third of the samples are as long as they may be, the others are shorter.
SHORT = replace(SAMPLING, max_tokens=36)


def trained(job: plexrl.Job, embedded: EmbeddedCluster, *, is_aware: bool) -> bytes:
    """Weights after `STEPS`; the service is killed when it has learned enough to rank prompts."""
    actor = job.train_deployment("actor", MODEL)
    rollout = tail_rollout(
        job, actor, plexrl.BoundedStaleness(0, length_aware=is_aware), sampling=SHORT
    )

    def learned() -> int:
        return int(rollout.status()["ranked_prompts"])

    batches = []
    for batch in rollout.batches(prompts(), reward, steps=STEPS):
        train(actor, batch.prompts, batch.samples, batch.rewards)
        batches.append(batch)
        if is_aware and len(batches) == STEPS - 2:
            wait_until(lambda: learned() >= PROMPTS_MIN, "nothing is learned")
            process_of(embedded, "plexrl.rollout").kill()
            wait_until(lambda: learned() >= PROMPTS_MIN, "what was learned is lost")
    check(batches, 0)
    assert bool(learned()) == is_aware
    return checkpoint_weights(actor)


# `tests/rollout/test_service_store.py` and `tests/rollout/ranking` have the restarts.
@pytest.mark.slow
def test_length_aware_rollouts_train_what_others_do_and_keep_what_they_learned(
    cluster: plexrl.Cluster, embedded: EmbeddedCluster
) -> None:
    weights = []
    for is_aware in (True, False):
        with cluster.create_job("lengths") as job:
            weights.append(trained(job, embedded, is_aware=is_aware))
    assert weights[0] == weights[1]


def test_the_policy_may_become_length_aware(cluster: plexrl.Cluster) -> None:
    with cluster.create_job("lengths") as job:
        actor = job.train_deployment("actor", MODEL)
        rollout = tail_rollout(job, actor, plexrl.TailBatching(eta=1.5))
        assert not rollout.status()["length_aware"]
        rollout = tail_rollout(job, actor, plexrl.BoundedStaleness(1, length_aware=True))
        assert rollout.status()["length_aware"]
        assert "length_aware=True" in repr(rollout)
