"""LoRA adapters: training, context switches and checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import plexrl
from plexrl.errors import InvalidRequestError, LayoutError
from plexrl.model.lora import adapter_parameter_count
from plexrl.model.spec import parameter_count
from plexrl.worker.models import build_model
from tests.cluster.tools import VOCABULARY, kill_worker, some_batch

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=9, hidden=128)
LORA = plexrl.LoraSpec(rank=4, alpha=16.0, seed=3)
STATE_BYTES = 4 * adapter_parameter_count(MODEL, LORA)
"""State bytes of the adapters alone."""
PROMPTS = [[3, 4, 5], [6, 7]]


def step(actor: plexrl.TrainDeployment, seed: int) -> float:
    actor.forward_backward(some_batch(seed), plexrl.losses.grpo())
    return actor.optim_step(learning_rate=1e-2, grad_clip_norm=1.0).result(120).metrics["grad_norm"]


def moved(cluster: plexrl.Cluster, job: plexrl.Job, kind: str) -> list[dict[str, Any]]:
    """Measurements of each finished state move of a job."""
    rows = cluster.operations(job=job.job)
    done = [row for row in rows if row["kind"] == kind and row["state"] == "finished"]
    return [json.loads(row["result_json"]) for row in done]


def test_adapters_train_and_a_rollout_matches_its_trainer_after_every_sync(
    job: plexrl.Job,
) -> None:
    actor = job.train_deployment("actor", MODEL, workers=2, lora=LORA)
    replicas = plexrl.Parallelism(dp=2)
    rollout = job.rollout_deployment("rollout", MODEL, lora=LORA, parallelism=replicas)
    reference = job.reference_deployment("reference", MODEL)
    batch = some_batch(0)
    untrained = np.concatenate(actor.forward(batch).result(120).logprobs)
    base = np.concatenate(reference.forward(batch).result(120).logprobs)
    assert np.allclose(untrained, base, atol=1e-5), "training begins with the model as it is"
    last = untrained
    for turn in range(4):
        step(actor, turn)
        report = rollout.sync_weights(actor, delta=turn % 2 == 1).result(120)
        assert report["bytes_wanted"] == 2 * STATE_BYTES
        sampling = plexrl.SamplingParams(max_tokens=6, seed=turn, ignore_eos=True)
        groups = rollout.generate(PROMPTS, n=2, sampling=sampling).result(120).samples
        samples = [(p, s) for p, group in zip(PROMPTS, groups, strict=True) for s in group]
        rows = plexrl.Batch([[*prompt, *sample.tokens] for prompt, sample in samples])
        trained = actor.forward(rows).result(120).logprobs
        for (prompt, sample), row in zip(samples, trained, strict=True):
            assert np.allclose(row[len(prompt) :], sample.logprobs, atol=1e-4)
        now = np.concatenate(actor.forward(batch).result(120).logprobs)
        assert np.abs(now - last).max() > 1e-4
        last = now


def test_a_switch_between_adapters_of_one_model_moves_adapters_only(
    cluster: plexrl.Cluster,
) -> None:
    with cluster.create_job("alone") as job:
        actor = job.train_deployment("actor", MODEL, workers=2, exclusive=True, lora=LORA)
        alone = [step(actor, turn) for turn in range(4)]
    with cluster.create_job("one") as first, cluster.create_job("two") as second:
        actors = [j.train_deployment("actor", MODEL, workers=2, lora=LORA) for j in (first, second)]
        norms = [[step(actor, turn) for actor in actors] for turn in range(4)]
        groups = {actor.status()["group"] for actor in actors}
        offloads = moved(cluster, first, "offload")
        loads = moved(cluster, first, "load") + moved(cluster, second, "load")
    assert len(groups) == 1, "the two jobs were to share a group"
    assert [pair[0] for pair in norms] == [pair[1] for pair in norms] == alone
    assert len(offloads) >= 3
    # Parameters and two moments, each slice aligned; no more than a few bytes of padding.
    most = 3 * STATE_BYTES + 64 * 1024
    assert all(0 < each["bytes_moved"] <= most for each in offloads)
    assert most < parameter_count(MODEL)
    assert [each["base_bytes_filled"] > 0 for each in loads].count(True) == 1
    assert all(each.get("bytes_moved", 0) <= most for each in loads)


def test_a_killed_worker_recovers_frozen_weights_and_adapters(job: plexrl.Job) -> None:
    calm, killed = (
        job.train_deployment(name, MODEL, workers=2, lora=LORA) for name in ("calm", "killed")
    )
    norms = []
    for turn in range(3):
        norms.append((step(calm, turn), step(killed, turn)))
        if turn == 1:
            kill_worker(killed, 1)
    assert all(one == other for one, other in norms)


def test_peft_loads_a_checkpoint_of_adapters(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL, workers=2, lora=LORA)
    rollout = job.rollout_deployment("rollout", MODEL, lora=LORA)
    for turn in range(2):
        step(actor, turn)
    folder = Path(actor.save_checkpoint("adapters").result(120)["path"])
    wanted = actor.forward(some_batch(0)).result(120).logprobs
    assert not (folder / "model.safetensors").exists()
    assert (folder / "tokenizer.json").is_file()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 16.0)
    tensors = load_file(folder / "adapter_model.safetensors")
    down = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    assert tensors[down].shape == (4, 512)
    # As PEFT loads such a file.
    model = build_model(MODEL)
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in config["target_modules"]:
                a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
                module.weight += config["lora_alpha"] / config["r"] * b @ a
    rows = plexrl.Batch([[3, 4, 5, 6]])
    logits = model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits[0].log_softmax(-1)
    merged = logits[range(3), [4, 5, 6]].detach().numpy()
    assert np.allclose(actor.forward(rows).result(120).logprobs[0][1:], merged, atol=1e-5)
    step(actor, 9)
    actor.load_checkpoint("adapters").result(120)
    again = actor.forward(some_batch(0)).result(120).logprobs
    assert all(np.array_equal(one, other) for one, other in zip(wanted, again, strict=True))
    rollout.load_checkpoint("adapters").result(120)
    sampling = plexrl.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    [[sample]] = rollout.generate([[3, 4]], sampling=sampling).result(120).samples
    spoken = actor.forward(plexrl.Batch([[3, 4, *sample.tokens]])).result(120).logprobs[0]
    assert np.allclose(spoken[2:], sample.logprobs, atol=1e-4)


def test_unsupported_adapters_are_refused(job: plexrl.Job) -> None:
    with pytest.raises(InvalidRequestError, match=r"lora\.targets"):
        job.train_deployment("a", MODEL, lora=plexrl.LoraSpec(rank=4, targets=("lm_head",)))
    with pytest.raises(InvalidRequestError, match="no low-rank adapters"):
        job._deploy("b", "forward", MODEL, {"lora": LORA})
    with pytest.raises(LayoutError):
        job.train_deployment("c", MODEL, parallelism=plexrl.Parallelism(pp=2), lora=LORA)
    plain = job.rollout_deployment("plain", MODEL)
    actor = job.train_deployment("actor", MODEL, lora=LORA)
    with pytest.raises(InvalidRequestError, match="create both with the same lora"):
        plain.sync_weights(actor)
