"""Reads checkpoints into a worker's state, and makes the small files of new ones.

The StateManager writes checkpoints (`plexrl.statemanager.checkpoint`). The worker adds the files
that only the model's library can make.
"""

import io
import os
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.errors import (
    BatchShapeError,
    CheckpointNotFoundError,
    CorruptStateError,
    DeadlineExceededError,
    PlexRLError,
)
from plexrl.model.spec import ModelSpec
from plexrl.statemanager.checkpoint.format.record import RECORD, decode_record
from plexrl.statemanager.checkpoint.restore import Checkpoint
from plexrl.statemanager.checkpoint.write.publish import is_coming
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.worker.state.rank_agreement import on_all_ranks

if TYPE_CHECKING:
    import torch

COMING_TIMEOUT_S = 600.0
"""Longest wait of a load for a checkpoint that is being written."""
POLL_S = 0.02


def fill_from_checkpoint(
    path: Path,
    wants: Sequence[StateSlice],
    memory: Callable[[StateSlice], memoryview],
    gather: Callable[[str], list[str]],
) -> None:
    """Fill this rank's slices. Every rank takes part: all ranks are filled, or none is changed.

    Raises:
        CheckpointNotFoundError: on every rank.
        CorruptStateError: some rank found damage; on every rank.
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


def load_for(path: Path, slices: Sequence[StateSlice]) -> "dict[str, torch.Tensor]":
    """The whole parameters that `slices` are parts of, by name, and perhaps others.

    Raises:
        BatchShapeError: one is missing, or has another shape.
        PlexRLError: as `load_hf_parameters`.
    """
    found = load_hf_parameters(path)
    for piece in slices:
        name, shape = piece.key.name, piece.global_shape
        if name not in found or tuple(found[name].shape) != shape:
            raise BatchShapeError(
                f"checkpoint {path.name!r} has no parameter {name!r} of shape {list(shape)}: load "
                "a checkpoint of this deployment's model"
            )
    return found


def load_hf_parameters(path: Path) -> "dict[str, torch.Tensor]":
    """All parameters of a checkpoint or another Hugging Face directory, by name.

    Raises:
        CheckpointNotFoundError: the directory has no safetensors file.
        CorruptStateError: a file cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _wait_until_written(path)
    if (path / RECORD).exists():
        return _recorded_parameters(path)
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


def recorded_trainer_step(path: Path) -> int:
    """Optimizer steps in the parameters of a checkpoint; 0 if the checkpoint does not record it."""
    if not (path / RECORD).exists():
        return 0
    return decode_record((path / RECORD).read_bytes()).trainer_step


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
    from plexrl.model.tokenizer import char_tokenizer_json

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


def _opened(path: Path, wants: Sequence[StateSlice]) -> Checkpoint:
    """The checkpoint, after a check of everything that `wants` needs."""
    _wait_until_written(path)
    checkpoint = Checkpoint(path)
    try:
        checkpoint.verify(wants)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _wait_until_written(path: Path) -> None:
    pause = threading.Event()
    deadline = time.monotonic() + COMING_TIMEOUT_S
    while is_coming(path):
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                f"checkpoint {path.name!r} is still being written after {COMING_TIMEOUT_S:g} s: "
                "load it later"
            )
        pause.wait(POLL_S)


def _recorded_parameters(path: Path) -> "dict[str, torch.Tensor]":
    import torch

    from plexrl.worker.state.arena_tensors import TORCH_DTYPES

    with Checkpoint(path) as checkpoint:
        found: dict[str, torch.Tensor] = {}
        for name, piece in checkpoint.whole_parameters().items():
            data = bytearray(piece.nbytes)
            checkpoint.fill([piece], lambda _, data=data: memoryview(data))  # type: ignore[misc]
            found[name] = torch.frombuffer(data, dtype=TORCH_DTYPES[piece.dtype]).view(piece.shape)
        return found
