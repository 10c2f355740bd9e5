"""Reads boxes of parameters from a model's safetensors files."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from plexrl.errors import CorruptStateError

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
MAPPED_BYTES_MAX = 64 << 20
"""A file is opened again after this much was read of it: pages of an open file that were read count
as this process's memory."""


class WeightFiles:
    """The tensors in a directory's safetensors files. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Reads the files' headers.

        Raises:
            CorruptStateError: a file cannot be read.
        """
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        self._read_bytes = 0
        for file in _files(folder):
            opened = self._opened(file)
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                self._files[name] = file
                self.shapes[name] = tuple(opened.get_slice(name).get_shape())
        self.forget()

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
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

    def _opened(self, file: Path) -> Any:
        if self._open is None or self._open[0] != file:
            try:
                self._open = file, safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CorruptStateError(f"{file} cannot be read: {error}") from error
        return self._open[1]


def _files(folder: Path) -> list[Path]:
    """The files of the weights, as `transformers` chooses them; none if it reads other files."""
    if (folder / WHOLE).exists():
        return [folder / WHOLE]
    if (folder / INDEX).exists():
        listed = json.loads((folder / INDEX).read_text())["weight_map"]
        return [folder / name for name in sorted(set(listed.values()))]
    return []
