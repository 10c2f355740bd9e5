"""Parameters and gradients where a CPU can step them, a chunk at a time.

On a CPU node they are there. From a GPU they come over pinned memory while the chunk before is
stepped, and the parameters go back while the next one is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

CHUNK_ELEMENTS = 512 << 10
"""Of a chunk: four arrays of this many floats stay in a core's cache from copy to step."""


class Run(NamedTuple):
    """Elements in a row, alike in the arena and in host memory; a multiple of 16 but for the last,
    so that cutting them up changes no bit of a vectorised step."""

    parameter: torch.Tensor
    """[elements] float32, on the arena."""
    gradient: torch.Tensor
    """[elements] float32, on the arena."""
    place: int
    """Of the first element among the elements of each moment."""


class Chunk(NamedTuple):
    """Part of a run, on the CPU."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    place: int


def chunks_on_cpu(runs: Sequence[Run]) -> Iterator[Chunk]:
    """Every chunk in turn, to be stepped before the next is asked for; what is done to parameters
    is done on the arena when the caller's stream gets there."""
    parts = [
        Chunk(run.parameter[first:end], run.gradient[first:end], run.place + first)
        for run in runs
        for first in range(0, len(run.parameter), CHUNK_ELEMENTS)
        for end in (min(first + CHUNK_ELEMENTS, len(run.parameter)),)
    ]
    if parts and parts[0].parameter.is_cuda:
        yield from _over_pinned_memory(parts)
    else:
        yield from parts


@dataclass(slots=True)
class _Slot:
    """Pinned memory for one chunk."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    came: torch.cuda.Event
    left: torch.cuda.Event


def _over_pinned_memory(parts: Sequence[Chunk]) -> Iterator[Chunk]:
    device = parts[0].parameter.device
    used = torch.cuda.current_stream(device)
    down, up = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
    longest = max(len(part.parameter) for part in parts)
    slots = [
        _Slot(
            torch.empty(longest, pin_memory=True),
            torch.empty(longest, pin_memory=True),
            torch.cuda.Event(),  # type: ignore[no-untyped-call]
            torch.cuda.Event(),  # type: ignore[no-untyped-call]
        )
        for _ in range(2)
    ]

    def fetch(index: int) -> None:
        part, slot = parts[index], slots[index % 2]
        count = len(part.parameter)
        with torch.cuda.stream(down):
            # What the slot held before must have gone back.
            down.wait_event(slot.left)
            slot.parameter[:count].copy_(part.parameter, non_blocking=True)
            slot.gradient[:count].copy_(part.gradient, non_blocking=True)
            slot.came.record(down)

    # Gradients are the caller's stream's work.
    down.wait_stream(used)
    fetch(0)
    for index, part in enumerate(parts):
        if index + 1 < len(parts):
            fetch(index + 1)
        slot, count = slots[index % 2], len(part.parameter)
        slot.came.synchronize()
        yield Chunk(slot.parameter[:count], slot.gradient[:count], part.place)
        with torch.cuda.stream(up):
            part.parameter.copy_(slot.parameter[:count], non_blocking=True)
            slot.left.record(up)
    used.wait_stream(up)
    # The pinned memory is given back when this returns, so nothing may be on its way any more.
    up.synchronize()
