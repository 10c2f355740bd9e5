"""A base is named by the files that it was made of, and is never made of others."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from plexrl.errors import InvalidRequestError
from plexrl.model.spec import ModelSpec
from plexrl.statemanager.client.arena import Arena
from plexrl.worker.state.arena_tensors import ShardBox
from plexrl.worker.training.fsdp.frozen_base import FrozenBase, ModelFiles, model_files

BOXES = {"w": ShardBox(global_shape=(4,), offset=(0,), shape=(4,), reserve=4)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, 1)
    return tmp_path


def write(folder: Path, value: int) -> None:
    """Replace the weights, as a download does: under another name first."""
    (folder / "new").write_bytes(bytes([value] * 4))
    (folder / "new").rename(folder / "model.safetensors")
    # As copied with its times.
    os.utime(folder / "model.safetensors", ns=(0, 0))


def read(folder: Path) -> torch.Tensor:
    return torch.tensor(list((folder / "model.safetensors").read_bytes()), dtype=torch.float32)


def base_of(folder: Path, files: ModelFiles) -> FrozenBase:
    spec = ModelSpec(path=str(folder))
    return FrozenBase(spec, files, BOXES, lambda _: read(folder), make_arena=Arena)


@pytest.fixture
def base(folder: Path) -> Iterator[FrozenBase]:
    made = base_of(folder, model_files(ModelSpec(path=str(folder))))
    yield made
    made.arena.close()


def test_a_base_is_filled_again_from_the_same_files(base: FrozenBase, folder: Path) -> None:
    for _ in range(2):
        base.fill()
        assert base.home("w").tolist() == [1, 1, 1, 1]
        base.arena.detach()
        (folder / "README.md").write_text("Other files of the directory may change.")


def test_a_base_whose_files_were_replaced_is_refused(base: FrozenBase, folder: Path) -> None:
    write(folder, 2)
    with pytest.raises(InvalidRequestError, match="have changed since"):
        base.fill()
    assert base.home("w").tolist() == [0, 0, 0, 0]


def test_files_that_are_replaced_while_a_model_is_built_are_not_taken_for_it(
    base: FrozenBase, folder: Path
) -> None:
    spec = ModelSpec(path=str(folder))
    before = model_files(spec)
    write(folder, 2)
    with pytest.raises(InvalidRequestError, match="have changed since"):
        base_of(folder, before)
    other = base_of(folder, model_files(spec))
    assert other.content != base.content
    other.arena.close()
