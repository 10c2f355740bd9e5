"""What a worker does about checkpoints without a model: agreeing, waiting, reading."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from plexrl.errors import (
    BatchShapeError,
    CheckpointNotFoundError,
    CorruptStateError,
    StateLostError,
)
from plexrl.model.spec import tiny_qwen2
from plexrl.statemanager.checkpoint.format.plan import SHARD_BYTES_MAX, CheckpointFormat
from plexrl.statemanager.checkpoint.places.choice import place_at
from plexrl.statemanager.checkpoint.write.progress import CheckpointProgress
from plexrl.statemanager.checkpoint.write.publish import announce
from plexrl.statemanager.checkpoint.write.writer import CheckpointSpec, write_checkpoint
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.worker.state.checkpoint_files import fill_from_checkpoint, load_for, refuse_critic
from plexrl.worker.state.rank_agreement import on_all_ranks
from tests.statemanager.checkpoint import versions as v

TENSORS: v.Tensors = {v.key("w"): v.random_tensor(np.random.default_rng(1), "F32", (9, 5))}
SLICES = v.wanted(TENSORS, v.rows(TENSORS, 1)[0])


def write(target: Path, checkpoint_format: CheckpointFormat, tensors: v.Tensors = TENSORS) -> None:
    wanted = CheckpointSpec(
        target=place_at(target),
        node="n",
        format=checkpoint_format,
        model_dtype=None,
        shard_bytes_max=SHARD_BYTES_MAX,
        overwrite=True,
    )
    write_checkpoint(wanted, v.versions(tensors, 2), None, CheckpointProgress())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("checkpoint_format", list(CheckpointFormat))
def test_parameters_come_from_a_checkpoint_of_any_format(
    tmp_path: Path, checkpoint_format: CheckpointFormat
) -> None:
    write(tmp_path / "c", checkpoint_format)
    assert bits(load_for(tmp_path / "c", SLICES)[SLICES[0]]) == TENSORS[v.key("w")][1].tobytes()


def test_parameters_come_from_any_hugging_face_directory(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6.0)}, tmp_path / "model.safetensors")
    whole = StateSlice(
        key=v.key("w"), dtype="F32", global_shape=(6,), offset=(0,), shape=(6,), arena_offset=0
    )
    part = replace(whole, offset=(2,), shape=(3,))
    assert torch.equal(load_for(tmp_path, [whole])[whole], torch.arange(6.0))
    assert torch.equal(load_for(tmp_path, [part])[part], torch.arange(2.0, 5.0))
    with pytest.raises(BatchShapeError, match="'w' of shape"):
        load_for(tmp_path, [replace(whole, global_shape=(7,))])


def test_experts_come_from_published_files_and_from_fused_ones(tmp_path: Path) -> None:
    name, whole = "model.layers.1.mlp.experts.gate_up_proj", torch.arange(24.0).view(2, 4, 3)
    published = {
        f"model.layers.1.block_sparse_moe.experts.{expert}.{matrix}.weight": rows.clone()
        for expert in range(2)
        for matrix, rows in zip(("w1", "w3"), whole[expert].chunk(2), strict=True)
    }
    second = StateSlice(
        key=v.key(name),
        dtype="F32",
        global_shape=(2, 4, 3),
        offset=(1, 0, 0),
        shape=(1, 4, 3),
        arena_offset=0,
    )
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    for tensors in (published, {name: whole}):
        save_file(tensors, tmp_path / "model.safetensors")
        assert torch.equal(load_for(tmp_path, [second])[second], whole[1:])
    published.popitem()
    save_file(published, tmp_path / "model.safetensors")
    with pytest.raises(BatchShapeError, match="gate_up_proj' of shape"):
        load_for(tmp_path, [second])


def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    write(tmp_path / "c", CheckpointFormat.HF)
    file = tmp_path / "c" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptStateError, match="checksum"):
        load_for(tmp_path / "c", SLICES)


def test_a_load_waits_for_the_checkpoint_that_is_coming(tmp_path: Path) -> None:
    announce(tmp_path / "c", "n")
    writer = threading.Timer(0.2, write, (tmp_path / "c", CheckpointFormat.BOTH))
    writer.start()
    assert list(load_for(tmp_path / "c", SLICES)) == list(SLICES)
    writer.join()
    with pytest.raises(CheckpointNotFoundError):
        load_for(tmp_path / "never", SLICES)


def test_nothing_is_filled_unless_every_rank_can(tmp_path: Path) -> None:
    write(tmp_path / "c", CheckpointFormat.BOTH)
    slices = v.wanted(TENSORS, v.rows(TENSORS, 1)[0])
    memory = bytearray(slices[0].nbytes)

    def gather(value: str) -> list[str]:
        return [value, '{"error": {"code": "state_lost", "message": "gone", "details": {}}}']

    with pytest.raises(StateLostError, match="gone"):
        fill_from_checkpoint(tmp_path / "c", slices, lambda _: memoryview(memory), gather)
    assert not any(memory)
    fill_from_checkpoint(tmp_path / "c", slices, lambda _: memoryview(memory), lambda x: [x])
    assert bytes(memory) == TENSORS[v.key("w")][1].tobytes()


def test_a_load_that_breaks_off_does_not_pass_for_one_that_changed_nothing(tmp_path: Path) -> None:
    """A typed error would say that the state is as it was, and no worker would be restarted."""
    write(tmp_path / "c", CheckpointFormat.BOTH)
    slices = v.wanted(TENSORS, v.rows(TENSORS, 1)[0])
    memory = bytearray(slices[0].nbytes)

    def damaged_meanwhile(value: str) -> list[str]:
        for file in (tmp_path / "c").rglob("*.safetensors"):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        return [value]

    with pytest.raises(RuntimeError, match="while it was read"):
        fill_from_checkpoint(
            tmp_path / "c", slices, lambda _: memoryview(memory), damaged_meanwhile
        )


def test_ranks_agree_on_values_and_on_the_first_failure() -> None:
    def fail() -> str:
        raise CorruptStateError("mine")

    assert on_all_ranks(lambda value: [value, value], lambda: "x") == ["x", "x"]
    with pytest.raises(CorruptStateError, match="mine"):
        on_all_ranks(lambda value: ['{"value": ""}', value], fail)


@pytest.mark.parametrize("checkpoint_format", [*CheckpointFormat, None])
def test_a_critic_is_no_checkpoint_of_a_language_model(
    tmp_path: Path, checkpoint_format: CheckpointFormat | None
) -> None:
    """Its other parameters may be all that a model with tied embeddings has."""
    path = tmp_path / "c"
    if checkpoint_format is None:
        path.mkdir()
        save_file({"score.weight": torch.ones(1, 6)}, path / "model.safetensors")
    else:
        head = v.random_tensor(np.random.default_rng(2), "F32", (1, 5))
        write(path, checkpoint_format, {**TENSORS, v.key("score.weight"): head})
    causal = tiny_qwen2("0123456789")
    with pytest.raises(BatchShapeError, match=r"'c' is of a critic or a reward model"):
        refuse_critic(path, causal)
    refuse_critic(path, replace(causal, head="value"))
    refuse_critic(path, replace(causal, head="reward"))
    write(tmp_path / "policy", CheckpointFormat.HF)
    refuse_critic(tmp_path / "policy", causal)
