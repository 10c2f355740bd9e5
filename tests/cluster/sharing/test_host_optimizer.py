"""Two jobs share a group, one with its optimizer in host memory: same bits, fewer bytes."""

import json
from typing import Any

import pytest

import plexrl
from plexrl.errors import InvalidRequestError
from tests.cluster.tools import VOCABULARY, checkpoint_weights, some_batch

STEPS = 4


def train(actor: plexrl.TrainDeployment, step: int) -> float:
    actor.forward_backward(some_batch(step), plexrl.losses.grpo())
    return actor.optim_step(learning_rate=1e-2, grad_clip_norm=1.0).result().metrics["grad_norm"]


def moved(cluster: plexrl.Cluster, job: plexrl.Job, kind: str) -> list[int]:
    """Bytes of each state move of a job."""
    rows = cluster.operations(job=job.job)
    found: list[dict[str, Any]] = [
        json.loads(row["result_json"])
        for row in rows
        if row["kind"] == kind and row["state"] == "finished"
    ]
    return [result["bytes_moved"] for result in found if "bytes_moved" in result]


@pytest.mark.slow
def test_host_and_device_optimizers_share_a_group(two_gpus: plexrl.Cluster) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=3)
    with two_gpus.create_job("one") as first, two_gpus.create_job("two") as second:
        in_host = first.train_deployment("actor", model, workers=2, optimizer="host")
        on_device = second.train_deployment("actor", model, workers=2)
        norms = [[train(each, step) for each in (in_host, on_device)] for step in range(STEPS)]
        weights = [checkpoint_weights(each) for each in (in_host, on_device)]
        groups = {each.status()["group"] for each in (in_host, on_device)}
        out = [moved(two_gpus, job, "offload") for job in (first, second)]
        back = [moved(two_gpus, job, "load") for job in (first, second)]
    assert len(groups) == 1, "the two jobs were to share a group"
    assert all(one == other for one, other in norms)
    assert weights[0] == weights[1]
    assert any(out[0]), "nothing was offloaded"
    for host, device in (*zip(*out, strict=False), *zip(*back, strict=False)):
        assert 3 * host <= device + 64 * 1024


def test_a_rollout_has_no_optimizer(two_gpus: plexrl.Cluster) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY)
    with (
        two_gpus.create_job("careless") as job,
        pytest.raises(InvalidRequestError, match="optimizer"),
    ):
        job._deploy("rollout", "rollout", model, {"optimizer": "host"})
