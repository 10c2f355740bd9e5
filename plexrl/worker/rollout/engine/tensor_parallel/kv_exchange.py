"""Moves the keys and values of unfinished samples to the ranks of their new groups (PAT §4.3).

Layer by layer, every rank sends each other rank exactly the heads and the computed tokens that the
other will have and this one has; PAT gathers all heads and slices them. The old and the new cache
are the same memory: a layer has fewer heads and more blocks in a larger group. So all that leaves a
layer is copied out before anything is written. The extra memory is what this rank sends and
receives of two layers: one is under way while the other is copied.

Shapes: K = 2·heads, keys first, B blocks of S tokens, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from plexrl.worker.rollout.engine.kv_pool import KvPool
from plexrl.worker.rollout.engine.tensor_parallel.redistribution import NewGroup
from plexrl.worker.rollout.engine.tensor_parallel.switch_groups import SwitchGroups

LAYERS_UNDER_WAY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A change of the groups' size, as all ranks know it."""

    groups: SwitchGroups
    before: int
    """Ranks of an old group."""
    after: int
    plan: Sequence[NewGroup]
    """By new group."""


class KvExchange:
    """One rank's part in moving the cache."""

    def __init__(self, switch: Switch, old: KvPool, new: KvPool, allocated: Sequence[int]) -> None:
        """`new` has the memory of `old` already. `allocated` are the blocks of this rank's new
        group that `NewGroup` counts from 0."""
        self._switch = switch
        self._old_heads, self._layers = old.heads, new.layers()
        self._kv_heads = old.heads * switch.before
        groups, rank = switch.groups, switch.groups.rank
        self.bytes_moved = 0
        """Sent between ranks, in all layers and by all ranks."""
        self._sends: list[_Message] = []
        self._receives: list[_Message] = []
        ranks = range(groups.world)
        for sender, receiver in ((a, b) for a in ranks for b in ranks):
            moves = switch.plan[receiver // switch.after].moves.get(sender // switch.before)
            had = groups.heads(sender, switch.before, self._kv_heads)
            gets = groups.heads(receiver, switch.after, self._kv_heads)
            heads = range(max(had.start, gets.start), min(had.stop, gets.stop))
            if moves is None or not len(heads) or not moves.tokens:
                continue
            if sender != receiver:
                self.bytes_moved += self._nbytes(len(heads), moves.tokens) * len(self._layers)
            if sender == rank:
                own = heads.start - had.start
                places = self._places(moves.blocks, moves.valid)
                self._sends.append(_Message(receiver, own, len(heads), *places))
            if receiver == rank:
                own = heads.start - gets.start
                places = self._places([allocated[target] for target in moves.targets], moves.valid)
                self._receives.append(_Message(sender, own, len(heads), *places))
        # By rank, and what stays here last: it is not sent.
        self._sends.sort(key=lambda message: (message.peer == rank, message.peer))
        self._receives.sort(key=lambda message: message.peer)

    @torch.inference_mode()
    def run(self) -> None:
        """Move all layers. Every rank calls this. A layer is under way while the next one is copied
        out."""
        buffers = [self._buffer() for _ in self._layers[:LAYERS_UNDER_WAY]]
        for index, layer_KBSD in enumerate(self._layers):
            if index >= len(buffers):
                self._arrive(self._layers[index - len(buffers)], buffers[index % len(buffers)])
            self._leave(layer_KBSD, buffers[index % len(buffers)])
        first = len(self._layers) - len(buffers)
        for index, layer_KBSD in enumerate(self._layers[first:], start=first):
            self._arrive(layer_KBSD, buffers[index % len(buffers)])

    def _buffer(self) -> "_Buffer":
        world = self._switch.groups.world
        outward, inward = [0] * world, [0] * world
        for message in self._sends:
            outward[message.peer] = self._nbytes(message.heads, message.count(self._block_tokens))
        for message in self._receives:
            inward[message.peer] = self._nbytes(message.heads, message.count(self._block_tokens))
        rank, device = self._switch.groups.rank, self._layers[0].device
        if dist.get_backend(self._switch.groups.everyone.process_group) == "gloo":
            # gloo exchanges host memory only.
            device = torch.device("cpu")
        kept, outward[rank], inward[rank] = outward[rank], 0, 0
        return _Buffer(
            outward=outward,
            inward=inward,
            send=torch.empty(sum(outward) + kept, dtype=torch.uint8, device=device),
            receive=torch.empty(sum(inward), dtype=torch.uint8, device=device),
        )

    def _leave(self, layer_KBSD: torch.Tensor, buffer: "_Buffer") -> None:
        """Copy all out of a layer that is needed, and begin to send."""
        old_KBSD = layer_KBSD.view(2 * self._old_heads, -1, *layer_KBSD.shape[2:])
        rest = buffer.send.view(layer_KBSD.dtype)
        for message in self._sends:
            rest = message.copy_out(old_KBSD, rest)
        if self.bytes_moved:
            buffer.work = dist.all_to_all_single(
                buffer.receive,
                buffer.send[: sum(buffer.outward)],
                buffer.inward,
                buffer.outward,
                group=self._switch.groups.everyone.process_group,
                async_op=True,
            )

    def _arrive(self, layer_KBSD: torch.Tensor, buffer: "_Buffer") -> None:
        """Wait for what is sent, and write it to the layer."""
        if buffer.work is not None:
            buffer.work.wait()
        rest = buffer.receive.view(layer_KBSD.dtype)
        for message in self._receives:
            if message.peer == self._switch.groups.rank:
                stays = buffer.send[sum(buffer.outward) :]
                message.copy_in(layer_KBSD, stays.view(layer_KBSD.dtype))
            else:
                rest = message.copy_in(layer_KBSD, rest)

    @property
    def _block_tokens(self) -> int:
        return self._layers[0].shape[2]

    def _nbytes(self, heads: int, tokens: int) -> int:
        layer = self._layers[0]
        return 2 * heads * tokens * layer.shape[3] * layer.dtype.itemsize

    def _places(self, blocks: Sequence[int], valid: Sequence[int]) -> tuple["_Index", "_Index"]:
        """Numbers of the full blocks, and positions of the tokens in the others."""
        block_N, valid_N = np.array(blocks, dtype=np.int64), np.array(valid)
        full_N = valid_N == self._block_tokens
        first_N = block_N[~full_N] * self._block_tokens
        count_N = valid_N[~full_N]
        ends_N = np.cumsum(count_N)
        within = np.arange(count_N.sum()) - np.repeat(ends_N - count_N, count_N)
        token = np.repeat(first_N, count_N) + within
        device = self._layers[0].device
        return _Index(block_N[full_N], device), _Index(token, device)


class _Index:
    """Places along an axis."""

    def __init__(self, places: npt.NDArray[np.int64], device: torch.device) -> None:
        self.count = len(places)
        self._span: slice | None = None
        """Absent: the places are not consecutive. A span is copied several times as fast."""
        if self.count and (np.diff(places) == 1).all():
            self._span = slice(int(places[0]), int(places[-1]) + 1)
        self._places = torch.from_numpy(places).to(device)

    def read(self, source: torch.Tensor, part: torch.Tensor) -> None:
        """Copy the places along axis 1 of `source` to `part`, which may be on another device."""
        if self._span is not None:
            part.copy_(source[:, self._span])
        elif part.device == source.device:
            torch.index_select(source, 1, self._places, out=part)
        else:
            part.copy_(source.index_select(1, self._places))

    def write(self, target: torch.Tensor, part: torch.Tensor) -> None:
        """Copy `part` to the places along axis 1 of `target`."""
        if self._span is not None:
            target[:, self._span].copy_(part)
        else:
            target.index_copy_(1, self._places, part.to(target.device))


@dataclass(slots=True, kw_only=True)
class _Buffer:
    """The tensors that leave one layer and arrive there."""

    outward: list[int]
    """Bytes to each rank."""
    inward: list[int]
    """Bytes from each rank."""
    send: torch.Tensor
    """Rows that are sent, by rank, and then those that stay on this rank."""
    receive: torch.Tensor
    work: Any = None


@dataclass(frozen=True, slots=True)
class _Message:
    """The rows of each layer that this rank sends to a rank, or receives from it; it may be the
    same rank."""

    peer: int
    first: int
    """Index of its first head among this rank's, in the old groups or in the new ones."""
    heads: int
    whole: _Index
    """Numbers of full blocks."""
    token: _Index
    """Positions of the other tokens, block·S + offset."""

    def count(self, block_tokens: int) -> int:
        """Tokens."""
        return self.whole.count * block_tokens + self.token.count

    def copy_out(self, layer_KBSD: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Copy to the start of `buffer`; returns the rest of it."""
        for source, index, part in self._parts(layer_KBSD, buffer):
            index.read(source, part)
        return buffer[self._elements(layer_KBSD) :]

    def copy_in(self, layer_KBSD: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Copy from the start of `buffer`; returns the rest of it."""
        for target, index, part in self._parts(layer_KBSD, buffer):
            index.write(target, part)
        return buffer[self._elements(layer_KBSD) :]

    def _elements(self, layer_KBSD: torch.Tensor) -> int:
        _, _, block_tokens, head_size = layer_KBSD.shape
        return 2 * self.heads * self.count(block_tokens) * head_size

    def _parts(
        self, layer_KBSD: torch.Tensor, buffer: torch.Tensor
    ) -> list[tuple[torch.Tensor, _Index, torch.Tensor]]:
        """(heads of the layer, index along their axis 1, the place in the buffer) of each copy."""
        rows, _, block_tokens, head_size = layer_KBSD.shape
        found = []
        for index, width in ((self.whole, block_tokens * head_size), (self.token, head_size)):
            by_width = layer_KBSD.view(rows, -1, width)
            for first in (self.first, rows // 2 + self.first):
                size = self.heads * index.count * width
                part = buffer[:size].view(self.heads, index.count, width)
                buffer = buffer[size:]
                found.append((by_width[first : first + self.heads], index, part))
        return found
