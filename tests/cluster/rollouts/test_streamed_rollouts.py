"""Batches that are trained in parts while the rest is generated, and instances that are freed
meanwhile, on a real cluster: beside the same training by whole batches, and with `kill -9`."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

import plexrl
from plexrl.client.blocking.bounded_rollout import BoundedRollout, RolloutBatch
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.errors import ConflictError, InvalidRequestError
from plexrl.wire.messages.rollout_views import RolloutStatus
from tests.cluster.rollouts.test_asynchronous_rollouts import (
    SAMPLING,
    prompts,
    reward,
)
from tests.cluster.tools import checkpoint_weights, process_of, some_batch

PROMPTS, SAMPLES, STEPS = 8, 2, 3
LONG = replace(SAMPLING, max_tokens=240)
# Each token ends a sample with a probability of about 1/150, so a round takes many snapshots.
MODEL = plexrl.tiny_qwen2("".join(map(chr, range(0x4E00, 0x4E00 + 150))), hidden=32, layers=1)
LEARNING_RATE = 1e-3


def rollout_of(
    job: plexrl.Job,
    actor: plexrl.TrainDeployment,
    policy: plexrl.RolloutPolicy,
    *,
    shares_gpus: bool = False,
) -> BoundedRollout:
    return job.rollout(
        "rollout",
        MODEL,
        actor,
        instances=2,
        policy=policy,
        prompts=PROMPTS,
        samples=SAMPLES,
        sampling=LONG,
        shares_gpus=shares_gpus,
    )


def add_gradients(actor: plexrl.TrainDeployment, part: RolloutBatch) -> int:
    """The gradients of a part; returns its rows. The trainer's own logprobs replace the engine's,
    which vary in their last bits with what else the engine runs."""
    advantages = [[each - sum(group) / len(group) for each in group] for group in part.rewards]
    data = plexrl.Batch.from_samples(part.prompts, part.samples, advantages)
    data = data.with_values("logprobs", actor.forward(data).result().logprobs)
    actor.forward_backward(data, plexrl.losses.grpo(reduction="sequence_sum"))
    return len(data)


def step(actor: plexrl.TrainDeployment, rows: int) -> None:
    # Of an element with a gradient near 0, rounding would decide the direction.
    actor.optim_step(learning_rate=LEARNING_RATE, eps=1e-3, divide_by=rows)


Weights = dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]


def by_batches(job: plexrl.Job) -> tuple[list[RolloutBatch], Weights]:
    actor = job.train_deployment("actor", MODEL)
    rollout = rollout_of(job, actor, plexrl.BoundedStaleness(0))
    found = []
    rows = islice(prompts(), STEPS * PROMPTS)
    for batch in rollout.batches(rows, reward, steps=STEPS):
        assert batch.is_last
        step(actor, add_gradients(actor, batch))
        found.append(batch)
    return found, load(checkpoint_weights(actor))


def by_parts(
    job: plexrl.Job, meanwhile: Callable[[RolloutBatch], None] = lambda _: None
) -> tuple[list[RolloutBatch], Weights, RolloutStatus]:
    actor = job.train_deployment("actor", MODEL)
    rollout = rollout_of(job, actor, plexrl.TailBatching(over_launch=1, scale_down=True))
    found, count = [], 0
    rows = islice(prompts(), STEPS * PROMPTS)
    for part in rollout.parts(rows, reward, steps=STEPS):
        count += add_gradients(actor, part)
        meanwhile(part)
        if part.is_last:
            step(actor, count)
            count = 0
        found.append(part)
    return found, load(checkpoint_weights(actor)), rollout.status()


@pytest.fixture(scope="module")
def whole(embedded: EmbeddedCluster) -> tuple[list[RolloutBatch], Weights]:
    """The training by whole batches, with which those by parts are compared."""
    with (
        plexrl.connect(embedded.url, embedded.api_key) as cluster,
        cluster.create_job("whole") as job,
    ):
        return by_batches(job)


def joined(parts: list[RolloutBatch]) -> dict[int, dict[int, list[list[int]]]]:
    """The tokens of all samples, by batch and prompt."""
    found: dict[int, dict[int, list[list[int]]]] = {}
    for part in parts:
        batch = found.setdefault(part.version, {})
        for number, samples in zip(part.prompt_numbers, part.samples, strict=True):
            assert number not in batch, "a prompt is in two parts"
            batch[number] = [each.tokens for each in samples]
    return found


# `test_parts_of_enough_tokens_…` trains a second actor by whole batches, and the tests of tail
# batching kill the service.
@pytest.mark.slow
@pytest.mark.parametrize("kills", [True, False])
def test_parts_of_batches_train_what_whole_batches_train(
    cluster: plexrl.Cluster,
    embedded: EmbeddedCluster,
    whole: tuple[list[RolloutBatch], Weights],
    kills: bool,
) -> None:
    killed = []

    def kill(part: RolloutBatch) -> None:
        if kills and not part.is_last and part.version not in killed:
            process_of(embedded, "plexrl.rollout").kill()
            killed.append(part.version)

    batches, wanted = whole
    with cluster.create_job("parts") as job:
        parts, weights, status = by_parts(job, kill)
    assert len(parts) > STEPS, "no batch came in parts"
    assert [part.version for part in parts if part.is_last] == list(range(STEPS))
    assert bool(killed) == kills
    assert joined(parts) == joined(batches)
    moved = max(np.abs(value - wanted[name]).max() for name, value in weights.items())
    assert moved <= 1e-6
    assert status["scale_downs"], "no instance was freed"
    assert status["in_flight"] == status["waiting"] == 0


@pytest.mark.slow
def test_parts_have_as_many_prompts_as_are_asked_for(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    rollout = rollout_of(job, actor, plexrl.TailBatching(over_launch=1.25, scale_down=True))
    rows = islice(prompts(), STEPS * PROMPTS)
    sizes: dict[int, list[int]] = {}
    count = 0
    for part in rollout.parts(rows, reward, steps=STEPS, prompts_min=3):
        sizes.setdefault(part.version, []).append(len(part.prompts))
        count += add_gradients(actor, part)
        if part.is_last:
            step(actor, count)
            count = 0
    assert [sum(each) for each in sizes.values()] == [PROMPTS] * STEPS
    assert all(size >= 3 for each in sizes.values() for size in each[:-1])
    assert rollout.status()["queued_prompts"] == 0
    wanted = {"trainer_step": STEPS - 1, "seen": [10**6]}
    with pytest.raises(ConflictError, match="since the policy was changed"):
        rollout._ask(f"{rollout._path}/batches/{STEPS - 1}", wanted)


def tokens_of(part: RolloutBatch) -> int:
    return sum(
        len(prompt) + len(each.tokens)
        for prompt, samples in zip(part.prompts, part.samples, strict=True)
        for each in samples
    )


def test_parts_of_enough_tokens_train_as_whole_batches_while_the_next_one_is_generated(
    job: plexrl.Job,
) -> None:
    """A second trainer gets the same samples by whole batches."""
    actor, beside = (job.train_deployment(name, MODEL) for name in ("actor", "beside"))
    rollout = rollout_of(job, actor, plexrl.BoundedStaleness(1))
    rows = islice(prompts(), STEPS * PROMPTS)
    tokens_min = PROMPTS * SAMPLES * LONG.max_tokens // 8
    with pytest.raises(InvalidRequestError, match="tokens_min"):
        rollout.parts(rows, reward, steps=STEPS, tokens_min=-1)
    parts: list[RolloutBatch] = []
    ahead, count = 0, 0
    for part in rollout.parts(rows, reward, steps=STEPS, tokens_min=tokens_min):
        parts.append(part)
        assert part.is_last or tokens_of(part) >= tokens_min
        count += add_gradients(actor, part)
        if part.is_last:
            step(actor, count)
            whole = [each for each in parts if each.version == part.version]
            batch = replace(
                part,
                prompts=[row for each in whole for row in each.prompts],
                samples=[row for each in whole for row in each.samples],
                rewards=[row for each in whole for row in each.rewards],
            )
            step(beside, add_gradients(beside, batch))
            count = 0
        ahead += sum(min(each) < part.version for each in part.sample_versions)
    assert len(parts) > STEPS, "no batch came in parts"
    assert [len(each) for each in joined(parts).values()] == [PROMPTS] * STEPS
    assert ahead, "no sample was generated ahead of the training"
    found, wanted = (
        load(checkpoint_weights(each, name)) for each, name in ((actor, "parts"), (beside, "whole"))
    )
    assert max(np.abs(value - wanted[name]).max() for name, value in found.items()) <= 1e-6


def test_a_policy_with_staleness_frees_no_instances(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    rollout = rollout_of(job, actor, plexrl.TailBatching(scale_down=True))
    order = {**rollout._order, "name": "other", "staleness": 1, "over_launch_prompts": 1}
    order["over_launch_responses"] = 1
    with pytest.raises(InvalidRequestError, match="staleness and scale_down"):
        BoundedRollout(rollout._transport, job.job, order, actor)


@pytest.mark.slow
def test_another_job_trains_on_the_gpus_that_a_rollout_shares(tmp_path: Path) -> None:
    """The trainer and two instances have all three GPUs."""
    running = start_embedded(tmp_path, virtual_gpus=3)
    try:
        with plexrl.connect(running.url, running.api_key) as cluster:
            job, other = cluster.create_job("lender"), cluster.create_job("borrower")
            policy = plexrl.TailBatching(over_launch=1, scale_down=True)
            actor = job.train_deployment("actor", MODEL, exclusive=True)
            rollout = rollout_of(job, actor, policy, shares_gpus=True)
            borrower = other.train_deployment("actor", MODEL)
            beside, rows = 0, islice(prompts(), STEPS * PROMPTS)
            for batch in rollout.batches(rows, reward, steps=STEPS):
                step(actor, add_gradients(actor, batch))
                borrower.forward_backward(some_batch(1), plexrl.losses.cross_entropy())
                beside = borrower.optim_step(learning_rate=1e-3).result(120).trainer_step
            places = [str(each.status()["group"]) for each in (actor, borrower)]
            assert beside == STEPS
            assert places[0] != places[1]
            lenders = [
                job.rollout_deployment(f"rollout-{each}", MODEL, shares_gpus=True)
                for each in (0, 1)
            ]
            assert places[1] in [str(each.status()["group"]) for each in lenders]
            job.finish()
            other.finish()
    finally:
        running.close()
