"""Checkpoints: a directory that `transformers` loads, with the resumable training state beside it.

    <checkpoint_dir>/<job>/<name>/
        config.json, model.safetensors, tokenizer.json     what others load
        training/                                           torch DCP: parameters and optimizer

Written under a temporary name and renamed at the end, so that a checkpoint is whole or absent.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from plexrl.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptStateError
from plexrl.model_spec import ModelSpec
from plexrl.wire.operations import CheckpointParams

WEIGHTS = "model.safetensors"
TRAINING = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Distributed tensors over the memory that a load fills in place."""

    parameters: dict[str, DTensor]
    moments: dict[str, dict[str, DTensor]]
    step: torch.Tensor
    config: Any
    """The model's `transformers` configuration."""


def save_training(
    state: TrainState, spec: ModelSpec, folder: Path, params: CheckpointParams, rank: int
) -> Path:
    """Write a checkpoint; every rank takes part. Returns its path.

    Raises:
        CheckpointExistsError: on every rank alike, unless `overwrite` is set.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    target = folder / params.name
    if _agree(target.exists()) and not params.overwrite:
        raise CheckpointExistsError(
            f"checkpoint {params.name!r} exists: choose another name or set overwrite"
        )
    part = folder / f".{params.name}.part"
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    save(_dcp_state(state, optimizer=True), checkpoint_id=part / TRAINING)
    full = {name: tensor.full_tensor() for name, tensor in state.parameters.items()}
    if rank == 0:
        state.config.save_pretrained(part)
        save_file(
            {name: tensor.contiguous() for name, tensor in full.items()},
            part / WEIGHTS,
            metadata={"format": "pt"},
        )
        _write_tokenizer(spec, part)
        _replace(part, target)
    dist.barrier()
    return target


def load_training(state: TrainState, folder: Path, params: CheckpointParams) -> None:
    """Fill `state` from a checkpoint, which may have been written by another number of ranks.

    Raises:
        CheckpointNotFoundError: on every rank alike.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    source = folder / params.name / TRAINING
    if not _agree(source.is_dir()):
        raise CheckpointNotFoundError(
            f"there is no training checkpoint {params.name!r} in {folder.name!r}"
        )
    wanted = _dcp_state(state, optimizer=params.optimizer)
    load(wanted, checkpoint_id=source)
    if params.optimizer:
        state.step.copy_(wanted["step"])
    else:
        state.step.zero_()
        for moment in state.moments.values():
            for tensor in moment.values():
                tensor.to_local().zero_()


def load_hf_parameters(path: Path) -> dict[str, torch.Tensor]:
    """All parameters of a Hugging Face directory, by name.

    Raises:
        CheckpointNotFoundError: no safetensors file is there.
        CorruptStateError: one cannot be read.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointNotFoundError(
            f"there is no checkpoint {path.name!r} in {path.parent.name!r}"
        )
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            found |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise CorruptStateError(f"{file} cannot be read: {error}") from error
    return found


def _dcp_state(state: TrainState, *, optimizer: bool) -> dict[str, Any]:
    wanted: dict[str, Any] = {"model": dict(state.parameters)}
    if optimizer:
        wanted |= {name: dict(moment) for name, moment in state.moments.items()}
        # A scalar view of the arena shares its storage with everything else; send a copy.
        wanted["step"] = state.step.detach().clone()
    return wanted


def _agree(seen: bool) -> bool:
    """Whether rank 0 sees it: ranks must not part ways over a file system's delay."""
    answer = torch.tensor([int(seen)])
    dist.broadcast(answer, src=0)
    return bool(answer.item())


def _write_tokenizer(spec: ModelSpec, folder: Path) -> None:
    from plexrl.tokenizer import char_tokenizer_json

    if spec.path is not None:
        for file in Path(spec.path).glob("tokenizer*"):
            shutil.copy(file, folder)
    elif spec.vocabulary:
        (folder / "tokenizer.json").write_text(char_tokenizer_json(spec.vocabulary))


def _replace(part: Path, target: Path) -> None:
    """Put `part` where `target` is; a reader finds the old one or the new one."""
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        part.rename(target)
        shutil.rmtree(old)
    else:
        part.rename(target)
