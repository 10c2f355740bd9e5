"""Sharing a training group changes when a job's operations run, never what they compute; a job that
accepts little waiting does not share."""

import json
from contextlib import ExitStack

import pytest

import plexrl
from plexrl.model.spec import parameter_count
from tests.cluster.tools import VOCABULARY, checkpoint_weights, some_batch, wait_until

STEPS = 6


def train(actor: plexrl.TrainDeployment, seed: int, step: int) -> float:
    actor.forward_backward(some_batch(1000 * seed + step), plexrl.losses.grpo())
    actor.forward_backward(some_batch(1000 * seed + step + 500), plexrl.losses.grpo())
    return actor.optim_step(learning_rate=1e-2, grad_clip_norm=1.0).result().metrics["grad_norm"]


def test_a_job_that_shares_its_group_computes_the_same_bits_as_alone(
    cluster: plexrl.Cluster,
) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=3)
    with cluster.create_job("alone") as job:
        actor = job.train_deployment("actor", model, workers=2, exclusive=True)
        norms_alone = [train(actor, 1, step) for step in range(STEPS)]
        weights_alone = checkpoint_weights(actor)

    with cluster.create_job("one") as first, cluster.create_job("two") as second:
        sharers = [job.train_deployment("actor", model, workers=2) for job in (first, second)]
        norms: list[list[float]] = [[], []]
        for step in range(STEPS):
            for index, sharer in enumerate(sharers):
                norms[index].append(train(sharer, index + 1, step))
        weights_shared = checkpoint_weights(sharers[0])
        groups = {each.status()["group"] for each in sharers}
        rows = cluster.operations(job=first.job)

    assert len(groups) == 1, "the two jobs were to share a group"
    switches = [row for row in rows if row["kind"] == "offload" and row["state"] == "finished"]
    assert len(switches) >= STEPS - 1, "the group was to change hands at every step"
    assert norms[0] == norms_alone
    assert norms[1] != norms_alone
    assert weights_shared == weights_alone


@pytest.mark.slow
def test_a_job_with_a_tight_bound_does_not_share_while_others_do(two_gpus: plexrl.Cluster) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=5)
    slos = {"one": None, "two": None, "tight": 0.05, "late": 0.05}
    with ExitStack() as scope:
        jobs = {
            name: scope.enter_context(two_gpus.create_job(name, slo=slo))
            for name, slo in slos.items()
        }
        actors = {
            name: job.train_deployment("actor", model, workers=1) for name, job in jobs.items()
        }

        def group(name: str) -> str | None:
            (found,) = jobs[name].explain()["deployments"]
            return None if found["group"] is None else str(found["group"])

        for name in ("one", "two", "tight"):
            actors[name].forward_backward(some_batch(1), plexrl.losses.grpo())
            assert actors[name].optim_step(learning_rate=1e-3).result(120)
        assert group("one") == group("two")
        assert group("tight") not in (None, group("one"))
        assert group("late") is None
        late = actors["late"].barrier()
        explained = jobs["late"].explain()
        assert explained["slo"] == 0.05
        assert [each["rule"] for each in explained["operations"]] == ["slo"]
        jobs["tight"].finish()
        wait_until(lambda: group("late") is not None, "nobody gave the late job GPUs")
        late.result(120)
        assert group("late") != group("one")


def test_gradients_survive_a_switch_between_backward_and_step(two_gpus: plexrl.Cluster) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=4)
    batch = some_batch(7)
    with two_gpus.create_job("alone") as job:
        actor = job.train_deployment("actor", model, workers=2, exclusive=True)
        actor.forward_backward(batch, plexrl.losses.grpo()).result()
        alone = actor.optim_step(learning_rate=1e-2).result().metrics

    with two_gpus.create_job("one") as first, two_gpus.create_job("two") as second:
        actor = first.train_deployment("actor", model, workers=2)
        other = second.train_deployment("actor", model, workers=2)
        actor.forward_backward(batch, plexrl.losses.grpo()).result()
        other.barrier().result()
        # It may be back already: an idle group expects its next burst.
        assert "offload" in {each["kind"] for each in two_gpus.operations(job=first.job)}
        shared = actor.optim_step(learning_rate=1e-2).result().metrics

    assert shared == alone


def test_an_offload_gives_the_workers_memory_back(cluster: plexrl.Cluster) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, hidden=256, layers=4)
    with cluster.create_job("one") as first, cluster.create_job("two") as second:
        actor = first.train_deployment("actor", model, workers=2)
        other = second.train_deployment("actor", model, workers=2)
        actor.forward_backward(some_batch(1), plexrl.losses.grpo())
        actor.optim_step(learning_rate=1e-3).result()
        other.barrier().result()
        (offload,) = [r for r in cluster.operations(job=first.job) if r["kind"] == "offload"]
    measured = json.loads(offload["result_json"])
    for before, after in zip(measured["memory_before"], measured["memory_after"], strict=True):
        assert before["arena_bytes"] > 10_000_000
        assert after["arena_bytes"] == 0
        assert before["rss_bytes"] - after["rss_bytes"] > before["arena_bytes"] // 2


def test_a_rollout_pulls_its_own_bytes_once_and_then_agrees_with_the_trainer(
    cluster: plexrl.Cluster,
) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=5)
    with cluster.create_job("sync") as job:
        actor = job.train_deployment("actor", model, workers=2)
        rollout = job.rollout_deployment("rollout", model)
        for step in range(3):
            train(actor, 9, step)
        moved = rollout.sync_weights(actor).result()
        prompts = [[3, 4, 5], [6, 7, 8, 9]]
        sampling = plexrl.SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
        samples = rollout.generate(prompts, n=2, sampling=sampling).result().samples
        flat = [(p, s) for p, group in zip(prompts, samples, strict=True) for s in group]
        batch = plexrl.Batch([[*p, *s.tokens] for p, s in flat])
        trained = actor.forward(batch).result().logprobs
    assert moved["bytes_moved"] == 4 * parameter_count(model)
    assert moved["weights_seq"] == 9
    for (prompt, sample), logprobs in zip(flat, trained, strict=True):
        worst = abs(logprobs[len(prompt) :] - sample.logprobs).max()
        assert worst < 1e-4, "trainer and engine disagree after a sync"


def test_streamed_tokens_are_those_of_the_result(job: plexrl.Job) -> None:
    rollout = job.rollout_deployment("rollout", plexrl.tiny_qwen2(VOCABULARY))
    sampling = plexrl.SamplingParams(max_tokens=8, seed=3)
    *chunks, result = rollout.generate_stream([[3, 4], [5]], n=2, sampling=sampling)
    assert isinstance(result, plexrl.GenerateResult)
    streamed: dict[tuple[int, int], list[int]] = {}
    for chunk in chunks:
        assert isinstance(chunk, plexrl.Chunk)
        streamed.setdefault((chunk.prompt, chunk.sample), []).extend(chunk.tokens)
    for (prompt, sample), tokens in streamed.items():
        whole = result.samples[prompt][sample].tokens
        assert tokens == whole[: len(tokens)]
