"""The layouts of PlexRL Table 1 on a cluster, with the size 2 for each axis that has one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import plexrl
from plexrl.cluster.embedded.start import start_embedded
from plexrl.wire.tensors import Array
from tests.cluster.tools import some_batch
from tests.cluster.training.test_experts import (
    NEEDS_MEGATRON,
    PROMPTS,
    SAMPLING,
    model_of,
)

LAYOUTS = {
    "30B": plexrl.Parallelism(tp=2, ep=2, cp=2, dp=2),
    "235B": plexrl.Parallelism(tp=2, ep=2, cp=2, pp=2),
}


@pytest.fixture
def wide_job(tmp_path: Path) -> Iterator[plexrl.Job]:
    """A job on ten GPUs: eight that train, and two that generate at the same time."""
    running = start_embedded(tmp_path, virtual_gpus=10)
    try:
        with (
            plexrl.connect(running.url, running.api_key) as connected,
            connected.create_job("wide") as made,
        ):
            yield made
    finally:
        running.close()


@pytest.mark.slow
@NEEDS_MEGATRON
def test_both_layouts_train_sync_and_load_each_others_checkpoints(wide_job: plexrl.Job) -> None:
    model = model_of("two layers")
    rollout = wide_job.rollout_deployment("rollout", model, parallelism=plexrl.Parallelism(tp=2))
    batch = some_batch(1)
    earlier: tuple[str, plexrl.TrainDeployment] | None = None
    for name, layout in LAYOUTS.items():
        actor = wide_job.train_deployment(name, model, backend="megatron", parallelism=layout)
        if earlier is not None:
            other, trained = earlier
            actor.load_checkpoint(f"{other}-end").result(300)
            digests = [
                rollout.sync_weights(each, digest=True).result(300)["digest"]
                for each in (trained, actor)
            ]
            assert digests[0] == digests[1], "the same bits under either layout"
            for each in (trained, actor):
                train(each, batch)
            pairs = zip(logprobs(actor, batch), logprobs(trained, batch), strict=True)
            assert max(float(np.abs(one - two).max()) for one, two in pairs) < 1e-4
        train(actor, batch)
        actor.save_checkpoint(f"{name}-end").result(300)
        check_samples(rollout, actor)
        earlier = name, actor


def train(actor: plexrl.TrainDeployment, batch: plexrl.Batch) -> None:
    actor.forward_backward(batch, plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2, grad_clip_norm=1.0).result(300)


def logprobs(actor: plexrl.TrainDeployment, batch: plexrl.Batch) -> list[Array]:
    return list(actor.forward(batch).result(300).logprobs)


def check_samples(rollout: plexrl.RolloutDeployment, actor: plexrl.TrainDeployment) -> None:
    """The rollout draws with the actor's weights: their log-probabilities agree."""
    rollout.sync_weights(actor).result(300)
    samples = rollout.generate(PROMPTS, n=1, sampling=SAMPLING).result(300).samples
    batch = plexrl.Batch.from_samples(PROMPTS, samples, np.ones((len(PROMPTS), 1)))
    flat = [(p, s) for p, row in zip(PROMPTS, samples, strict=True) for s in row]
    for (prompt, sample), found in zip(flat, logprobs(actor, batch), strict=True):
        assert np.abs(found[len(prompt) :] - sample.logprobs).max() < 1e-4
