"""A rollout on several GPUs draws the same tokens as on one, also after lost ranks."""

from collections.abc import Sequence

import numpy as np
import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.errors import InvalidRequestError, LayoutError
from tests.cluster.tools import (
    VOCABULARY,
    kill_worker,
    paused_in_the_middle,
    process_of,
    some_batch,
    wait_until,
)

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12], [4, 4], [5]]
GREEDY = plexrl.SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = plexrl.SamplingParams(max_tokens=24, seed=11, ignore_eos=True)


def drawn(rollout: plexrl.RolloutDeployment) -> list[list[int]]:
    """Tokens of greedy samples and of random ones."""
    futures = [
        rollout.generate(PROMPTS, n=n, sampling=sampling)
        for n, sampling in ((1, GREEDY), (3, SAMPLED))
    ]
    return [
        sample.tokens
        for future in futures
        for samples in future.result(120).samples
        for sample in samples
    ]


def train_and_sync(
    actor: plexrl.TrainDeployment, rollouts: Sequence[plexrl.RolloutDeployment], seed: int
) -> None:
    """One step on some batch, and its weights for each rollout."""
    actor.forward_backward(some_batch(seed), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2)
    for rollout in rollouts:
        rollout.sync_weights(actor)


@pytest.mark.parametrize(
    "layout",
    [
        plexrl.Parallelism(dp=2, tp=2),
        # Each is a part of the other one.
        pytest.param(plexrl.Parallelism(tp=2), marks=pytest.mark.slow),
        pytest.param(plexrl.Parallelism(dp=2), marks=pytest.mark.slow),
    ],
    ids=lambda layout: layout.describe(),
)
def test_a_layout_draws_what_one_worker_draws_before_and_after_a_sync(
    job: plexrl.Job, layout: plexrl.Parallelism
) -> None:
    actor = job.train_deployment("actor", MODEL)
    alone = job.rollout_deployment("alone", MODEL)
    split = job.rollout_deployment("split", MODEL, parallelism=layout)
    before = drawn(split)
    assert before == drawn(alone)
    actor.forward_backward(some_batch(1), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2)
    moved = split.sync_weights(actor).result(120)
    whole = alone.sync_weights(actor).result(120)
    assert whole["bytes_moved"] * layout.dp <= moved["bytes_moved"]
    assert moved["bytes_moved"] < 1.05 * layout.dp * whole["bytes_moved"], "to each rank its part"
    after = drawn(split)
    assert after == drawn(alone)
    assert after != before
    assert len(split.status()["engines"]) == layout.dp
    assert split.barrier().result(120) == {}


@pytest.mark.slow
def test_another_layout_of_the_same_gpus_changes_no_token(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    alone = job.rollout_deployment("alone", MODEL)
    first = plexrl.Parallelism(dp=2)
    split = job.rollout_deployment("split", MODEL, parallelism=first)
    train_and_sync(actor, (alone, split), 1)
    wanted = drawn(alone)
    assert drawn(split) == wanted
    long = plexrl.SamplingParams(max_tokens=200, seed=2, ignore_eos=True)
    running = split.generate(PROMPTS, n=2, sampling=long)
    wait_until(lambda: split.status()["engines"][0]["running"] > 0, "nothing runs")
    split.set_parallelism(plexrl.Parallelism(tp=2))
    samples = alone.generate(PROMPTS, n=2, sampling=long).result(120).samples
    assert [[s.tokens for s in row] for row in running.result(120).samples] == [
        [s.tokens for s in row] for row in samples
    ]
    assert drawn(split) == wanted
    assert len(split.status()["engines"]) == 1
    # The controller that comes back creates it as before.
    again = job.rollout_deployment("split", MODEL, parallelism=first)
    assert len(again.status()["engines"]) == 1
    again.set_parallelism(first)
    train_and_sync(actor, (alone, split), 2)
    assert drawn(split) == drawn(alone) != wanted
    assert len(split.status()["engines"]) == 2


def test_a_layout_that_cannot_be_is_refused(job: plexrl.Job) -> None:
    split = job.rollout_deployment("split", MODEL, parallelism=plexrl.Parallelism(dp=2))
    with pytest.raises(LayoutError, match="needs 4 workers"):
        split.set_parallelism(plexrl.Parallelism(tp=4))
    actor = job.train_deployment("actor", MODEL)
    with pytest.raises(InvalidRequestError, match="a train deployment"):
        plexrl.RolloutDeployment.set_parallelism(actor, plexrl.Parallelism())  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_lost_tensor_rank_is_replaced_with_its_group_and_nothing_is_lost(
    job: plexrl.Job, rank: int
) -> None:
    actor = job.train_deployment("actor", MODEL)
    alone = job.rollout_deployment("alone", MODEL)
    split = job.rollout_deployment("split", MODEL, parallelism=plexrl.Parallelism(tp=2))
    train_and_sync(actor, (alone, split), 1)
    wanted = drawn(alone)
    assert drawn(split) == wanted
    long = plexrl.SamplingParams(max_tokens=200, seed=2, ignore_eos=True)
    [whole] = alone.generate([[3]], n=4, sampling=long).result(120).samples
    incarnation = split.status()["incarnation"]
    future = paused_in_the_middle(
        split, lambda: split.generate([[3]], n=4, sampling=long), running=4
    )
    kill_worker(split, rank)
    [found] = future.result(120).samples
    assert [sample.tokens for sample in found] == [sample.tokens for sample in whole]
    assert split.status()["incarnation"] > incarnation
    kill_worker(split, rank)
    assert drawn(split) == wanted, "it was lost while it did nothing"


@pytest.mark.slow
def test_a_restarted_router_finds_the_ranks_results(
    embedded: EmbeddedCluster, job: plexrl.Job
) -> None:
    split = job.rollout_deployment("split", MODEL, parallelism=plexrl.Parallelism(tp=2))
    wanted = drawn(split)
    sampling = plexrl.SamplingParams(max_tokens=200, seed=2, ignore_eos=True)
    long = split.generate(PROMPTS, n=2, sampling=sampling)
    then = split.barrier()
    wait_until(lambda: split.status()["running"] == ["generate"], "it does not begin")
    process_of(embedded, "plexrl.router").kill()
    assert long.result(120).samples[0][0].finish_reason == "length"
    assert then.result(120) == {}
    assert drawn(split) == wanted


def test_ranks_generate_within_a_budget_each_and_can_be_streamed(job: plexrl.Job) -> None:
    split = job.rollout_deployment(
        "split",
        MODEL,
        max_sequence_tokens=64,
        max_concurrent_samples=8,
        parallelism=plexrl.Parallelism(tp=2),
        kv_cache_bytes=6 * 16 * 256,
    )
    sampling = plexrl.SamplingParams(max_tokens=44, seed=3, ignore_eos=True)
    future = split.generate([[3, 4, 5, 6], [7, 8]], n=3, sampling=sampling, stream=True)
    chunks = list(future.stream())
    result = future.result(120)
    assert result.metrics["preemptions"] > 0
    assert sum(len(chunk.tokens) for chunk in chunks) == 6 * 44
    trained = job.train_deployment("actor", MODEL)
    rows = [[7, 8, *sample.tokens] for sample in result.samples[1]]
    logprobs = trained.forward(plexrl.Batch(rows)).result(120).logprobs
    for row, sample in zip(logprobs, result.samples[1], strict=True):
        assert np.abs(row[2:] - sample.logprobs).max() < 1e-4
