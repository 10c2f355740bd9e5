"""One rank's part of a model's frozen weights, in memory that deployments of the same model share.

The node's StateManager allocates that memory (`plexrl.statemanager.device.frozen_weights`). The
first rank that maps it fills it, box by box.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from plexrl.errors import InvalidRequestError
from plexrl.model.spec import ModelSpec
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.layout.keys import StateKey, StatePart
from plexrl.worker.state.arena_tensors import ArenaLayout, ShardBox, span, view

Read = Callable[[str], torch.Tensor]
"""Reads this rank's shard of a frozen parameter, in its shape, by the parameter's name."""

ModelFiles = tuple[tuple[str, int, int, int], ...]
"""Files of a model's directory that determine its weights: (name, bytes, time of the last change in
ns, inode) of each."""
DECIDING = ("config.json", "*.safetensors", "*.bin", "*.index.json")


class FrozenBase:
    """The frozen weights of one rank. Their memory reads as zero until it is mapped."""

    def __init__(
        self,
        spec: ModelSpec,
        files: ModelFiles,
        boxes: Mapping[str, ShardBox],
        read: Read,
        *,
        make_arena: Callable[[int], WorkerArena],
    ) -> None:
        """`files` are the files of `spec`, as they were before the model was laid out.

        Raises:
            InvalidRequestError: the files have changed since, so the model may mix two versions.
        """
        self._spec, self._files = spec, files
        self._check_files()
        layout = ArenaLayout()
        for name, box in boxes.items():
            layout.add(StateKey(part=StatePart.PARAMETER, name=name), box)
        self._slices = {piece.key.name: piece for piece in layout.slices}
        self._boxes = dict(boxes)
        self._read = read
        self.arena = make_arena(layout.nbytes)
        self.content = content_of(spec, files, boxes)
        """Digest; equal for two bases whose bytes are equal."""

    def home(self, name: str) -> torch.Tensor:
        """The memory of a parameter's shard, flat, padding included."""
        return span(self.arena, self._slices[name].arena_offset, self._boxes[name].reserve)

    def fill(self) -> None:
        """Write all weights.

        Raises:
            InvalidRequestError: the model's files have changed since `content` was computed.
        """
        self._check_files()
        for name, piece in self._slices.items():
            if piece.nbytes:
                view(self.arena, piece).copy_(self._read(name))
        # They may have been replaced meanwhile.
        self._check_files()

    def _check_files(self) -> None:
        if model_files(self._spec) != self._files:
            raise InvalidRequestError(
                f"the files in {self._spec.path} have changed since this deployment's model was "
                "read from them: put them back, or keep each version in a directory of its own"
            )


def model_files(spec: ModelSpec) -> ModelFiles:
    """The files of a model's directory; none for a model that is generated from a seed.

    Raises:
        InvalidRequestError: the directory cannot be read.
    """
    if spec.path is None:
        return ()
    try:
        found = {file for pattern in DECIDING for file in Path(spec.path).glob(pattern)}
        there = [(file.name, file.stat()) for file in sorted(found)]
    except OSError as error:
        raise InvalidRequestError(f"the model's directory cannot be read: {error}") from error
    return tuple((name, at.st_size, at.st_mtime_ns, at.st_ino) for name, at in there)


def content_of(spec: ModelSpec, files: ModelFiles, boxes: Mapping[str, ShardBox]) -> str:
    """A digest of everything that determines the bytes: the model, its files and the boxes."""
    layout = [(name, b.global_shape, b.offset, b.shape, b.reserve) for name, b in boxes.items()]
    assert all(b.elements <= b.reserve for b in boxes.values())
    named = msgspec.json.encode([msgspec.to_builtins(spec), files, layout])
    return hashlib.sha256(named).hexdigest()
