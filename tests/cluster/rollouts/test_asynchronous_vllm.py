"""Asynchronous rollouts whose instances are vLLM engines, on a cluster of real processes."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import plexrl
from plexrl.client.blocking.bounded_rollout import BoundedRollout, RolloutBatch
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.worker.models import build_model
from tests.cluster.rollouts.test_asynchronous_rollouts import (
    PROMPTS,
    SAMPLES,
    check,
    prompts,
    reward,
    train,
)
from tests.cluster.tools import kill_worker, wait_until
from tests.worker.rollout.vllm.backends import MARKS, logprobs_by

pytestmark = MARKS
VOCABULARY = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MODEL = plexrl.tiny_qwen2(VOCABULARY, hidden=128, layers=1)
"""vLLM's kernels need heads of 32 elements."""
SAMPLING = plexrl.SamplingParams(max_tokens=120, seed=7)
ENGINE: dict[str, Any] = {
    "backend": "vllm",
    "max_sequence_tokens": 160,
    "max_concurrent_samples": 3,
    "kv_cache_bytes": 1 << 22,
}
TOLERANCE = 1e-4
"""Between a logprob that vLLM drew with and that of a plain forward, in float32."""


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    running = start_embedded(tmp_path_factory.mktemp("cluster"), virtual_gpus=8)
    yield running
    running.close()


def asynchronous(
    job: plexrl.Job,
    actor: plexrl.TrainDeployment,
    staleness: int,
    sampling: plexrl.SamplingParams = SAMPLING,
) -> BoundedRollout:
    return job.rollout(
        "rollout",
        MODEL,
        actor,
        instances=2,
        policy=plexrl.BoundedStaleness(staleness),
        prompts=PROMPTS,
        samples=SAMPLES,
        sampling=sampling,
        **ENGINE,
    )


def saved(actor: plexrl.TrainDeployment, version: int) -> Any:
    """The trainer's model of now, computed with by `transformers`."""
    path = Path(actor.save_checkpoint(f"version-{version}").result(120)["path"])
    model = build_model(MODEL)
    model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    return model


def largest_error(batch: RolloutBatch, models: dict[int, Any]) -> float:
    """How far a token's logprob is from that of the version which is recorded for it, at most."""
    errors = [0.0]
    for prompt, samples in zip(batch.prompts, batch.samples, strict=True):
        for sample in samples:
            ends = [*(span.start for span in sample.weights[1:]), len(sample.tokens)]
            for span, end in zip(sample.weights, ends, strict=True):
                wanted = logprobs_by(models[span.version], prompt, sample.tokens)
                errors.append(np.abs(wanted - sample.logprobs)[span.start : end].max())
    return float(max(errors))


def test_vllm_instances_keep_the_bound_and_draw_with_the_versions_that_they_record(
    embedded: EmbeddedCluster,
) -> None:
    models, batches = dict[int, Any](), list[RolloutBatch]()
    with (
        plexrl.connect(embedded.url, embedded.api_key) as cluster,
        cluster.create_job("bound") as job,
    ):
        actor = job.train_deployment("actor", MODEL)
        rollout = asynchronous(job, actor, 1)
        for batch in rollout.batches(prompts(), reward, steps=6):
            models[batch.version] = saved(actor, batch.version)
            assert largest_error(batch, models) < TOLERANCE
            train(actor, batch.prompts, batch.samples, batch.rewards)
            batches.append(batch)
        assert rollout.status()["dropped"] == 0
    check(batches, 1)
    spans = [s for b in batches for row in b.samples for each in row for s in each.weights]
    assert {span.version for span in spans} >= {0, 1, 2}, "later versions were pulled"
    ages = [b.version - old for b in batches for row in b.sample_versions for old in row]
    assert max(ages) == 1, "generation ran ahead of training"
    # One step moves logprobs by more than the tolerance, so a wrong version would be seen.
    wrong = {version: models[max(0, version - 1)] for version in models}
    assert max(largest_error(batch, wrong) for batch in batches[1:]) > 10 * TOLERANCE


class Killer(threading.Thread):
    """Kills one instance, then the other, each while it draws tokens."""

    def __init__(self, job: plexrl.Job) -> None:
        super().__init__(daemon=True)
        self._job = job
        self.killed: list[str] = []

    def run(self) -> None:
        for name in ("rollout-0", "rollout-1"):
            instance = self._job.rollout_deployment(name, MODEL, **ENGINE)
            wait_until(partial(running, instance), f"{name} draws nothing")
            kill_worker(instance, 0)
            self.killed.append(name)


def running(instance: plexrl.RolloutDeployment) -> bool:
    """Whether an instance draws tokens now."""
    engines = instance.status()["engines"]
    return bool(engines and engines[0]["running"])


def test_killed_vllm_instances_change_no_token(embedded: EmbeddedCluster) -> None:
    long, steps = replace(SAMPLING, ignore_eos=True), 4
    with plexrl.connect(embedded.url, embedded.api_key) as cluster:
        with cluster.create_job("killed") as job:
            actor = job.train_deployment("actor", MODEL)
            rollout = asynchronous(job, actor, 0, long)
            killer = Killer(job)
            killer.start()
            batches = []
            for batch in rollout.batches(prompts(), reward, steps=steps):
                train(actor, batch.prompts, batch.samples, batch.rewards)
                batches.append(batch)
            killer.join(1)
            assert killer.killed == ["rollout-0", "rollout-1"]
            assert rollout.status()["dropped"] == 0
        check(batches, 0)
        with cluster.create_job("undisturbed") as job:
            actor = job.train_deployment("actor", MODEL)
            by_torch = job.rollout_deployment("rollout", MODEL)
            rows = prompts()
            for step in range(steps):
                by_torch.sync_weights(actor)
                asked = [next(rows) for _ in range(PROMPTS)]
                sampling = replace(long, first_sample=step * PROMPTS * SAMPLES)
                samples = by_torch.generate(asked, n=SAMPLES, sampling=sampling).result().samples
                drawn = [[each.tokens for each in row] for row in batches[step].samples]
                assert drawn == [[each.tokens for each in row] for row in samples]
                rewards = [
                    [reward(p, s) for s in row] for p, row in zip(asked, samples, strict=True)
                ]
                train(actor, asked, samples, rewards)
