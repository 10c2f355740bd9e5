"""Megatron deployments among others: weights, checkpoints and GPUs change hands."""

import importlib.util

import numpy as np
import pytest
from safetensors.numpy import load

import plexrl
from plexrl.model.spec import parameter_count
from tests.cluster.tools import VOCABULARY, checkpoint_weights, some_batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=3)


def step(actor: plexrl.TrainDeployment, index: int) -> float:
    trained = actor.forward_backward(some_batch(index), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2, grad_clip_norm=1.0)
    return trained.result(120).metrics["loss"]


@pytest.mark.parametrize(
    "layout",
    [plexrl.Parallelism(tp=2, pp=2), plexrl.Parallelism(dp=2, cp=2)],
    ids=lambda layout: layout.describe(),
)
def test_a_rollout_and_another_backend_continue_from_megatrons_weights(
    cluster: plexrl.Cluster, layout: plexrl.Parallelism
) -> None:
    with cluster.create_job("sync") as job:
        actor = job.train_deployment("actor", MODEL, backend="megatron", parallelism=layout)
        rollout = job.rollout_deployment("rollout", MODEL)
        for index in range(2):
            step(actor, index)
        moved = rollout.sync_weights(actor).result(120)
        sampling = plexrl.SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
        prompts = [[3, 4, 5], [6, 7, 8, 9]]
        samples = rollout.generate(prompts, n=2, sampling=sampling).result(120).samples
        flat = [(p, s) for p, group in zip(prompts, samples, strict=True) for s in group]
        batch = plexrl.Batch([[*p, *s.tokens] for p, s in flat])
        trained = actor.forward(batch).result(120).logprobs
        actor.save_checkpoint("end").result(120)
        other = job.train_deployment("other", MODEL, workers=2)
        other.load_checkpoint("end").result(120)
        # The files have their tensors in the order of each backend's memory.
        again, end = (
            load(checkpoint_weights(deployment, name))
            for deployment, name in ((other, "again"), (actor, "end-too"))
        )
        assert again.keys() == end.keys()
        assert all(np.array_equal(again[name], value) for name, value in end.items())
        # The optimizer's state was restored too: the next step is equal up to rounding.
        assert step(other, 7) == pytest.approx(step(actor, 7), abs=1e-5)
        assert step(other, 8) == pytest.approx(step(actor, 8), abs=1e-4)
    # Tied embeddings are on two stages, and are transferred once.
    assert moved["bytes_moved"] == 4 * parameter_count(MODEL)
    for (prompt, sample), logprobs in zip(flat, trained, strict=True):
        assert np.abs(logprobs[len(prompt) :] - sample.logprobs).max() < 1e-4


def test_switching_between_megatron_and_fsdp_changes_no_bit(cluster: plexrl.Cluster) -> None:
    layout = plexrl.Parallelism(pp=2)

    def train(job: plexrl.Job, *, exclusive: bool) -> plexrl.TrainDeployment:
        return job.train_deployment(
            "actor", MODEL, backend="megatron", parallelism=layout, exclusive=exclusive
        )

    with cluster.create_job("alone") as job:
        alone = train(job, exclusive=True)
        wanted = [step(alone, index) for index in range(4)]
        weights = checkpoint_weights(alone)
    with cluster.create_job("one") as first, cluster.create_job("two") as second:
        actor, rival = (
            train(first, exclusive=False),
            second.train_deployment("actor", MODEL, workers=2),
        )
        found = []
        for index in range(4):
            found.append(step(actor, index))
            step(rival, index)
        rows = cluster.operations(job=first.job)
        assert checkpoint_weights(actor) == weights
    assert found == wanted
    switches = [row for row in rows if row["kind"] == "offload" and row["state"] == "finished"]
    assert len(switches) >= 3
