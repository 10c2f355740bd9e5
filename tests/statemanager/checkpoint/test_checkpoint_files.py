"""Checkpoints written from versions in memory and read back by other libraries and by us."""

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from plexrl.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptStateError,
    InvalidRequestError,
    OperationCancelledError,
    StateLostError,
    StorageError,
)
from plexrl.statemanager.checkpoint.format.plan import SHARD_BYTES_MAX, CheckpointFormat
from plexrl.statemanager.checkpoint.places.choice import Location, place_at
from plexrl.statemanager.checkpoint.restore import Checkpoint, read_record
from plexrl.statemanager.checkpoint.write.progress import CheckpointProgress
from plexrl.statemanager.checkpoint.write.writer import CheckpointSpec, write_checkpoint
from plexrl.statemanager.layout.boxes import Box
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from tests.examples import examples
from tests.statemanager.checkpoint import versions as v

RNG = np.random.default_rng(7)
OPTIMIZER = StatePart.OPTIMIZER
TENSORS: v.Tensors = {
    v.key("embed"): v.random_tensor(RNG, "F32", (1000, 700)),
    v.key("norm"): v.random_tensor(RNG, "F32", (7,)),
    v.key("experts"): v.random_tensor(RNG, "BF16", (3, 5, 11)),
    v.key("embed/exp_avg", OPTIMIZER): v.random_tensor(RNG, "F32", (1000, 700)),
    v.key("step", OPTIMIZER): v.random_tensor(RNG, "F32", ()),
    v.key("empty", OPTIMIZER): v.random_tensor(RNG, "F32", (0, 4)),
}


def write(target: Location, readers: list[v.MemoryReader], **changes: Any) -> CheckpointProgress:
    """Write a checkpoint of everything, but for what is changed."""
    extras_fd = changes.pop("extras_fd", None)
    progress: CheckpointProgress = changes.pop("progress", CheckpointProgress())
    fields: dict[str, Any] = {
        "node": "n",
        "format": CheckpointFormat.BOTH,
        "model_dtype": None,
        "shard_bytes_max": SHARD_BYTES_MAX,
        "overwrite": False,
        "keep": False,
    }
    wanted = CheckpointSpec(target=place_at(target), **{**fields, **changes})
    write_checkpoint(wanted, readers, extras_fd, progress)
    return progress


def restored(path: Location, tensors: v.Tensors, cut: v.Cut) -> tuple[bytes, bytes, int]:
    """What a rank with this cut gets, what it should get, and the bytes that were read."""
    slices = v.wanted(tensors, cut)
    end = max((piece.arena_offset + piece.nbytes for piece in slices), default=0)
    arena, right = bytearray(end), bytearray(end)
    for piece in slices:
        right[piece.arena_offset : piece.arena_offset + piece.nbytes] = v.part_of(tensors, piece)

    def memory(piece: StateSlice) -> memoryview:
        return memoryview(arena)[piece.arena_offset : piece.arena_offset + piece.nbytes]

    with Checkpoint(path) as checkpoint:
        checkpoint.fill(slices, memory)
        return bytes(arena), bytes(right), checkpoint.bytes_read


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_safetensors_reads_every_tensor_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    progress = write(tmp_path / "c", v.versions(TENSORS, ranks))
    found = load_file(tmp_path / "c" / "model.safetensors")
    found |= load_file(tmp_path / "c" / "training" / "optimizer.safetensors")
    assert set(found) == {key.name for key in TENSORS}
    for key, (_, values) in TENSORS.items():
        assert bits(found[key.name]) == values.tobytes(), key
        assert tuple(found[key.name].shape) == values.shape
    assert progress.bytes_done == progress.bytes_total
    assert leftovers(tmp_path) == []


def test_shards_have_an_index_and_keep_to_their_bound(tmp_path: Path) -> None:
    write(tmp_path / "c", v.versions(TENSORS, 2), shard_bytes_max=1_000, format=CheckpointFormat.HF)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "embed": "model-00001-of-00002.safetensors",
        "norm": "model-00002-of-00002.safetensors",
        "experts": "model-00002-of-00002.safetensors",
    }
    assert index["metadata"]["total_size"] == 1000 * 700 * 4 + 28 + 330
    for name, file in index["weight_map"].items():
        found = load_file(tmp_path / "c" / file)[name]
        assert bits(found) == TENSORS[v.key(name)][1].tobytes()
    assert not (tmp_path / "c" / "model.safetensors").exists()
    assert not (tmp_path / "c" / "training").exists()


