"""A job whose rollouts are drawn by vLLM, on a cluster of real processes."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest

import plexrl
from plexrl.cluster.embedded.start import start_embedded
from tests.cluster.tools import kill_worker, wait_until
from tests.worker.rollout.vllm.backends import MARKS, PROMPTS, VOCABULARY

pytestmark = MARKS
LIMIT_S = 600.0
"""vLLM takes a minute to start on a loaded machine."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[plexrl.Cluster]:
    running = start_embedded(tmp_path_factory.mktemp("cluster"), virtual_gpus=8)
    try:
        with plexrl.connect(running.url, running.api_key) as connected:
            yield connected
    finally:
        running.close()


@pytest.fixture
def job(cluster: plexrl.Cluster) -> Iterator[plexrl.Job]:
    with cluster.create_job("j") as made:
        yield made


def step(actor: plexrl.TrainDeployment, seed: int) -> None:
    rng = np.random.default_rng(seed)
    completions = [rng.integers(3, 22, 6).tolist() for _ in range(6)]
    batch = plexrl.Batch.from_completions(
        PROMPTS * 2,
        completions,
        logprobs=[rng.normal(-3.0, 0.1, 6) for _ in completions],
        advantages=[np.full(6, rng.normal()) for _ in completions],
    )
    actor.forward_backward(batch, plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2)


def largest_difference(
    actor: plexrl.TrainDeployment, rollout: plexrl.RolloutDeployment, seed: int
) -> float:
    """Between what the engine drew with and what the trainer gives the same tokens."""
    sampling = plexrl.SamplingParams(max_tokens=8, seed=seed, ignore_eos=True)
    found = rollout.generate(PROMPTS, n=3, sampling=sampling).result(LIMIT_S)
    rows = [
        (prompt, sample)
        for prompt, samples in zip(PROMPTS, found.samples, strict=True)
        for sample in samples
    ]
    batch = plexrl.Batch([[*prompt, *sample.tokens] for prompt, sample in rows])
    trained = actor.forward(batch).result(LIMIT_S).logprobs
    return max(
        float(np.abs(logprobs[len(prompt) :] - sample.logprobs).max())
        for (prompt, sample), logprobs in zip(rows, trained, strict=True)
    )


@pytest.mark.parametrize(
    ("dtype", "tp", "tolerance"), [("float32", 1, 1e-4), ("bfloat16", 1, 0.1), ("float32", 2, 1e-4)]
)
def test_every_sync_brings_the_trainers_logprobs(
    job: plexrl.Job, dtype: Literal["float32", "bfloat16"], tp: int, tolerance: float
) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=3, hidden=128)
    actor = job.train_deployment(f"actor-{dtype}-{tp}", model)
    rollout = job.rollout_deployment(
        f"rollout-{dtype}-{tp}",
        model,
        backend="vllm",
        dtype=dtype,
        parallelism=plexrl.Parallelism(tp=tp),
        max_sequence_tokens=40,
        max_concurrent_samples=8,
    )
    assert largest_difference(actor, rollout, 0) < tolerance
    for number in range(3):
        for _ in range(2):
            step(actor, number)
        assert largest_difference(actor, rollout, number) > 2 * tolerance, "it still has old ones"
        rollout.sync_weights(actor, in_flight=number == 1).result(LIMIT_S)
        assert largest_difference(actor, rollout, number) < tolerance
    if tp > 1:
        rollout.set_parallelism(plexrl.Parallelism(dp=2))
        assert largest_difference(actor, rollout, 3) < tolerance


def test_replicas_draw_what_one_torch_engine_draws(job: plexrl.Job) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=4, hidden=128)
    sampling = plexrl.SamplingParams(max_tokens=10, seed=5, ignore_eos=True)
    drawn = []
    for backend, layout in (
        ("torch", plexrl.Parallelism()),
        ("vllm", plexrl.Parallelism(dp=2)),
        ("vllm", plexrl.Parallelism(dp=2, tp=2)),
    ):
        rollout = job.rollout_deployment(
            f"by-{backend}-{layout.tp}",
            model,
            backend=backend,
            max_sequence_tokens=40,
            parallelism=layout,
        )
        found = rollout.generate(PROMPTS, n=2, sampling=sampling).result(LIMIT_S)
        drawn.append([sample.tokens for samples in found.samples for sample in samples])
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_tensor_rank_changes_no_token(job: plexrl.Job, rank: int) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=4, hidden=128)
    rollout = job.rollout_deployment(
        f"rollout-{rank}",
        model,
        backend="vllm",
        max_sequence_tokens=400,
        parallelism=plexrl.Parallelism(tp=2),
    )
    sampling = plexrl.SamplingParams(max_tokens=380, seed=5, ignore_eos=True)
    wanted = rollout.generate(PROMPTS, n=2, sampling=sampling).result(LIMIT_S)
    running = rollout.generate(PROMPTS, n=2, sampling=sampling)
    wait_until(lambda: rollout.status()["engines"][0]["running"] > 0, "nothing runs")
    kill_worker(rollout, rank)
    found = running.result(LIMIT_S)
    assert [[each.tokens for each in row] for row in found.samples] == [
        [each.tokens for each in row] for row in wanted.samples
    ]
    assert rollout.status()["incarnation"] == 2
