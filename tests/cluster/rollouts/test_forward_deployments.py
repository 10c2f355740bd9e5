"""References, teachers and reward models, in jobs with a trainer."""

import json

import numpy as np
import pytest

import plexrl
from plexrl.errors import InvalidRequestError
from tests.cluster.tools import VOCABULARY, kill_worker, some_batch

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=7, hidden=32)
BATCH = some_batch(3, rows=9)


def step(actor: plexrl.TrainDeployment, seed: int) -> None:
    actor.forward_backward(some_batch(seed), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2).result(120)


def logprobs(model: plexrl.TrainDeployment | plexrl.ReferenceDeployment) -> np.ndarray:
    return np.concatenate(model.forward(BATCH).result(120).logprobs)


def test_a_reference_is_the_trainers_policy_at_the_last_sync(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL, workers=2)
    reference = job.reference_deployment("reference", MODEL, workers=2)
    first = logprobs(reference)
    assert np.allclose(first, logprobs(actor), atol=1e-5)
    step(actor, 1)
    old = logprobs(actor)
    assert np.array_equal(logprobs(reference), first)
    assert reference.sync_weights(actor).result(120)["bytes_moved"] > 0
    step(actor, 2)
    assert np.allclose(logprobs(reference), old, atol=1e-5)
    assert np.abs(logprobs(actor) - old).max() > 1e-3


def test_a_killed_reference_regains_the_weights_of_its_last_sync(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    reference = job.reference_deployment("reference", MODEL, workers=2)
    rollout = job.rollout_deployment("rollout", MODEL)
    step(actor, 1)
    reference.sync_weights(actor).result(120)
    old = logprobs(actor)
    for seed in range(2, 6):
        step(actor, seed)
        rollout.sync_weights(actor).result(120)
    kill_worker(reference, 1)
    assert np.allclose(logprobs(reference), old, atol=1e-5)


def test_unchanged_weights_are_published_once(cluster: plexrl.Cluster) -> None:
    with cluster.create_job("one") as first, cluster.create_job("two") as second:
        references = [job.reference_deployment("r", MODEL, workers=2) for job in (first, second)]
        found = [[logprobs(each) for each in references] for _ in range(4)]
        groups = {each.status()["group"] for each in references}
        rows = cluster.operations(job=first.job)
    assert len(groups) == 1, "the two jobs were to share a group"
    assert all(np.array_equal(each, found[0][0]) for turn in found for each in turn)
    moved = {
        kind: [
            json.loads(row["result_json"]).get("bytes_moved", 0)
            for row in rows
            if row["kind"] == kind and row["state"] == "finished"
        ]
        for kind in ("offload", "load")
    }
    assert len(moved["offload"]) >= 3
    assert moved["offload"][0] > 0
    assert set(moved["offload"][1:]) == {0}
    assert all(nbytes == moved["offload"][0] for nbytes in moved["load"][1:])


def test_scores_keep_the_batchs_order_for_any_number_of_ranks(job: plexrl.Job) -> None:
    one = job.reward_deployment("one", MODEL)
    two = job.reward_deployment("two", MODEL, workers=2)
    wanted = one.score(BATCH).result(120).scores
    assert wanted.shape == (9,)
    assert wanted.dtype == np.float32
    assert len(set(wanted.tolist())) == 9
    assert np.allclose(
        two.score(BATCH, micro_batch_tokens=20).result(120).scores, wanted, atol=1e-5
    )


def test_unsupported_operations_of_a_forward_deployment_are_refused(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    reward = job.reward_deployment("reward", MODEL)
    with pytest.raises(InvalidRequestError, match="load a checkpoint instead"):
        plexrl.ReferenceDeployment(reward._transport, reward.deployment).sync_weights(actor)
    with pytest.raises(InvalidRequestError, match="not an operation of a forward deployment"):
        plexrl.TrainDeployment(reward._transport, reward.deployment).optim_step(learning_rate=1.0)
    scoring = plexrl.tiny_qwen2(VOCABULARY, head="reward")
    with pytest.raises(InvalidRequestError, match="create a reward deployment for it"):
        job.train_deployment("other", scoring)
