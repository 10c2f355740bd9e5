"""Ranks that hold replicas, and an offload of two of them with and without digests."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.part import move_message
from benchmarks.sizes import sized
from plexrl.errors import InvalidRequestError
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import Claims, Role
from plexrl.wire.operations import OperationKind
from plexrl.worker.interface.backend import Backend, BackendCall, BackendResult
from plexrl.worker.state.arena_tensors import ArenaLayout, ShardBox, view, whole_box
from plexrl.worker.state.contents.replicas import ReplicaDigests
from plexrl.worker.state.device import CPU
from plexrl.worker.state.state_mover import StateMover

if TYPE_CHECKING:
    from plexrl.worker.state.device import WorkerDevice

OWN_BYTES = 8192
ROUNDS = sized(5, quick=2)


class Held(Backend):
    """State that nothing computes: weights that all ranks hold, and an optimizer's shard."""

    def __init__(self, rank: int, count: int, device: "WorkerDevice", nbytes: int) -> None:
        self._rank, self._count, self._device, self._nbytes = rank, count, device, nbytes

    def lay_out(self) -> None:
        layout = ArenaLayout()
        own = ShardBox(
            global_shape=(self._count * OWN_BYTES,),
            offset=(self._rank * OWN_BYTES,),
            shape=(OWN_BYTES,),
        )
        # Each rank has its weights elsewhere.
        layout.skip(1024 * self._rank, "U8")
        self.own = layout.add(StateKey(part=StatePart.OPTIMIZER, name="own"), own, "U8")
        key = StateKey(part=StatePart.PARAMETER, name="common")
        self.common = layout.add(key, whole_box((self._nbytes,)), "U8")
        self._slices = tuple(layout.slices)
        self.arena = self._device.make_arena(layout.nbytes)

    def slices(self) -> tuple[StateSlice, ...]:
        return self._slices

    def gather(self, value: str) -> list[str]:
        return [value]

    def run(self, call: BackendCall) -> BackendResult:
        raise InvalidRequestError(f"nothing computes {call.kind}")


class Replica:
    """A rank and its moves."""

    def __init__(
        self,
        node: StateManagerConfig,
        device: "WorkerDevice",
        rank: int,
        nbytes: int,
        *,
        count: int = 2,
        name: str = "job/actor",
        has_digests: bool = True,
    ) -> None:
        """`nbytes`: size of the weights that all `count` ranks hold."""
        claims = Claims(role=Role.WORKER, job="job", deployment=name, rank=rank, world_size=count)
        self.backend = Held(rank, count, device, nbytes)
        self.client = StateManagerClient(
            node.listen,
            deployment=name,
            rank=rank,
            world_size=count,
            ticket=read_ticket_key(node.ticket_key_path).mint(claims),
        )
        # A mover that believes to be on the CPU computes no digests; all else is equal.
        mover = device if has_digests else CPU
        self._mover = StateMover(self.backend, self.client, "group", mover)
        self._digests = ReplicaDigests(self.backend, self.client, device)

    def move(self, kind: OperationKind, seq: int) -> None:
        self._mover.move(move_message(kind, seq))

    @property
    def common(self) -> torch.Tensor:
        """The weights. [bytes] uint8 on the device."""
        return view(self.backend.arena, self.backend.common)

    @property
    def own(self) -> torch.Tensor:
        """The shard. [bytes] uint8 on the device."""
        return view(self.backend.arena, self.backend.own)

    def fill(self, seed: int) -> None:
        """Write the weights that `seed` gives."""
        drawn = torch.Generator().manual_seed(seed)
        self.common.copy_(torch.randint(256, self.common.shape, generator=drawn, dtype=torch.uint8))
        self.own.fill_(seed)

    def digest_s(self) -> float:
        """Seconds of a digest of the weights."""
        started = time.perf_counter()
        found = self._digests.of_published()
        assert found, "the other rank is registered, and the weights are large"
        return time.perf_counter() - started

    def close(self) -> None:
        self.client.close()
        self.backend.arena.close()


def replica_figures(
    node: StateManagerConfig, device: "WorkerDevice", nbytes: int
) -> dict[str, float]:
    """Seconds of an offload of two ranks that hold the same `nbytes` on one device, with digests
    and without, and of the digest alone."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    pairs = {
        has_digests: [
            Replica(node, device, rank, nbytes, name=f"job/{has_digests}", has_digests=has_digests)
            for rank in range(2)
        ]
        for has_digests in seconds
    }
    with ThreadPoolExecutor(2) as threads:

        def both(pair: list[Replica], kind: OperationKind, seq: int) -> float:
            started = time.perf_counter()
            list(threads.map(lambda rank: rank.move(kind, seq), pair))
            return time.perf_counter() - started

        for seq in range(1, ROUNDS + 1):
            for has_digests, pair in pairs.items():
                both(pair, OperationKind.LOAD, seq - 1)
                for rank in pair:
                    rank.fill(seq)
                device.wait()
                seconds[has_digests].append(both(pair, OperationKind.OFFLOAD, seq))
    first = pairs[True][0]
    first.move(OperationKind.LOAD, ROUNDS)
    first.digest_s()
    digest_s = statistics.median(first.digest_s() for _ in range(ROUNDS))
    for pair in pairs.values():
        for rank in pair:
            rank.close()
    with_s, without_s = (statistics.median(seconds[each]) for each in (True, False))
    return {
        "replica_bytes": nbytes,
        "replica_offload_s": with_s,
        "replica_offload_ratio": without_s / with_s,
        "digest_gb_s": nbytes / digest_s / 1e9,
    }
