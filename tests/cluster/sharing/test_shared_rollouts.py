"""Rollouts that share GPUs: with those of another job, and with the training of their own job. The
same samples, rewards and updates come out as with GPUs of their own, also after `kill -9`."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import plexrl
from tests.cluster.tools import VOCABULARY, kill_worker

STEPS = 2
MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=6)
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11], [12]]


def demand(busy_s: float) -> plexrl.DemandTrace:
    return plexrl.DemandTrace(
        period_s=10.0, segments=(plexrl.Segment(offset_s=0.0, duration_s=busy_s),)
    )


@dataclass
class Trainee:
    """A synchronous job."""

    seed: int
    actor: plexrl.TrainDeployment
    rollout: plexrl.RolloutDeployment
    generation: plexrl.GenerateFuture | None = None
    history: list[tuple[list[list[int]], list[float], float]] = field(default_factory=list)
    """Of each step: the samples, their rewards and the norm of the gradients."""

    def begin_step(self) -> None:
        sampling = plexrl.SamplingParams(
            max_tokens=24, seed=100 * self.seed + len(self.history), ignore_eos=True
        )
        self.rollout.sync_weights(self.actor)
        self.generation = self.rollout.generate(PROMPTS, n=2, sampling=sampling)

    def end_step(self) -> None:
        assert self.generation is not None, "no step has begun"
        groups = self.generation.result(120).samples
        rewards = [[float(sum(each.tokens) % 7) for each in group] for group in groups]
        advantages = [[each - float(np.mean(group)) for each in group] for group in rewards]
        batch = plexrl.Batch.from_samples(PROMPTS, groups, advantages)
        self.actor.forward_backward(batch, plexrl.losses.grpo())
        norm = self.actor.optim_step(learning_rate=1e-2).result(120).metrics["grad_norm"]
        tokens = [each.tokens for group in groups for each in group]
        self.history.append((tokens, [each for group in rewards for each in group], norm))


def trained(trainees: Sequence[Trainee], *, killed: int | None = None) -> None:
    """All steps of all jobs; `killed`: the step in which the first rollout loses its worker."""
    for step in range(STEPS):
        for each in trainees:
            each.begin_step()
        for each in trainees:
            if step == killed and each is trainees[0]:
                kill_worker(each.rollout, 0)
            each.end_step()


def groups_of(trainee: Trainee) -> tuple[str, str]:
    return str(trainee.actor.status()["group"]), str(trainee.rollout.status()["group"])


def gpus_held(trainees: Sequence[Trainee]) -> int:
    """GPUs of all groups of these jobs, each with one GPU."""
    return len({group for each in trainees for group in groups_of(each)})


@pytest.mark.slow
def test_two_jobs_whose_rollouts_share_a_gpu_train_as_with_their_own(
    cluster: plexrl.Cluster,
) -> None:
    histories, held = {}, {}
    for shares in (False, True):
        with ExitStack() as scope:
            trainees = []
            for seed in (1, 2):
                job = scope.enter_context(cluster.create_job(f"job-{seed}"))
                actor = job.train_deployment("actor", MODEL, exclusive=True)
                rollout = job.rollout_deployment(
                    "rollout", MODEL, shares_gpus=shares, trace=demand(3.0) if shares else None
                )
                trainees.append(Trainee(seed, actor, rollout))
            trained(trainees, killed=1 if shares else None)
            histories[shares] = [each.history for each in trainees]
            held[shares] = gpus_held(trainees)
            names = [each.rollout.deployment for each in trainees]
            rows = {str(row["job"]): row for row in cluster.sharing()}
            used = [rows[name.split("/")[0]] for name in names]
            moves = [
                row
                for name in names
                for row in cluster.operations(deployment=name)
                if row["kind"] in ("load", "offload")
            ]
    assert histories[True] == histories[False]
    assert held == {False: 4, True: 3}
    assert all(row["held_gpu_seconds"] < row["reserved_gpu_seconds"] for row in used)
    assert {row["kind"] for row in moves} == {"load", "offload"}, "the rollouts took no turns"
    assert all((row["compute_s"] or 0.0) > 0.0 for row in moves), "the cost of a turn is not known"


def test_a_job_trains_on_the_gpu_of_its_rollout_as_on_gpus_of_its_own(
    cluster: plexrl.Cluster,
) -> None:
    histories, held = [], []
    for shares in (False, True):
        with cluster.create_job("turns", gang=2) as job:
            actor = job.train_deployment("actor", MODEL, trace=demand(3.0), exclusive=not shares)
            rollout = job.rollout_deployment(
                "rollout", MODEL, shares_gpus=shares, trace=demand(6.0) if shares else None
            )
            trainee = Trainee(3, actor, rollout)
            trained([trainee], killed=1 if shares else None)
            histories.append(trainee.history)
            held.append(gpus_held([trainee]))
            explained: Any = job.explain()
            ways = [each["placement"]["way"] for each in explained["deployments"]]
    assert histories[1] == histories[0]
    assert held == [2, 1]
    assert "colocated" in ways
