"""Preemptible generations in the pauses of a trainer, on real processes."""

import time

import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.errors import InvalidRequestError
from tests.cluster.tools import (
    VOCABULARY,
    checkpoint_weights,
    kill_worker,
    process_of,
    some_batch,
    wait_until,
)

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)
SAMPLING = plexrl.SamplingParams(
    max_tokens=250, seed=3, stop_sequences=((4, 4, 4),), ignore_eos=True
)
PROMPTS = [[3, 4, 5], [6, 7], [8]]
STEPS = 4


def evaluated(future: plexrl.GenerateFuture) -> list[list[tuple[list[int], str]]]:
    result = future.result(120)
    return [[(each.tokens, each.finish_reason) for each in samples] for samples in result.samples]


def trained(
    actor: plexrl.TrainDeployment, pause_s: float, steps: range = range(STEPS)
) -> list[float]:
    losses = []
    for number in steps:
        time.sleep(pause_s)
        step = actor.forward_backward(some_batch(number), plexrl.losses.grpo())
        actor.optim_step(learning_rate=1e-2).result(120)
        losses.append(step.result(120).metrics["loss"])
    return losses


def interruptions(job: plexrl.Job) -> int:
    return sum(row["interruptions"] for row in job.operations())


def test_evaluations_in_the_pauses_of_a_trainer_are_those_of_an_undisturbed_run(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster
) -> None:
    with cluster.create_job("alone") as job:
        actor = job.train_deployment("actor", MODEL)
        losses = trained(actor, 0.0)
        weights = checkpoint_weights(actor)
        rollout = job.rollout_deployment("rollout", MODEL, max_sequence_tokens=320)
        rollout.generate([[3]], sampling=SAMPLING).result(120)
        rollout.sync_weights(actor).result(120)
        wanted = evaluated(rollout.generate(PROMPTS, n=2, sampling=SAMPLING))
    with cluster.create_job("shared") as job:
        actor = job.train_deployment("actor", MODEL)
        batch = job.rollout_deployment(
            "evaluation", MODEL, max_sequence_tokens=320, preemptible=True
        )
        before = batch.generate(PROMPTS, n=2, sampling=SAMPLING)
        found = trained(actor, 0.4, range(STEPS // 2))
        assert batch.status()["group"] == actor.status()["group"]
        process_of(embedded, "plexrl.scheduler").kill()
        found += trained(actor, 0.4, range(STEPS // 2, STEPS))
        assert found == losses
        assert checkpoint_weights(actor) == weights
        before.result(120)
        batch.sync_weights(actor).result(120)
        future = batch.generate(PROMPTS, n=2, sampling=SAMPLING)
        wait_until(lambda: future.status()["state"] == "running", "it never runs")
        actor.forward(some_batch(1)).result(120)
        kill_worker(batch, 0)
        assert evaluated(future) == wanted
        assert interruptions(job) >= 1


def test_a_preemptible_deployment_refuses_what_an_interruption_would_break(
    job: plexrl.Job,
) -> None:
    job.train_deployment("actor", MODEL)
    batch = job.rollout_deployment("evaluation", MODEL, preemptible=True)
    with pytest.raises(InvalidRequestError, match="does not stream"):
        batch.generate([[3]], sampling=SAMPLING, stream="rows")
    with pytest.raises(InvalidRequestError, match="in_flight"):
        batch.sync_weights(job.train_deployment("actor", MODEL), in_flight=True)
    with pytest.raises(InvalidRequestError, match="preemptible is for"):
        job.rollout_deployment("other", MODEL, preemptible=True, shares_gpus=True)
