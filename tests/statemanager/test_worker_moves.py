"""A worker's moves over a real daemon: its arena is registered once, and again where it must be."""

import numpy as np

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.arena import Arena
from plexrl.statemanager.host_arena import HostArena
from plexrl.statemanager.keys import StatePart, StateSlice
from plexrl.wire.operations import OperationKind
from plexrl.worker.backend import BackendCall, BackendResult
from plexrl.worker.residency import StateMover
from tests.statemanager.conftest import ALL_PARTS, Daemon, MakeShard


class Bytes:
    """A backend whose state is the bytes of an arena."""

    def __init__(self, arena: Arena, slices: tuple[StateSlice, ...]) -> None:
        self.arena = arena
        self._slices = slices

    host_arena: HostArena | None = None

    def build(self) -> None:
        """Nothing: the arena is there."""

    def slices(self) -> tuple[StateSlice, ...]:
        return self._slices

    def live_parts(self) -> frozenset[StatePart]:
        return ALL_PARTS

    def before_offload(self) -> None:
        """Nothing lies outside of the arena."""

    def after_load(self, parts: frozenset[StatePart]) -> None:
        assert parts == ALL_PARTS

    def after_pull(self) -> None:
        """What was pulled is used as it is."""

    def gather(self, value: str) -> list[str]:
        return [value]

    def checkpoint_extras(self, dtype: str | None) -> dict[str, bytes]:
        del dtype
        return {}

    def run(self, call: BackendCall) -> BackendResult:
        raise InvalidRequestError(f"there is nothing to compute for {call.kind}")


def test_a_registration_that_another_process_ended_is_made_again(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = make_shard(daemon, registered=False)
    mover = StateMover(Bytes(shard.arena, shard.slices), shard.client, shard.group)

    def move(kind: OperationKind, seq: int, token: int) -> None:
        mover.move(kind, {"seq": seq, "keep_seq": 0, "token": token})

    move(OperationKind.LOAD, 0, 1)
    expected = shard.fill(1)
    move(OperationKind.OFFLOAD, 1, 1)
    move(OperationKind.LOAD, 1, 2)
    assert np.array_equal(shard.contents, expected)
    expected = shard.fill(2)
    move(OperationKind.OFFLOAD, 2, 2)
    other = make_shard(daemon, token=3)
    move(OperationKind.LOAD, 2, 3)
    assert np.array_equal(shard.contents, expected)
    # That one is the former now, and moves nothing until it registers.
    assert other.agent.usage()["device"]["lent_bytes"] == shard.arena.resident_bytes()
