"""A worker's moves over a real daemon: its arena is registered once, and again where it must be."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from plexrl.errors import DeviceMemoryFullError, InvalidRequestError
from plexrl.latency.gpus import MOVE_FIXED_S
from plexrl.latency.pace import parse_pace
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import tiny_qwen2
from plexrl.statemanager.checkpoint.places.choice import place_at
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.wire.operations import CheckpointParams, OperationKind
from plexrl.worker.interface.backend import Backend, BackendCall, BackendResult, SharedWeights
from plexrl.worker.state.state_mover import StateMover
from plexrl.worker.training.paced.mover import PacedMover
from tests.statemanager.conftest import (
    ALL_PARTS,
    MIB,
    Daemon,
    MakeShard,
    Shard,
    StartDaemon,
    wait_until,
)
from tests.wire.runs import make_run
from tests.worker.paced.clock import Clock


def command(kind: OperationKind, seq: int, token: int) -> Any:
    return make_run(kind, token=token, seq=seq)


class Bytes(Backend):
    """A backend whose state is the bytes of an arena."""

    def __init__(self, arena: Arena, slices: tuple[StateSlice, ...]) -> None:
        self.arena = arena
        self._slices = slices

    def lay_out(self) -> None:
        """Nothing: the arena is there."""

    def slices(self) -> tuple[StateSlice, ...]:
        return self._slices

    def live_parts(self) -> frozenset[StatePart]:
        return ALL_PARTS

    def after_load(self, parts: frozenset[StatePart]) -> None:
        assert parts == ALL_PARTS

    def gather(self, value: str) -> list[str]:
        return [value]

    def run(self, call: BackendCall) -> BackendResult:
        raise InvalidRequestError(f"there is nothing to compute for {call.kind}")


def test_a_registration_that_another_process_ended_is_made_again(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = make_shard(daemon, registered=False)
    mover = StateMover(Bytes(shard.arena, shard.slices), shard.client, shard.group)

    def move(kind: OperationKind, seq: int, token: int) -> None:
        mover.move(command(kind, seq, token))

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


class Trained(Bytes):
    """Its first byte is the count of optimizer steps, as a trainer's state has it."""

    @property
    def trainer_step(self) -> int:
        assert isinstance(self.arena, Arena)
        return int(np.frombuffer(self.arena.buffer, dtype=np.uint8)[0])


def test_a_checkpoint_of_an_offloaded_state_names_the_step_that_was_offloaded(
    start_daemon: StartDaemon, make_shard: MakeShard, tmp_path: Path
) -> None:
    daemon = start_daemon(checkpoint_url=str(tmp_path / "checkpoints"))
    shard = make_shard(daemon, registered=False)
    backend = Trained(shard.arena, shard.slices)
    mover = StateMover(backend, shard.client, shard.group)
    mover.move(command(OperationKind.LOAD, 0, 1))
    shard.fill(1)
    shard.contents[0] = 7
    mover.move(command(OperationKind.OFFLOAD, 1, 1))
    assert backend.trainer_step == 0
    params = CheckpointParams(name="seven", format="training")
    save = make_run(OperationKind.SAVE_CHECKPOINT, seq=1, params=params)
    saved = mover.save_checkpoint(save)
    place = place_at(str(saved["path"]))
    wait_until(place.exists)
    assert place.read_record().trainer_step == 7


class WithBase(Bytes):
    """Its state lies on weights that are frozen, and is written once it has memory."""

    def __init__(self, shard: Shard) -> None:
        super().__init__(shard.arena, shard.slices)
        self.base = Base()
        self._shard = shard

    def materialise(self) -> None:
        assert self.arena.is_attached
        assert self.base.arena.is_attached
        self.expected = self._shard.fill(7)

    @property
    def frozen_base(self) -> SharedWeights:
        return self.base


class Base:
    """Frozen weights, all ones."""

    content = "ones"

    def __init__(self) -> None:
        self.arena = Arena(MIB)
        self.bytes = np.frombuffer(self.arena.buffer, dtype=np.uint8)

    def fill(self) -> None:
        self.bytes[:] = 1


def test_a_state_is_written_after_a_base_that_found_no_room_has_found_it(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(device_bytes=2 * MIB)
    holder = make_shard(daemon, deployment="a/actor", elements=MIB // 8)
    shard = make_shard(daemon, registered=False, deployment="b/actor", elements=MIB // 8)
    backend = WithBase(shard)
    mover = StateMover(backend, shard.client, shard.group)
    for _ in range(2):
        with pytest.raises(DeviceMemoryFullError, match=f"needs {2 * MIB} bytes"):
            mover.move(command(OperationKind.LOAD, 0, 1))
        assert not mover.is_resident
        assert shard.arena.resident_bytes() == 0
    holder.offload(1)
    mover.move(command(OperationKind.LOAD, 0, 1))
    assert backend.base.bytes.all()
    assert shard.arena.resident_bytes() == MIB
    assert np.array_equal(shard.contents, backend.expected)
    backend.base.arena.close()


def test_a_load_reports_what_the_offload_before_it_left_time_for(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(device_bytes=8 * MIB)
    shards, movers = [], []
    for name in ("a/actor", "b/actor"):
        shard = make_shard(daemon, registered=False, deployment=name)
        mover = StateMover(Bytes(shard.arena, shard.slices), shard.client, shard.group)
        mover.move(command(OperationKind.LOAD, 0, 1))
        shard.fill(1)
        mover.move(command(OperationKind.OFFLOAD, 1, 1))
        shards.append(shard)
        movers.append(mover)
    first = movers[0].move(command(OperationKind.LOAD, 1, 1))
    assert (first["prefetched_bytes"], first["prefetch_s"]) == (0, 0.0)
    successor = {"successor": "b/actor", "successor_seq": 1}
    movers[0].move(replace(command(OperationKind.OFFLOAD, 2, 1), **successor))
    wait_until(lambda: shards[0].agent.usage()["device"]["lent_bytes"] > 0)
    second = movers[1].move(command(OperationKind.LOAD, 1, 1))
    assert second["prefetched_bytes"] == second["bytes_moved"] == shards[1].contents.size
    assert second["prefetch_s"] > 0.0
    assert np.array_equal(shards[1].contents, shards[1].version(1))


def test_a_paced_move_lasts_as_long_as_the_part_that_moves(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard, clock = make_shard(daemon, registered=False), Clock()
    pace, workers = parse_pace("h800:qwen2.5-14b@1"), 4
    mover = PacedMover(
        Bytes(shard.arena, shard.slices),
        shard.client,
        shard.group,
        spec=DeploymentSpec(
            model=tiny_qwen2("0123"), kind="train", backend="fsdp", workers=workers, pace=pace.text
        ),
        pace=pace,
        pacer=clock.pacer(),
    )
    moves = [(OperationKind.LOAD, 0), (OperationKind.OFFLOAD, 1), (OperationKind.LOAD, 1)]
    reports = []
    for kind, seq in [*moves, (OperationKind.OFFLOAD, 1)]:
        reports.append(mover.move(command(kind, seq, 1)))
        if seq == 0:
            shard.fill(1)
    # 14 bytes for each parameter over a link of 50 GB/s. The first load has nothing to move, and
    # the last offload has an unchanged version.
    whole_s = MOVE_FIXED_S + 14 * 14.77e9 / workers / 5e10
    assert clock.sleeps == pytest.approx([MOVE_FIXED_S, whole_s, whole_s, MOVE_FIXED_S])
    assert [each["seconds"] for each in reports[1:]] == pytest.approx(clock.sleeps[1:])
    assert reports[-1]["bytes_moved"] == 0
