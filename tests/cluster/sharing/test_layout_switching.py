"""Deployments with different layouts share one node group without changing a bit."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import plexrl
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import parameter_count
from tests.cluster.tools import VOCABULARY, checkpoint_weights, some_batch

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=3, hidden=32)
LAYOUTS = (Parallelism(dp=2), Parallelism(tp=2))


@dataclass
class Outcome:
    """All results of a training."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    logprobs: list[np.ndarray[Any, Any]] = field(default_factory=list)
    weights: bytes = b""

    def step(self, actor: plexrl.TrainDeployment, index: int) -> None:
        """Run one step to its end."""
        trained = actor.forward_backward(some_batch(index), plexrl.losses.grpo())
        stepped = actor.optim_step(learning_rate=1e-2, grad_clip_norm=1.0).result()
        self.metrics.append({**trained.result().metrics, **stepped.metrics})
        self.logprobs += list(trained.result().logprobs)


def alone(cluster: plexrl.Cluster, layout: Parallelism, steps: int) -> Outcome:
    """A training on GPUs of its own."""
    found = Outcome()
    with cluster.create_job("alone") as job:
        actor = job.train_deployment("actor", MODEL, parallelism=layout, exclusive=True)
        for index in range(steps):
            found.step(actor, index)
        found.weights = checkpoint_weights(actor)
    return found


@pytest.mark.parametrize("switches", [7, pytest.param(51, marks=pytest.mark.slow)])
def test_layouts_that_share_a_group_compute_the_same_bits_as_alone(
    cluster: plexrl.Cluster, switches: int
) -> None:
    steps = switches // 2 + 1
    wanted = [alone(cluster, layout, steps) for layout in LAYOUTS]
    found = [Outcome() for _ in LAYOUTS]
    with cluster.create_job("one") as first, cluster.create_job("two") as second:
        jobs = (first, second)
        actors = [
            job.train_deployment("actor", MODEL, parallelism=layout)
            for job, layout in zip(jobs, LAYOUTS, strict=True)
        ]
        for index in range(steps):
            for actor, outcome in zip(actors, found, strict=True):
                outcome.step(actor, index)
        groups = {actor.status()["group"] for actor in actors}
        rows = [row for job in jobs for row in cluster.operations(job=job.job)]
        for actor, outcome in zip(actors, found, strict=True):
            outcome.weights = checkpoint_weights(actor)

    assert len(groups) == 1, "the two deployments were to share a group"
    offloads = [row for row in rows if row["kind"] == "offload" and row["state"] == "finished"]
    assert len(offloads) >= switches
    for mine, its in zip(found, wanted, strict=True):
        assert mine.metrics == its.metrics
        assert all(np.array_equal(a, b) for a, b in zip(mine.logprobs, its.logprobs, strict=True))
        assert mine.weights == its.weights
    # Both train the same model on the same batches, so what differs is rounding alone.
    losses = [[row["loss"] for row in outcome.metrics] for outcome in found]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2, abs=1e-3)


def test_a_rollout_pulls_from_tensor_ranks_and_agrees_with_them(cluster: plexrl.Cluster) -> None:
    with cluster.create_job("sync") as job:
        actor = job.train_deployment("actor", MODEL, parallelism=Parallelism(tp=2))
        rollout = job.rollout_deployment("rollout", MODEL)
        outcome = Outcome()
        for index in range(2):
            outcome.step(actor, index)
        moved = rollout.sync_weights(actor).result()
        sampling = plexrl.SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
        prompts = [[3, 4, 5], [6, 7, 8, 9]]
        samples = rollout.generate(prompts, n=2, sampling=sampling).result().samples
        flat = [(p, s) for p, group in zip(prompts, samples, strict=True) for s in group]
        batch = plexrl.Batch([[*p, *s.tokens] for p, s in flat])
        trained = actor.forward(batch).result().logprobs
        # One data rank loads the checkpoint that tensor ranks wrote.
        actor.save_checkpoint("end").result(120)
        single = job.train_deployment("single", MODEL)
        single.load_checkpoint("end").result(120)
        assert checkpoint_weights(single, "again") == checkpoint_weights(actor, "end-too")
    assert moved["bytes_moved"] == 4 * parameter_count(MODEL)
    for (prompt, sample), logprobs in zip(flat, trained, strict=True):
        assert abs(logprobs[len(prompt) :] - sample.logprobs).max() < 1e-4
