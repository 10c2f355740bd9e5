"""Reads checkpoints into a worker's state, and makes the small files of new ones.

The StateManager writes checkpoints (`plexrl.statemanager.checkpoint`). The worker adds the files
that only the model's library can make.
"""

import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from plexrl.errors import (
    BatchShapeError,
    CheckpointNotFoundError,
    CorruptStateError,
    PlexRLError,
)
from plexrl.model.spec import ModelSpec
from plexrl.statemanager.checkpoint.announcement import wait_until_written
from plexrl.statemanager.checkpoint.format.published_names import published_tensors
from plexrl.statemanager.checkpoint.format.record import RECORD
from plexrl.statemanager.checkpoint.places.choice import Location, place_at
from plexrl.statemanager.checkpoint.places.place import CheckpointPlace
from plexrl.statemanager.checkpoint.restore import Checkpoint
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.storage.location import directory, is_url
from plexrl.worker.state.rank_agreement import on_all_ranks

if TYPE_CHECKING:
    import torch


def fill_from_checkpoint(
    path: Location,
    wants: Sequence[StateSlice],
    memory: Callable[[StateSlice], memoryview],
    gather: Callable[[str], list[str]],
) -> None:
    """Fill this rank's slices. Every rank takes part: all ranks are filled, or none is changed.

    Raises:
        CheckpointNotFoundError: on every rank.
        CorruptStateError: some rank found damage; on every rank.
        StoreUnavailableError: the object store does not answer some rank; on every rank.
        RuntimeError: the files were damaged after the check; slices may be partly written.
    """
    with ExitStack() as held:
        opened: list[Checkpoint] = []

        def open_it() -> str:
            opened.append(held.enter_context(_opened(path, wants)))
            return ""

        on_all_ranks(gather, open_it)
        try:
            opened[0].fill(wants, memory)
        except PlexRLError as error:
            # A PlexRLError would mean that the state is unchanged.
            raise RuntimeError(f"{path} was damaged while it was read: {error}") from error


def load_for(path: Location, slices: Sequence[StateSlice]) -> "dict[StateSlice, torch.Tensor]":
    """The part of a parameter that each of `slices` names, in the dtype of the checkpoint. Only
    these parts are read of a checkpoint of this cluster.

    Raises:
        BatchShapeError: a parameter is missing, or has another shape.
        CheckpointNotFoundError: there is no safetensors file.
        CorruptStateError: a file cannot be read.
        StoreUnavailableError: the object store does not answer.
    """
    place = place_at(path)
    wait_until_written(place)
    if is_url(str(path)) or (directory(str(path)) / RECORD).exists():
        return _recorded_parts(place, slices)
    found = _hf_parameters(directory(str(path)))
    model_type = _model_type(directory(str(path)))
    parts = {}
    for piece in slices:
        whole = _whole(found, model_type, piece)
        if whole is None or tuple(whole.shape) != piece.global_shape:
            raise _other_model(place, piece)
        for dimension, (start, extent) in enumerate(zip(piece.offset, piece.shape, strict=True)):
            whole = whole.narrow(dimension, start, extent)
        parts[piece] = whole
    return parts


def refuse_critic(path: Location, spec: ModelSpec) -> None:
    """Refuse a critic's or a reward model's checkpoint for a language model: with tied embeddings
    no parameter of that would be missing.

    Raises:
        BatchShapeError: it has a value head, and `spec` the head of a language model.
        CorruptStateError, StoreUnavailableError: as `load_for`.
    """
    from plexrl.worker.models.build import VALUE_HEAD

    place = place_at(path)
    if spec.head == "causal" and VALUE_HEAD in _parameter_names(place, path):
        raise BatchShapeError(
            f"checkpoint {place.name!r} is of a critic or a reward model ({VALUE_HEAD}), not of a "
            "language model: load a checkpoint of this deployment's model"
        )


def _parameter_names(place: CheckpointPlace, path: Location) -> set[str]:
    """Names of the parameters of a checkpoint; none if there is no file."""
    from safetensors import SafetensorError, safe_open

    wait_until_written(place)
    if is_url(str(path)) or (directory(str(path)) / RECORD).exists():
        with Checkpoint(place) as checkpoint:
            return set(checkpoint.whole_parameters())
    names: set[str] = set()
    for file in directory(str(path)).glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as opened:
                names.update(opened.keys())
        except (SafetensorError, OSError) as error:
            raise CorruptStateError(f"{file} cannot be read: {error}") from error
    return names


