"""Brings parameters and gradients to the CPU for an optimizer step, one chunk at a time.

On a CPU node they are already there. From a GPU each chunk is copied through pinned memory while
the previous chunk is stepped, and copied back while the next one is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

CHUNK_ELEMENTS = 512 << 10
"""Elements of a chunk: four arrays of this many floats stay in a core's cache from copy to step."""


class HostRun(NamedTuple):
    """Elements that are contiguous both in the arena and in host memory.

    Their number is a multiple of 16, except in the last run, so that chunks change no bit of a
    vectorised step.
    """

    parameter: torch.Tensor
    """[elements] float32, on the arena."""
    gradient: torch.Tensor
    """[elements] float32, on the arena."""
    offset: int
    """Offset of the first element in each moment, in elements."""


class HostChunk(NamedTuple):
    """Part of a run, on the CPU."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    offset: int


def chunks_on_cpu(runs: Sequence[HostRun]) -> Iterator[HostChunk]:
    """Every chunk in turn. The caller steps a chunk before it requests the next one. Changes of the
    parameters reach the arena in the order of the caller's stream."""
    parts = [
        HostChunk(run.parameter[first:end], run.gradient[first:end], run.offset + first)
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
    fetched: torch.cuda.Event
    written_back: torch.cuda.Event


def _over_pinned_memory(parts: Sequence[HostChunk]) -> Iterator[HostChunk]:
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
            # The slot's previous chunk must have been written back.
            down.wait_event(slot.written_back)
            slot.parameter[:count].copy_(part.parameter, non_blocking=True)
            slot.gradient[:count].copy_(part.gradient, non_blocking=True)
            slot.fetched.record(down)

    # The caller's stream computes the gradients.
    down.wait_stream(used)
    fetch(0)
    for index, part in enumerate(parts):
        if index + 1 < len(parts):
            fetch(index + 1)
        slot, count = slots[index % 2], len(part.parameter)
        slot.fetched.synchronize()
        yield HostChunk(slot.parameter[:count], slot.gradient[:count], part.offset)
        with torch.cuda.stream(up):
            part.parameter.copy_(slot.parameter[:count], non_blocking=True)
            slot.written_back.record(up)
    used.wait_stream(up)
    # The pinned memory is freed on return, so all copies must have ended.
    up.synchronize()
