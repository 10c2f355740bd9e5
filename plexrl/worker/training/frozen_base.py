"""One rank's part of a model's frozen weights, in memory that deployments of the same model share.

The node's StateManager lends that memory (`plexrl.statemanager.shared_bases`). Whoever finds it
empty fills it, from the model as it was just built or, later, built again.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from plexrl.model_spec import ModelSpec
from plexrl.statemanager.arena import Arena
from plexrl.statemanager.keys import StateKey, StatePart
from plexrl.worker.arena_tensors import ArenaLayout, span, view
from plexrl.worker.training.flat_state import ShardBox

Rebuild = Callable[[], Mapping[str, torch.Tensor]]
"""Makes the frozen parameters anew: this rank's shards, each in its shape, by name."""


class FrozenBase:
    """Reads as zero until it is borrowed."""

    def __init__(self, spec: ModelSpec, boxes: Mapping[str, ShardBox], rebuild: Rebuild) -> None:
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
        self.content = content_of(spec, boxes)
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
        """Write all of it."""
        shards = self._built if self._built is not None else self._rebuild()
        for name, piece in self._slices.items():
            view(self.arena, piece).copy_(shards[name])


def content_of(spec: ModelSpec, boxes: Mapping[str, ShardBox]) -> str:
    """A digest of what decides about the bytes: the model, its files as they are now, the boxes."""
    files: list[tuple[str, int, int]] = []
    if spec.path is not None:
        for path in sorted(Path(spec.path).iterdir()):
            there = path.stat()
            files.append((path.name, there.st_size, there.st_mtime_ns))
    places = [(name, b.global_shape, b.offset, b.shape, b.reserve) for name, b in boxes.items()]
    assert all(math.prod(b.shape) <= b.reserve for b in boxes.values())
    named = msgspec.json.encode([msgspec.to_builtins(spec), files, places])
    return hashlib.sha256(named).hexdigest()