def recorded_trainer_step(path: Location) -> int:
    """Optimizer steps in the parameters of a checkpoint; 0 if the checkpoint does not record it."""
    try:
        return place_at(path).read_record().trainer_step
    except CheckpointNotFoundError:
        return 0


def model_files(spec: ModelSpec, config: Any, generation_config: Any) -> dict[str, bytes]:
    """The files that `transformers` needs in addition to a model's tensors, by name."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config.save_pretrained(folder)
        if generation_config is not None:
            # A model made from its configuration alone may have an invalid generation config.
            with suppress(ValueError):
                generation_config.save_pretrained(folder)
        found = {path.name: path.read_bytes() for path in folder.iterdir()}
    return found | tokenizer_files(spec)


def tokenizer_files(spec: ModelSpec) -> dict[str, bytes]:
    """The tokenizer's files of the model's directory, by name."""
    from plexrl.model.text.tokenizer import char_tokenizer_json

    found: dict[str, bytes] = {}
    if spec.path is not None:
        for pattern in TOKENIZER_FILES:
            for file in Path(spec.path).glob(pattern):
                if file.is_file():
                    found[file.name] = file.read_bytes()
    elif spec.vocabulary:
        found["tokenizer.json"] = char_tokenizer_json(spec.vocabulary).encode()
    return found


TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "*.tiktoken",
    "*.model",
)


def pack_files(files: Mapping[str, bytes]) -> int:
    """A descriptor of an in-memory tar file with these files; the caller closes it."""
    fd = os.memfd_create("plexrl-extras", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as out, tarfile.open(fileobj=out, mode="w:") as tar:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return fd


def _opened(path: Location, wants: Sequence[StateSlice]) -> Checkpoint:
    """The checkpoint, after a check of everything that `wants` needs."""
    place = place_at(path)
    wait_until_written(place)
    checkpoint = Checkpoint(place)
    try:
        checkpoint.verify(wants)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _recorded_parts(
    place: CheckpointPlace, slices: Sequence[StateSlice]
) -> "dict[StateSlice, torch.Tensor]":
    import torch

    from plexrl.worker.state.arena_tensors import TORCH_DTYPES

    with Checkpoint(place) as checkpoint:
        stored = checkpoint.whole_parameters()
        wants: list[StateSlice] = []
        for piece in slices:
            whole = stored.get(piece.key.name)
            if whole is None or whole.global_shape != piece.global_shape:
                raise _other_model(place, piece)
            wants.append(replace(whole, offset=piece.offset, shape=piece.shape))
        memory = {want: bytearray(want.nbytes) for want in wants}
        checkpoint.fill(wants, lambda want: memoryview(memory[want]))
        return {
            piece: torch.frombuffer(memory[want], dtype=TORCH_DTYPES[want.dtype]).view(want.shape)
            if want.nbytes
            else torch.empty(want.shape, dtype=TORCH_DTYPES[want.dtype])
            for piece, want in zip(slices, wants, strict=True)
        }


def _whole(
    found: "Mapping[str, torch.Tensor]", model_type: str, piece: StateSlice
) -> "torch.Tensor | None":
    """The parameter of `piece`: from published tensors, or from one of its own name."""
    import torch

    entries = published_tensors(model_type, piece.key.name, piece.global_shape)
    tensors = [found[name] for name, _ in entries if name in found]
    if len(entries) == 1 or [tuple(tensor.shape) for tensor in tensors] != [
        at for _, at in entries
    ]:
        return tensors[0] if len(entries) == len(tensors) == 1 else found.get(piece.key.name)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).view(piece.global_shape)


def _model_type(path: Path) -> str:
    try:
        config = msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return ""
    return str(config.get("model_type", ""))


def _hf_parameters(path: Path) -> "dict[str, torch.Tensor]":
    from safetensors import SafetensorError
    from safetensors.torch import load_file

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


def _other_model(place: CheckpointPlace, piece: StateSlice) -> BatchShapeError:
    return BatchShapeError(
        f"checkpoint {place.name!r} has no parameter {piece.key.name!r} of shape "
        f"{list(piece.global_shape)}: load a checkpoint of this deployment's model"
    )
