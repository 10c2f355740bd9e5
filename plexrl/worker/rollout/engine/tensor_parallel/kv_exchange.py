"""Moves the keys and values of unfinished samples to the ranks of their new groups (PAT §4.3).

Layer by layer, every rank sends each other rank exactly the heads and the computed tokens that the
other will have and this one has; PAT gathers all heads and slices them. The old and the new cache
are the same memory: a layer has fewer heads and more blocks in a larger group. So all that leaves a
layer is copied out before anything is written. The extra memory is what this rank sends and
receives of one layer.

Shapes: K = 2·heads, keys first, B blocks of S tokens, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from plexrl.worker.rollout.engine.kv_pool import KvPool
from plexrl.worker.rollout.engine.tensor_parallel.redistribution import NewGroup
from plexrl.worker.rollout.engine.tensor_parallel.switch_groups import SwitchGroups


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
                places = self._places([allocated[each] for each in moves.targets], moves.valid)
                self._receives.append(_Message(sender, own, len(heads), *places))

    @torch.inference_mode()
    def run(self) -> None:
        """Move all layers. Every rank calls this."""
        rank, world = self._switch.groups.rank, self._switch.groups.world
        # What stays on this rank is the last of the send buffer, behind what is sent.
        self._sends.sort(key=lambda message: (message.peer == rank, message.peer))
        receives = sorted(self._receives, key=lambda message: message.peer)
        outward, inward = [0] * world, [0] * world
        for message in self._sends:
            outward[message.peer] = self._nbytes(message.heads, message.count(self._block_tokens))
        for message in receives:
            inward[message.peer] = self._nbytes(message.heads, message.count(self._block_tokens))
        kept, outward[rank], inward[rank] = outward[rank], 0, 0
        device = self._layers[0].device
        send = torch.empty(sum(outward) + kept, dtype=torch.uint8, device=device)
        receive = torch.empty(sum(inward), dtype=torch.uint8, device=device)
        stays = send[sum(outward) :]
        for layer_KBSD in self._layers:
            old_KBSD = layer_KBSD.view(2 * self._old_heads, -1, *layer_KBSD.shape[2:])
            rest = send.view(layer_KBSD.dtype)
            for message in self._sends:
                rest = message.copy_out(old_KBSD, rest)
            if self.bytes_moved:
                dist.all_to_all_single(
                    receive,
                    send[: sum(outward)],
                    inward,
                    outward,
                    group=self._switch.groups.everyone.process_group,
                )
            rest = receive.view(layer_KBSD.dtype)
            for message in receives:
                if message.peer == rank:
                    message.copy_in(layer_KBSD, stays.view(layer_KBSD.dtype))
                else:
                    rest = message.copy_in(layer_KBSD, rest)

    @property
    def _block_tokens(self) -> int:
        return self._layers[0].shape[2]

    def _nbytes(self, heads: int, tokens: int) -> int:
        layer = self._layers[0]
        return 2 * heads * tokens * layer.shape[3] * layer.dtype.itemsize

    def _places(
        self, blocks: Sequence[int], valid: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of the full blocks, and positions of the tokens in the others."""
        block_N, valid_N = np.array(blocks), np.array(valid)
        full_N = valid_N == self._block_tokens
        first_N = block_N[~full_N] * self._block_tokens
        count_N = valid_N[~full_N]
        ends_N = np.cumsum(count_N)
        within = np.arange(count_N.sum()) - np.repeat(ends_N - count_N, count_N)
        token = np.repeat(first_N, count_N) + within
        device = self._layers[0].device
        return torch.from_numpy(block_N[full_N]).to(device), torch.from_numpy(token).to(device)


@dataclass(frozen=True, slots=True)
class _Message:
    """What this rank sends to another rank, or to itself, of each layer; or receives from it."""

    peer: int
    first: int
    """Index of its first head among this rank's, in the old groups or in the new ones."""
    heads: int
    whole: torch.Tensor
    """Numbers of full blocks."""
    token: torch.Tensor
    """Positions of the other tokens, block·S + offset."""

    def count(self, block_tokens: int) -> int:
        """Tokens."""
        return len(self.whole) * block_tokens + len(self.token)

    def copy_out(self, layer_KBSD: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Copy to the start of `buffer`; returns the rest of it."""
        for source, index, part in self._parts(layer_KBSD, buffer):
            torch.index_select(source, 1, index, out=part)
        return buffer[self._elements(layer_KBSD) :]

    def copy_in(self, layer_KBSD: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Copy from the start of `buffer`; returns the rest of it."""
        for target, index, part in self._parts(layer_KBSD, buffer):
            target.index_copy_(1, index, part)
        return buffer[self._elements(layer_KBSD) :]

    def _elements(self, layer_KBSD: torch.Tensor) -> int:
        _, _, block_tokens, head_size = layer_KBSD.shape
        return 2 * self.heads * self.count(block_tokens) * head_size

    def _parts(
        self, layer_KBSD: torch.Tensor, buffer: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(heads of the layer, index along their axis 1, the place in the buffer) of each copy."""
        rows, _, block_tokens, head_size = layer_KBSD.shape
        found = []
        for index, width in ((self.whole, block_tokens * head_size), (self.token, head_size)):
            by_width = layer_KBSD.view(rows, -1, width)
            for first in (self.first, rows // 2 + self.first):
                size = self.heads * len(index) * width
                part = buffer[:size].view(self.heads, len(index), width)
                buffer = buffer[size:]
                found.append((by_width[first : first + self.heads], index, part))
        return found