def expert_names(layer: str, model_type: str) -> list[tuple[str, str, int, slice]]:
    """(name in the file, parameter, expert, rows) of each expert's matrices, as they are published
    by Qwen and by Mistral AI."""
    block = {"qwen3_moe": "mlp", "mixtral": "block_sparse_moe"}[model_type]
    three = {
        "qwen3_moe": ("gate_proj", "up_proj", "down_proj"),
        "mixtral": ("w1", "w3", "w2"),
    }[model_type]
    both, down = f"{layer}.mlp.experts.gate_up_proj", f"{layer}.mlp.experts.down_proj"
    return [
        (f"{layer}.{block}.experts.{expert}.{matrix}.weight", *part)
        for expert in range(3)
        for matrix, part in zip(
            three,
            ((both, expert, slice(4)), (both, expert, slice(4, 8)), (down, expert, slice(5))),
            strict=True,
        )
    ]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    "changes", [{}, {"shard_bytes_max": 200}, {"model_dtype": "BF16"}], ids=str
)
def test_experts_have_their_published_names_and_are_restored(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    layer = "model.layers.0"
    shapes = {
        "experts.gate_up_proj": (3, 8, 5),
        "experts.down_proj": (3, 5, 4),
        "gate.weight": (3, 5),
    }
    values = {name: np.random.default_rng(1).random(shape, "f4") for name, shape in shapes.items()}
    tensors: v.Tensors = {
        v.key(f"{layer}.mlp.{name}"): ("F32", each) for name, each in values.items()
    }
    tensors[v.key(f"{layer}.mlp.experts.down_proj/exp_avg", OPTIMIZER)] = v.random_tensor(
        RNG, "F32", (3, 5, 4)
    )
    write(tmp_path / "c", v.versions(tensors, 2), model_type=model_type, **changes)
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "c").glob("*.safetensors"):
        found |= load_file(file)
    index = tmp_path / "c" / "model.safetensors.index.json"
    assert not index.exists() or json.loads(index.read_text())["weight_map"].keys() == found.keys()
    gate = "block_sparse_moe" if model_type == "mixtral" else "mlp"
    dtype = torch.bfloat16 if "model_dtype" in changes else torch.float32
    wanted = {f"{layer}.{gate}.gate.weight": torch.from_numpy(values["gate.weight"])}
    for name, parameter, expert, rows in expert_names(layer, model_type):
        whole = values[parameter.removeprefix(f"{layer}.mlp.")]
        wanted[name] = torch.from_numpy(whole[expert, rows])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value.to(dtype)) for name, value in wanted.items())
    for ranks in (1, 3):
        for cut in v.rows(tensors, ranks):
            arena, right, _ = restored(tmp_path / "c", tensors, cut)
            assert arena == right


def test_a_cast_rounds_as_torch_does(tmp_path: Path) -> None:
    write(tmp_path / "c", v.versions(TENSORS, 2), model_dtype="BF16")
    found = load_file(tmp_path / "c" / "model.safetensors")
    for name in ("embed", "norm"):
        values = torch.from_numpy(TENSORS[v.key(name)][1].view("f4").copy())
        is_number = ~values.isnan()
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name][is_number], values.bfloat16()[is_number])
        assert found[name][~is_number].isnan().all()
    # Training resumes from what was stored, not from what was cast.
    assert load_file(tmp_path / "c" / "training" / "parameter.safetensors")["embed"].dtype == (
        torch.float32
    )
    arena, right, _ = restored(tmp_path / "c", TENSORS, v.rows(TENSORS, 1)[0])
    assert arena == right


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_another_number_of_ranks_resumes_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    write(tmp_path / "c", v.versions(TENSORS, 3), format=CheckpointFormat.TRAINING)
    for cut in v.rows(TENSORS, ranks):
        arena, right, _ = restored(tmp_path / "c", TENSORS, cut)
        assert arena == right


def test_a_rank_reads_little_more_than_its_own_slices(tmp_path: Path) -> None:
    tensors = {v.key("w"): v.random_tensor(RNG, "F32", (4096, 1024))}
    write(tmp_path / "c", v.versions(tensors, 1))
    cut = v.rows(tensors, 4)[1]
    arena, right, bytes_read = restored(tmp_path / "c", tensors, cut)
    assert arena == right
    assert bytes_read == len(right) == 4 << 20


def test_a_column_cut_goes_both_ways(tmp_path: Path) -> None:
    name = v.key("w")
    tensors = {name: v.random_tensor(RNG, "F32", (600, 900))}
    cuts = [
        {name: Box(offset=(0, 0), shape=(600, 500))},
        {name: Box(offset=(0, 500), shape=(600, 400))},
    ]
    readers = [v.version(tensors, cut, rank=rank, world_size=2) for rank, cut in enumerate(cuts)]
    write(tmp_path / "c", readers)
    assert bits(load_file(tmp_path / "c" / "model.safetensors")["w"]) == tensors[name][1].tobytes()
    for cut in cuts:
        arena, right, _ = restored(tmp_path / "c", tensors, cut)
        assert arena == right


def test_replicas_must_agree(tmp_path: Path) -> None:
    name = v.key("w")
    tensors = {name: v.random_tensor(RNG, "F32", (64, 8))}
    whole = v.rows(tensors, 1)[0]
    readers = [v.version(tensors, whole, rank=rank, world_size=2) for rank in range(2)]
    write(tmp_path / "c", readers)
    readers[1].data[77] ^= 1
    with pytest.raises(CorruptStateError, match=r"different values of w"):
        write(tmp_path / "d", readers)
    assert not (tmp_path / "d").exists()
    assert leftovers(tmp_path) == []


