"""Checkpoints of a real cluster, used by controllers and by other tools."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

import plexrl
from plexrl import errors
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from tests.cluster.tools import VOCABULARY, some_batch, wait_until

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    running = start_embedded(tmp_path_factory.mktemp("two"), nodes=2, virtual_gpus=1)
    yield running
    running.close()


@pytest.fixture
def wide_job(two_nodes: EmbeddedCluster) -> Iterator[plexrl.Job]:
    with (
        plexrl.connect(two_nodes.url, two_nodes.api_key) as cluster,
        cluster.create_job("saver") as made,
    ):
        yield made


def train(actor: plexrl.TrainDeployment, seed: int) -> None:
    actor.forward_backward(some_batch(seed), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2).result(120)


def parameters(path: str) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_ranks_of_two_nodes_make_one_checkpoint_that_training_resumes_from(
    wide_job: plexrl.Job,
) -> None:
    job = wide_job
    actor = job.train_deployment("actor", MODEL, workers=2)
    assert len({rank["node"] for rank in actor.status()["ranks"]}) == 2
    train(actor, 1)
    saving = actor.save_checkpoint("one", step=1)
    pinned = saving.pinned(60)
    train(actor, 2)
    after = actor.save_checkpoint("two", step=2).result(120)
    saved = saving.result(120)
    assert saved == {**pinned, "durable": True}
    assert not same(parameters(saved["path"]), parameters(after["path"]))
    actor.load_checkpoint("one").result(120)
    train(actor, 2)
    again = actor.save_checkpoint("again").result(120)
    assert same(parameters(again["path"]), parameters(after["path"]))
    listed = {each["name"]: each for each in job.checkpoints()}
    assert sorted(listed) == ["again", "one", "two"]
    assert {each["state"] for each in listed.values()} == {"durable"}
    assert listed["one"]["step"] == 1
    assert listed["one"]["bytes_done"] == listed["one"]["bytes_total"] > 0


def test_a_schedule_saves_each_second_step_and_keeps_the_newest(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL, checkpoint_every=2, checkpoint_keep=1)
    for seed in (1, 2):
        train(actor, seed)
    by_hand = actor.save_checkpoint("by-hand").result(120)
    for seed in (3, 4, 5):
        train(actor, seed)
    actor.barrier().result(120)
    wait_until(
        lambda: (
            {each["name"]: each["state"] for each in job.checkpoints()}
            == {"by-hand": "durable", "actor-step-4": "durable"}
        ),
        "the older of the schedule's checkpoints is not deleted",
    )
    actor.load_checkpoint("actor-step-4").result(120)
    assert actor.status()["trainer_step"] == 4
    train(actor, 5)
    after = actor.save_checkpoint("after").result(120)
    assert not same(parameters(after["path"]), parameters(by_hand["path"]))


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_shards_of_another_dtype(job: plexrl.Job, tied: bool) -> None:
    config = {**MODEL.config, "tie_word_embeddings": tied}
    model = replace(MODEL, config_json=msgspec.json.encode(config).decode())
    actor = job.train_deployment("actor", model)
    whole = parameters(actor.save_checkpoint("whole").result(120)["path"])
    saved = actor.save_checkpoint(
        "small", format="hf", dtype="bfloat16", shard_bytes_max=50_000
    ).result(120)
    path = Path(saved["path"])
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert ("lm_head.weight" in index["weight_map"]) != tied
    assert not (path / "training").exists()
    found = parameters(saved["path"])
    assert {p.dtype for p in found.values()} == {torch.bfloat16}
    assert same(found, {name: p.bfloat16() for name, p in whole.items()})
    with pytest.raises(errors.CheckpointNotFoundError, match="resume"):
        actor.load_checkpoint("small").result(120)


def test_a_rollout_loads_a_checkpoint_that_is_still_being_written(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    for _ in range(3):
        train(actor, 3)
    actor.save_checkpoint("one").pinned(60)
    rollout = job.rollout_deployment("rollout", MODEL)
    rollout.load_checkpoint("one").result(120)
    sampling = plexrl.SamplingParams(max_tokens=8, temperature=0.0)
    loaded = rollout.generate([[3, 4, 5]], sampling=sampling).result(120).samples[0][0]
    rollout.sync_weights(actor).result(120)
    synced = rollout.generate([[3, 4, 5]], sampling=sampling).result(120).samples[0][0]
    assert loaded.tokens == synced.tokens
    assert loaded.logprobs.tolist() == synced.logprobs.tolist()


def test_retention_deletes_old_checkpoints(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    for step in range(1, 6):
        actor.save_checkpoint(f"c{step}", step=step, keep_last=1, keep_every=2).result(120)
    wanted = ["c2", "c4", "c5"]
    wait_until(lambda: [c["name"] for c in job.checkpoints()] == wanted, "they did not go")
    with pytest.raises(errors.CheckpointNotFoundError):
        actor.load_checkpoint("c1").result(120)
    with pytest.raises(errors.InvalidRequestError, match="keep_last"):
        actor.save_checkpoint("c6", keep_last=0)
    assert actor.status()["incarnation"] == 1


def test_an_async_controller_waits_for_the_disk(embedded: EmbeddedCluster) -> None:
    async def save() -> plexrl.SavedCheckpoint:
        async with (
            await plexrl.connect_async(embedded.url, embedded.api_key) as cluster,
            await cluster.create_job("async") as job,
        ):
            actor = await job.train_deployment("actor", MODEL)
            saved = await (await actor.save_checkpoint("one"))
            assert [each["name"] for each in await job.checkpoints()] == ["one"]
            return saved

    saved = asyncio.run(save())
    assert saved["durable"]
    assert parameters(saved["path"])


def test_an_offloaded_deployment_is_saved_without_a_load(tmp_path: Path) -> None:
    running = start_embedded(tmp_path, virtual_gpus=1)
    try:
        with (
            plexrl.connect(running.url, running.api_key) as cluster,
            cluster.create_job("saver") as saver,
            cluster.create_job("other") as other,
        ):
            actor, rival = (job.train_deployment("actor", MODEL) for job in (saver, other))
            train(actor, 1)
            actor.publish().result(120)
            here = parameters(actor.save_checkpoint("here").result(120)["path"])
            train(rival, 2)
            wait_until(lambda: actor.status()["residency"] == "offloaded", "it stays on the GPU")
            loads = [each["kind"] for each in cluster.operations(job=saver.job)].count("load")
            stored = parameters(actor.save_checkpoint("stored").result(120)["path"])
            assert same(stored, here)
            assert actor.status()["residency"] == "offloaded"
            after = [each["kind"] for each in cluster.operations(job=saver.job)].count("load")
            assert after == loads
            # Weights that nobody has checked are saved after a load.
            train(actor, 3)
            train(rival, 4)
            wait_until(lambda: actor.status()["residency"] == "offloaded", "it stays on the GPU")
            unchecked = parameters(actor.save_checkpoint("unchecked").result(120)["path"])
            assert not same(unchecked, stored)
            actor.load_checkpoint("stored").result(120)
            assert same(parameters(actor.save_checkpoint("again").result(120)["path"]), stored)
    finally:
        running.close()
