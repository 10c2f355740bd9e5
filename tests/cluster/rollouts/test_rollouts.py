"""Cache budgets, pauses, interrupts and syncs in flight of a running rollout."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import plexrl
from plexrl.cli.app import app
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.errors import ConflictError, InvalidRequestError, OperationCancelledError
from tests.cluster.tools import VOCABULARY, paused_in_the_middle, process_of, some_batch

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)
LONG = plexrl.SamplingParams(max_tokens=120, seed=3, ignore_eos=True)
LAYOUTS = pytest.mark.parametrize(
    "layout",
    [
        pytest.param(plexrl.Parallelism(), id="one rank"),
        # Two ranks pause in a later test; the engine's own tests abort them.
        pytest.param(plexrl.Parallelism(tp=2), id="tp=2", marks=pytest.mark.slow),
        pytest.param(plexrl.Parallelism(dp=2), id="dp=2", marks=pytest.mark.slow),
    ],
)

BLOCK_BYTES = 16 * 512
"""Cache bytes of one token of `tiny_qwen2`, in float32."""


def test_a_small_cache_draws_the_same_tokens_and_reports_preemptions(
    embedded: EmbeddedCluster, job: plexrl.Job
) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=5)
    options: Any = {"max_sequence_tokens": 64, "max_concurrent_samples": 8}
    plenty = job.rollout_deployment("plenty", model, **options)
    short = job.rollout_deployment("short", model, kv_cache_bytes=6 * BLOCK_BYTES, **options)
    assert short.status()["engines"] == [], "before its first operation it has no weights"
    sampling = plexrl.SamplingParams(max_tokens=44, seed=3, ignore_eos=True)
    prompts = [[3, 4, 5, 6], [7, 8], [9]]
    wanted = plenty.generate(prompts, n=2, sampling=sampling).result(120)
    found = short.generate(prompts, n=2, sampling=sampling).result(120)
    tokens = [[sample.tokens for sample in samples] for samples in found.samples]
    assert tokens == [[sample.tokens for sample in samples] for samples in wanted.samples]
    assert found.samples[0][0].weights == ((0, found.weights_seq, 0),)
    assert wanted.metrics["preemptions"] == 0
    assert found.metrics["preemptions"] > 0
    assert found.metrics["kv_cache_bytes"] == 6 * BLOCK_BYTES
    assert found.metrics["kv_cache_bytes_used_max"] == 6 * BLOCK_BYTES
    [engine] = short.status()["engines"]
    assert engine["preemptions"] == found.metrics["preemptions"]
    assert (engine["running"], engine["blocks"], engine["blocks_held"]) == (0, 6, 0)
    where = {"PLEXRL_URL": embedded.url, "PLEXRL_API_KEY": embedded.api_key, "COLUMNS": "200"}
    shown = json.loads(CliRunner().invoke(app, ["jobs", job.job, "--json"], env=where).stdout)
    engines = {each["deployment"]: each["engines"] for each in shown["deployments"]}
    assert engines[short.deployment] == [engine]
    assert "preemptions" in CliRunner().invoke(app, ["jobs", job.job], env=where).stdout


def stepped(actor: plexrl.TrainDeployment) -> None:
    """Change the trainer's weights."""
    actor.forward_backward(some_batch(1), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2)


def paused(rollout: plexrl.RolloutDeployment) -> plexrl.GenerateFuture:
    """A generation that is paused midway."""

    def begin() -> plexrl.GenerateFuture:
        return rollout.generate([[3, 4, 5], [6, 7]], n=2, sampling=LONG)

    return paused_in_the_middle(rollout, begin, running=4)


def samples_of(result: plexrl.GenerateResult) -> list[plexrl.Sample]:
    return [sample for samples in result.samples for sample in samples]


def tokens_of(result: plexrl.GenerateResult) -> list[list[int]]:
    return [sample.tokens for sample in samples_of(result)]


@LAYOUTS
def test_a_pause_stops_every_engine_and_changes_no_token(
    embedded: EmbeddedCluster, job: plexrl.Job, layout: plexrl.Parallelism
) -> None:
    rollout = job.rollout_deployment("rollout", MODEL, parallelism=layout)
    wanted = rollout.generate([[3, 4, 5], [6, 7]], n=2, sampling=LONG).result(120)
    future = paused(rollout)
    process_of(embedded, "plexrl.router").kill()
    stopped = [each["steps"] for each in rollout.pause()]
    later = rollout.generate([[8]], sampling=LONG)
    assert [each["steps"] for each in rollout.status()["engines"]] == stopped
    rollout.resume()
    assert not any(each["paused"] for each in rollout.resume()), "once more is no harm"
    assert tokens_of(future.result(120)) == tokens_of(wanted)
    assert later.result(120).samples[0][0].finish_reason == "length"


def test_a_pause_ends_after_its_time_limit(job: plexrl.Job) -> None:
    rollout = job.rollout_deployment("rollout", MODEL)
    future = paused(rollout)
    rollout.pause(for_s=0.2)
    assert future.result(120).samples[0][0].finish_reason == "length"


