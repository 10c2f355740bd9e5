"""Brings decoder layers from host memory to the device, one after another, while others compute
(Flexes §4.3).

The device has `slots` for some layers only. Layer i uses slot i modulo their number. As soon as a
layer has run, its slot gets the next layer that uses it: while a layer computes, the layers after
it are copied. After the last layer come the first ones again, for the next micro-batch.

Copies run in a thread, which releases the interpreter for the copy itself. On a GPU they have a
stream of their own, because work on one stream never overlaps.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import torch
from torch import nn

LOG = logging.getLogger(__name__)


class LayerStream:
    """The layers of one model, in host memory, and their slots on the device."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        hosted: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
    ) -> None:
        """Args:
        layers: modules that run in this order. The parameters of layer i are views of its slot.
        hosted: each layer's bytes in host memory, uint8, in the order of `layers`.
        slots: memory on the device, uint8, each as large as the largest layer. At least one.
        """
        self._hosted = hosted
        self._slots = slots
        self._held: list[int | None] = [None] * len(slots)
        """The layer that each slot has, or gets by its copy."""
        self._copies: list[Future[None] | None] = [None] * len(slots)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="layers")
        self._stream: torch.cuda.Stream | None = None
        if slots[0].is_cuda:
            self._stream = torch.cuda.Stream(slots[0].device)  # type: ignore[no-untyped-call]
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before, index))
            layer.register_forward_hook(partial(self._after, index))

    def drain(self) -> None:
        """Wait for all copies, and forget what the slots have: they, or the layers, are about to
        change, or to lose their memory. Never raises; a copy that failed is made again by the next
        pass."""
        copies = [copy for copy in self._copies if copy is not None]
        wait(copies)
        self._copies = [None] * len(self._slots)
        self._held = [None] * len(self._slots)
        for copy in copies:
            if (error := copy.exception()) is not None:
                LOG.warning("a layer was not copied to the device, and is not needed: %s", error)

    def _before(self, index: int, *_: object) -> None:
        count = len(self._slots)
        if index == 0:
            for first in range(count):
                self._fetch(first)
        self._fetch(index)
        copy = self._copies[index % count]
        if copy is not None:
            copy.result()
            self._copies[index % count] = None

    def _after(self, index: int, *_: object) -> None:
        following = index + len(self._slots)
        self._fetch(following if following < len(self._hosted) else index % len(self._slots))

    def _fetch(self, layer: int) -> None:
        slot = layer % len(self._slots)
        if self._held[slot] != layer:
            self._held[slot] = layer
            used = None if self._stream is None else torch.cuda.current_stream().record_event()
            self._copies[slot] = self._thread.submit(self._copy, layer, slot, used)

    def _copy(self, layer: int, slot: int, used: torch.cuda.Event | None) -> None:
        """Copy a layer to its slot; returns when it is there. `used`: the event after the work on
        a GPU that was started before, which may still use the slot."""
        target, hosted = self._slots[slot], self._hosted[layer]
        if self._stream is None or used is None:
            target[: len(hosted)].copy_(hosted)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(used)
            target[: len(hosted)].copy_(hosted)