def test_a_rank_that_is_not_there_is_missed(tmp_path: Path) -> None:
    with pytest.raises(StateLostError, match="embed"):
        write(tmp_path / "c", v.versions(TENSORS, 2)[:1])


def boxes_of(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    starts = st.tuples(*(st.integers(0, extent - 1) for extent in shape))
    return starts.flatmap(
        lambda start: st.tuples(
            *(st.integers(1, extent - at) for at, extent in zip(start, shape, strict=True))
        ).map(lambda extents: Box(offset=start, shape=extents))
    )


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_cut_goes_in_and_any_cut_comes_out(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    dtype = data.draw(st.sampled_from(["F32", "BF16", "U8", "I64"]))
    name = v.key("w")
    tensors = {name: v.random_tensor(RNG, dtype, shape)}
    # One rank has all of it, the others any boxes: everything but the first is compared.
    cuts: list[v.Cut] = [{name: box} for box in data.draw(st.lists(boxes_of(shape), max_size=3))]
    cuts.append(v.rows(tensors, 1)[0])
    readers = [v.version(tensors, cut, rank=r, world_size=len(cuts)) for r, cut in enumerate(cuts)]
    folder = tmp_path_factory.mktemp("any")
    write(folder / "c", readers)
    for cut in [*cuts, {name: data.draw(boxes_of(shape))}]:
        arena, right, _ = restored(folder / "c", tensors, cut)
        assert arena == right


def test_an_existing_checkpoint_is_replaced_only_on_request(tmp_path: Path) -> None:
    write(tmp_path / "c", v.versions(TENSORS, 1, seq=1))
    with pytest.raises(CheckpointExistsError, match="overwrite"):
        write(tmp_path / "c", v.versions(TENSORS, 1, seq=2))
    assert read_record(tmp_path / "c").seq == 1
    write(tmp_path / "c", v.versions(TENSORS, 1, seq=2), overwrite=True)
    assert read_record(tmp_path / "c").seq == 2
    assert leftovers(tmp_path) == []


def test_a_cancelled_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    progress = CheckpointProgress()
    progress.cancel()
    with pytest.raises(OperationCancelledError):
        write(tmp_path / "c", v.versions(TENSORS, 1), progress=progress)
    assert list(tmp_path.iterdir()) == []


def extras(*names: str) -> int:
    fd = os.memfd_create("extras")
    with os.fdopen(os.dup(fd), "wb") as file, tarfile.open(fileobj=file, mode="w:") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 2
            tar.addfile(member, io.BytesIO(b"{}"))
    return fd


def test_what_belongs_beside_the_tensors_comes_along(tmp_path: Path) -> None:
    write(tmp_path / "c", v.versions(TENSORS, 1), extras_fd=extras("config.json", "vocab.json"))
    assert (tmp_path / "c" / "config.json").read_text() == "{}"
    assert (tmp_path / "c" / "vocab.json").exists()


@pytest.mark.parametrize("name", ["../up.json", "/etc/plexrl", ".hidden", "sub/file"])
def test_nothing_is_put_outside_the_checkpoint(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="without a path"):
        write(tmp_path / "c", v.versions(TENSORS, 1), extras_fd=extras(name))
    assert list(tmp_path.iterdir()) == []


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def flip_head(path: Path) -> None:
    text = path.read_bytes()
    path.write_bytes(text.replace(b"[0,2800000]", b"[0,2800001]", 1))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (truncate, "bytes were written|bytes, "),
        (flip, "does not match its checksum"),
        (flip_head, "does not match its shape"),
        (Path.unlink, "missing"),
    ],
)
def test_damage_is_named_and_nothing_is_changed(tmp_path: Path, damage: Any, why: str) -> None:
    write(tmp_path / "c", v.versions(TENSORS, 2))
    damage(tmp_path / "c" / "training" / "optimizer.safetensors")
    slices = v.wanted(TENSORS, v.rows(TENSORS, 1)[0])
    with (
        pytest.raises(CorruptStateError, match=why) as caught,
        Checkpoint(tmp_path / "c") as checkpoint,
    ):
        checkpoint.verify(slices)
    assert "training/optimizer.safetensors" in str(caught.value)
    assert caught.value.details["file"] == "training/optimizer.safetensors"


def test_a_damaged_manifest_is_no_manifest(tmp_path: Path) -> None:
    write(tmp_path / "c", v.versions(TENSORS, 1))
    file = tmp_path / "c" / "checkpoint.json"
    file.write_bytes(file.read_bytes().replace(b'"seq":1', b'"seq":2'))
    with pytest.raises(CorruptStateError, match="checksum does not match"):
        read_record(tmp_path / "c")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "c", v.versions(TENSORS, 1))
    other = {v.key("embed"): v.random_tensor(RNG, "F32", (999, 700))}
    with pytest.raises(CheckpointNotFoundError, match="embed"), Checkpoint(tmp_path / "c") as found:
        found.verify(v.wanted(other, v.rows(other, 1)[0]))


def test_what_cannot_be_written_is_said_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "closed").write_text("")
    with pytest.raises(StorageError, match="closed"):
        write(tmp_path / "closed" / "c", v.versions(TENSORS, 1))
