"""One rank's part of a model's frozen weights, in memory that deployments of the same model share.

The node's StateManager lends that memory (`plexrl.statemanager.device.frozen_weights`). Whoever
finds it empty fills it, from the model as it was just built or, later, built again.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from plexrl.errors import InvalidRequestError
from plexrl.model.spec import ModelSpec
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.layout.keys import StateKey, StatePart
from plexrl.worker.state.arena_tensors import ArenaLayout, span, view
from plexrl.worker.training.flat_state import ShardBox

Rebuild = Callable[[], Mapping[str, torch.Tensor]]
"""Makes the frozen parameters anew: this rank's shards, each in its shape, by name."""

ModelFiles = tuple[tuple[str, int, int, int], ...]
"""Of those in a model's directory that decide about its weights: name, bytes, time of the last
change in ns and inode of each."""
DECIDING = ("config.json", "*.safetensors", "*.bin", "*.index.json")


class FrozenBase:
    """Reads as zero until it is borrowed."""

    def __init__(
        self, spec: ModelSpec, files: ModelFiles, boxes: Mapping[str, ShardBox], rebuild: Rebuild
    ) -> None:
        """`files` are those of `spec` as they were before anything was read of them.

        Raises:
            InvalidRequestError: they are others by now, so what was built of them is of no version.
        """
        self._spec, self._files = spec, files
        self._check_files()
        layout = ArenaLayout()
        for name, box in boxes.items():
            layout.add(
                StateKey(part=StatePart.PARAMETER, name=name),
                global_shape=box.global_shape,
                offset=box.offset,
                shape=box.shape,
                reserve=box.reserve,
            )
        self._slices = {piece.key.name: piece for piece in layout.slices}
        self._boxes = dict(boxes)
        self._rebuild = rebuild
        self._built: Mapping[str, torch.Tensor] | None = None
        self.arena = Arena(layout.nbytes)
        self.content = content_of(spec, files, boxes)
        """The same for two bases whose bytes are the same."""

    def home(self, name: str) -> torch.Tensor:
        """The memory of a parameter's shard, flat, padding included."""
        return span(self.arena, self._slices[name].arena_offset, self._boxes[name].reserve)

    def keep_built(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Fill from these, which are there already, until `forget_built`."""
        self._built = dict(shards)

    def forget_built(self) -> None:
        """It has been borrowed, whoever filled it."""
        self._built = None

    def fill(self) -> None:
        """Write all of it.

        Raises:
            InvalidRequestError: it would be written from other files than it is named by.
        """
        shards = self._built
        if shards is None:
            shards = self._rebuild()
            self._check_files()
        for name, piece in self._slices.items():
            view(self.arena, piece).copy_(shards[name])

    def _check_files(self) -> None:
        if model_files(self._spec) != self._files:
            raise InvalidRequestError(
                f"the files in {self._spec.path} have changed since this deployment's model was "
                "read from them: put them back, or keep each version in a directory of its own"
            )


def model_files(spec: ModelSpec) -> ModelFiles:
    """Those of a model's directory as they are now; none of a model that is made on the spot.

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
    """A digest of what decides about the bytes: the model, its files, the boxes."""
    places = [(name, b.global_shape, b.offset, b.shape, b.reserve) for name, b in boxes.items()]
    assert all(math.prod(b.shape) <= b.reserve for b in boxes.values())
    named = msgspec.json.encode([msgspec.to_builtins(spec), files, places])
    return hashlib.sha256(named).hexdigest()
