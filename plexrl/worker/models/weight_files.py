"""Reads boxes of parameters from a model's safetensors files.

A file holds a parameter under its name, or as the tensors under which it is published, such as the
matrices of each expert (`plexrl.statemanager.checkpoint.format.published_names`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from plexrl.errors import CorruptStateError
from plexrl.process.garbage_collection import trim_heap
from plexrl.statemanager.checkpoint.format.published_names import published_tensors

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
MAPPED_BYTES_MAX = 64 << 20
"""A file is opened again after this much was read of it: pages of an open file that were read count
as this process's memory."""


Index = tuple[slice, ...]


class WeightFiles:
    """The tensors in a directory's safetensors files. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Reads the files' headers.

        Raises:
            CorruptStateError: a file cannot be read.
        """
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the files' tensors."""
        self._files: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        self._read_bytes = 0
        for file in _files(folder):
            opened = self._opened(file)
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                self._files[name] = file
                self.shapes[name] = tuple(opened.get_slice(name).get_shape())
        self.forget()

    def read(self, name: str, index: Index) -> torch.Tensor:
        """A box of a tensor, as float32 on the CPU.

        Raises:
            CorruptStateError: the file cannot be read.
        """
        try:
            part = self._opened(self._files[name]).get_slice(name)
            found: torch.Tensor = part[index] if index else part[...]
        except (SafetensorError, OSError) as error:
            raise CorruptStateError(f"{self._files[name]} cannot be read: {error}") from error
        self._read_bytes += found.numel() * found.element_size()
        if self._read_bytes >= MAPPED_BYTES_MAX:
            self.forget()
        return found.float()

    def forget(self) -> None:
        """Close the files."""
        self._open, self._read_bytes = None, 0
        # glibc keeps it in pieces that are too small for the next parameter.
        trim_heap()

    def _opened(self, file: Path) -> Any:
        if self._open is None or self._open[0] != file:
            try:
                self._open = file, safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CorruptStateError(f"{file} cannot be read: {error}") from error
        return self._open[1]


class PublishedWeights:
    """The parameters of a model whose weights are in files."""

    def __init__(
        self,
        files: WeightFiles,
        model_type: str,
        shapes: Mapping[str, tuple[int, ...]],
        zeros: frozenset[str] = frozenset(),
    ) -> None:
        """`shapes` are those of the model's parameters, by canonical name. The files lack those in
        `zeros`, which begin with zeros."""
        self._files = files
        self._type = model_type
        self._shapes = dict(shapes)
        self._zeros = zeros

    @property
    def are_complete(self) -> bool:
        """Whether the files hold every parameter, in its shape."""
        return all(
            self._files.shapes.get(tensor) == shape
            for name in self._shapes.keys() - self._zeros
            for tensor, shape in self._tensors(name)
        )

    def read(self, name: str, index: Index) -> torch.Tensor:
        """As `Weights.read`."""
        if name in self._zeros:
            return torch.zeros(self._shapes[name])[index]
        tensors = self._tensors(name)
        if len(tensors) == 1:
            return self._files.read(tensors[0][0], index)
        return self._experts([tensor for tensor, _ in tensors], self._shapes[name], index)

    def forget(self) -> None:
        """Close the files."""
        self._files.forget()

    def _tensors(self, name: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        shape = self._shapes[name]
        if self._files.shapes.get(name) == shape:
            return ((name, shape),)
        return published_tensors(self._type, name, shape)

    def _experts(self, names: list[str], shape: tuple[int, ...], index: Index) -> torch.Tensor:
        """A box of the matrices of all experts `[E, M, X]`, of which a file holds each alone, or
        its rows as several tensors of equal size."""
        experts, rows, columns = (
            range(*part.indices(size)) for part, size in zip(index, shape, strict=True)
        )
        found = torch.empty(len(experts), len(rows), len(columns))
        matrices = len(names) // shape[0]
        own = shape[1] // matrices
        for place, expert in enumerate(experts):
            for matrix in range(matrices):
                first = max(rows.start, matrix * own)
                last = min(rows.stop, (matrix + 1) * own)
                if first >= last:
                    continue
                within = slice(first - matrix * own, last - matrix * own)
                read = self._files.read(names[expert * matrices + matrix], (within, index[2]))
                found[place, first - rows.start : last - rows.start] = read
        return found


def _files(folder: Path) -> list[Path]:
    """The files of the weights, as `transformers` chooses them; none if it reads other files."""
    if (folder / WHOLE).exists():
        return [folder / WHOLE]
    if (folder / INDEX).exists():
        listed = json.loads((folder / INDEX).read_text())["weight_map"]
        return [folder / name for name in sorted(set(listed.values()))]
    return []
