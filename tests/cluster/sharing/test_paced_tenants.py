"""Two paced tenants on one training group, and `kill -9` of a worker of each: no bit differs."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import plexrl
from plexrl.cluster.embedded.start import start_embedded
from tests.cluster.tools import kill_worker

PACE = "published:7b@0.003"
STEPS = 5
Kill = Callable[[plexrl.TrainDeployment, plexrl.RolloutDeployment], None]


def run(cluster: plexrl.Cluster, seed: int, kills: dict[int, Kill]) -> str:
    """A digest of all that a job of `STEPS` steps gave."""
    digest = hashlib.sha256()
    model = plexrl.tiny_qwen2("0123456789", seed=seed)
    with cluster.create_job(f"tenant-{seed}") as job:
        actor = job.train_deployment("actor", model, workers=2, pace=PACE)
        rollout = job.rollout_deployment("rollout", model, pace=PACE)
        for step in range(STEPS):
            prompts = [[3 + (step + each) % 10] * 4 for each in range(4)]
            sampling = plexrl.SamplingParams(max_tokens=64, seed=step)
            drawing = rollout.generate(prompts, n=4, sampling=sampling)
            if step in kills:
                kills[step](actor, rollout)
            samples = drawing.result(120).samples
            scores = [[len(each.tokens) / 64 for each in group] for group in samples]
            batch = plexrl.Batch.from_samples(prompts, samples, np.array(scores))
            logprobs = actor.forward(batch).result(120).logprobs
            loss = actor.forward_backward(batch, plexrl.losses.grpo()).result(120)
            done = actor.optim_step(learning_rate=1e-2).result(120)
            synced = rollout.sync_weights(actor, digest=True).result(120)
            found = [[each.tokens for each in group] for group in samples]
            digest.update(repr((found, loss.metrics, done.metrics, synced)[:3]).encode())
            digest.update(np.concatenate(logprobs).tobytes())
    return digest.hexdigest()


@pytest.mark.slow
def test_two_paced_tenants_and_killed_workers_give_the_results_of_each_alone(
    tmp_path: Path,
) -> None:
    embedded = start_embedded(tmp_path, virtual_gpus=4)
    try:
        with plexrl.connect(embedded.url, embedded.api_key) as cluster:
            alone = [run(cluster, seed, {}) for seed in (1, 2)]
            kills: list[dict[int, Kill]] = [
                {2: lambda _, rollout: kill_worker(rollout, 0)},
                {3: lambda actor, _: kill_worker(actor, 1)},
            ]
            with ThreadPoolExecutor() as pool:
                shared = list(pool.map(run, [cluster] * 2, (1, 2), kills))
    finally:
        embedded.close()
    assert shared == alone
    assert shared[0] != shared[1]