@LAYOUTS
def test_an_interrupted_generation_returns_its_tokens_so_far(
    job: plexrl.Job, layout: plexrl.Parallelism
) -> None:
    rollout = job.rollout_deployment("rollout", MODEL, parallelism=layout)
    whole = rollout.generate([[3, 4, 5], [6, 7]], n=2, sampling=LONG).result(120)
    future = paused(rollout)
    found = future.interrupt(60)
    rollout.resume()
    assert future.interrupt() is found, "what is over stays as it is"
    for sample, complete in zip(samples_of(found), samples_of(whole), strict=True):
        assert sample.finish_reason == "abort"
        assert 0 < len(sample.tokens) < LONG.max_tokens
        assert sample.tokens == complete.tokens[: len(sample.tokens)]
        assert np.array_equal(sample.logprobs, complete.logprobs[: len(sample.tokens)])
    again = rollout.generate([[3, 4, 5], [6, 7]], n=2, sampling=LONG).result(120)
    assert tokens_of(again) == tokens_of(whole), "nothing of it is left in the engine"


def test_an_interrupt_cancels_a_pending_generation(job: plexrl.Job) -> None:
    rollout = job.rollout_deployment("rollout", MODEL)
    first = paused(rollout)
    rollout.barrier()
    behind = rollout.generate([[3]], sampling=LONG)
    with pytest.raises(OperationCancelledError):
        behind.interrupt(60)
    assert first.interrupt(60).samples[0][0].finish_reason == "abort"


@pytest.mark.parametrize(
    ("layout", "recompute_kv"),
    [
        pytest.param(plexrl.Parallelism(), True, id="one rank"),
        pytest.param(plexrl.Parallelism(), False, id="one rank, cache kept"),
        # Two ranks of an engine take new weights in the middle in `test_tensor_parallel.py`.
        pytest.param(plexrl.Parallelism(tp=2), True, id="tp=2", marks=pytest.mark.slow),
        pytest.param(
            plexrl.Parallelism(tp=2), False, id="tp=2, cache kept", marks=pytest.mark.slow
        ),
        pytest.param(plexrl.Parallelism(dp=2), True, id="dp=2", marks=pytest.mark.slow),
    ],
)
def test_samples_list_the_versions_of_weights_synced_in_flight(
    job: plexrl.Job, layout: plexrl.Parallelism, recompute_kv: bool
) -> None:
    rollout = job.rollout_deployment("rollout", MODEL, parallelism=layout)
    actor = job.train_deployment("actor", MODEL)
    old = rollout.generate([[3, 4, 5], [6, 7]], n=2, sampling=LONG).result(120)
    future = paused(rollout)
    stepped(actor)
    sync = rollout.sync_weights(actor, in_flight=True, recompute_kv=recompute_kv)
    assert sync.result(120)["way"] == "full"
    assert all(each["paused"] for each in rollout.status()["engines"]), "as it was before"
    rollout.resume()
    mixed = future.result(120)
    rows, cuts = [], []
    prompts = [[3, 4, 5], [6, 7]]
    for prompt, samples, before in zip(prompts, mixed.samples, old.samples, strict=True):
        for sample, former in zip(samples, before, strict=True):
            former_weights, (cut, second, step) = sample.weights
            assert former_weights == (0, old.weights_seq, 0)
            assert (second, step) == (old.weights_seq + 1, 1)
            assert sample.trainer_step == 0, "its first tokens are of the former weights"
            assert sample.tokens[:cut] == former.tokens[:cut]
            assert sample.tokens != former.tokens
            rows.append([*prompt, *sample.tokens])
            cuts.append(len(prompt) + cut)
    trained = actor.forward(plexrl.Batch(rows)).result(120).logprobs
    whole = zip(rows, cuts, trained, samples_of(mixed), strict=True)
    for row, cut, logprobs, sample in whole:
        drawn = len(row) - cut
        worst = np.abs(logprobs[cut:] - sample.logprobs[-drawn:]).max()
        # With the old cache they are neither the old policy's nor the new one's.
        assert worst < 1e-4 if recompute_kv else worst > 1e-4
    new = rollout.generate([[3, 4, 5]], sampling=plexrl.SamplingParams(max_tokens=4)).result(120)
    assert new.weights_seq == old.weights_seq + 1
    assert new.samples[0][0].weights == ((0, new.weights_seq, 1),)


def test_async_controllers_can_pause_and_interrupt(
    embedded: EmbeddedCluster, job: plexrl.Job
) -> None:
    rollout = job.rollout_deployment("rollout", MODEL)
    paused(rollout).interrupt(60)

    async def control() -> None:
        async with await plexrl.connect_async(embedded.url, embedded.api_key) as cluster:
            same = await cluster.attach_job(job.job, heartbeat=False)
            mine = await same.rollout_deployment("rollout", MODEL)
            assert (await mine.pause())[0]["paused"] is True
            future = await mine.generate([[3]], sampling=LONG)
            [[sample]] = (await future.interrupt()).samples
            assert (sample.finish_reason, sample.tokens) == ("abort", [])
            assert (await mine.resume())[0]["paused"] is False

    asyncio.run(control())


def test_pausing_without_workers_is_refused(job: plexrl.Job) -> None:
    rollout = job.rollout_deployment("rollout", MODEL)
    with pytest.raises(ConflictError, match=r"no workers now|not on the device"):
        rollout.pause()
    rollout.barrier().result(120)
    assert rollout.pause()[0]["paused"], "an engine that does nothing can be paused as well"
    rollout.resume()
    with pytest.raises(InvalidRequestError, match="for_s"):
        rollout.pause(for_s=1e9)
    actor = job.train_deployment("actor", MODEL)
    wrong = plexrl.RolloutDeployment(actor._transport, actor.deployment)
    with pytest.raises(InvalidRequestError, match="generates nothing"):
        wrong.pause()
