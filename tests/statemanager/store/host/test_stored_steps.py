"""A stored version is stepped in host memory: the next one is whole, or there is none."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from plexrl.errors import (
    ConflictError,
    InvalidRequestError,
    StaleTokenError,
    StateLostError,
    StateTierFullError,
)
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.client.stored_step import StoredStep
from plexrl.statemanager.layout.keys import StatePart
from plexrl.statemanager.layout.ranges import PAGE_BYTES
from plexrl.wire.messages import SaveRequest
from tests.statemanager.conftest import ALL_PARTS, MIB, Daemon, StartDaemon
from tests.statemanager.host_shards import ELEMENTS, HostShard
from tests.statemanager.store.host.test_allocations import check, used_bytes

NBYTES = ELEMENTS * 4


class SteppedShard(HostShard):
    """A shard that steps its stored state."""

    def __init__(self, daemon: Daemon, **fields: object) -> None:
        super().__init__(daemon, **fields)  # type: ignore[arg-type]
        self.register()
        self.copy = HostArena(NBYTES)

    def begin(self, seq: int) -> StoredStep:
        step = self.client.begin_step(self.copy, seq)
        assert step.begin() == ALL_PARTS
        return step

    def add(self) -> None:
        """What `step` does, in host memory."""
        for arena in (self.copy, self.host):
            values = np.frombuffer(arena.buffer, dtype=np.float32)
            values += 1

    def save(self, step: StoredStep, seq: int) -> None:
        order = SaveRequest(seq=seq, keep_seq=seq - 1, token=self.token)
        step.save(order, ALL_PARTS)
        step.end()
        self.client.end_step(step)

    def step_stored(self, seq: int) -> None:
        """Make version `seq` of the one before."""
        step = self.begin(seq - 1)
        self.add()
        self.save(step, seq)

    def check_after(self, seq: int, steps: int) -> None:
        """A load of version `seq` gives what so many steps make."""
        self.register()
        self.load(seq)
        assert self.is_after(steps)


@pytest.fixture
def shard(daemon: Daemon) -> Iterator[SteppedShard]:
    """One that was stepped once, and offloaded as version 1."""
    made = SteppedShard(daemon)
    made.step()
    made.offload(1)
    yield made
    made.close()


def test_stored_steps_make_versions_without_a_load(shard: SteppedShard) -> None:
    for seq in (2, 3, 4):
        shard.step_stored(seq)
        assert not shard.arena.is_attached
        assert not np.frombuffer(shard.host.buffer, dtype=np.float32).any()
    shard.check_after(4, steps=4)
    shard.check_after(3, steps=3)


def test_a_step_goes_on_while_others_get_the_group(daemon: Daemon, shard: SteppedShard) -> None:
    step = shard.begin(1)
    other = HostShard(daemon, deployment="job/other", token=7)
    other.register()
    other.step()
    other.offload(1)
    other.close()
    shard.add()
    shard.save(step, 2)
    shard.token = 8
    shard.check_after(2, steps=2)


def test_memory_of_a_step_is_free_after_it(daemon: Daemon, shard: SteppedShard) -> None:
    shard.step_stored(2)
    shard.step_stored(3)
    before = used_bytes(daemon)
    for seq in range(4, 8):
        shard.step_stored(seq)
    assert used_bytes(daemon) == before
    shard.client.begin_step(shard.copy, 7).begin()
    assert used_bytes(daemon) >= before + 2 * NBYTES
    shard.close()
    daemon.terminate()
    check(daemon)


def test_a_step_that_is_given_up_changes_nothing(shard: SteppedShard) -> None:
    step = shard.begin(1)
    shard.add()
    step.end()
    shard.client.end_step(step)
    with pytest.raises(StateLostError):
        shard.client.begin_step(shard.copy, 1)
    shard.check_after(1, steps=1)


def test_a_process_that_is_gone_leaves_the_version_of_before(
    daemon: Daemon, shard: SteppedShard
) -> None:
    step = shard.begin(1)
    shard.add()
    # Another process registers the rank: what this one does from now on counts no more.
    other = SteppedShard(daemon)
    with pytest.raises(ConflictError):
        step.save(SaveRequest(seq=2, keep_seq=1, token=1), ALL_PARTS)
    step.end()
    other.check_after(1, steps=1)
    other.close()


def test_a_daemon_that_is_killed_in_the_middle_keeps_the_version_of_before(
    daemon: Daemon, shard: SteppedShard
) -> None:
    step = shard.begin(1)
    shard.add()
    daemon.kill()
    daemon.start()
    with pytest.raises(ConflictError, match="begun no step"):
        step.save(SaveRequest(seq=2, keep_seq=1, token=1), ALL_PARTS)
    step.end()
    shard.check_after(1, steps=1)
    shard.offload(1)
    shard.step_stored(2)
    shard.check_after(2, steps=2)


def test_a_full_host_tier_refuses_a_step_and_keeps_the_version(start_daemon: StartDaemon) -> None:
    # There is room for the version and for one copy of a half of it.
    daemon = start_daemon(host_bytes=3 * NBYTES + NBYTES // 2, nvme_bytes=MIB // 1024)
    shard = SteppedShard(daemon)
    shard.step()
    shard.offload(1)
    with pytest.raises(StateTierFullError):
        shard.begin(1)
    shard.check_after(1, steps=1)
    shard.close()


def test_a_version_that_makes_room_on_nvme_is_stepped_too(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(host_bytes=3 * NBYTES + NBYTES // 2)
    shard = SteppedShard(daemon)
    shard.step()
    shard.offload(1)
    for seq in (2, 3):
        shard.step_stored(seq)
    shard.check_after(3, steps=3)
    shard.close()


def test_memory_that_is_still_mapped_for_writing_makes_no_version(shard: SteppedShard) -> None:
    step = shard.begin(1)
    shard.add()
    shard.copy.is_writable = False
    with pytest.raises(ConflictError, match="mapped for writing"):
        step.save(SaveRequest(seq=2, keep_seq=1, token=1), ALL_PARTS)
    step.end()
    shard.check_after(1, steps=1)


def test_a_state_on_the_device_is_not_stepped_in_host_memory(shard: SteppedShard) -> None:
    step = shard.client.begin_step(shard.copy, 1)
    shard.register()
    shard.load(1)
    with pytest.raises(ConflictError):
        step.begin()
    assert shard.is_after(1)


@pytest.mark.parametrize("nbytes", [-MIB, 0])
def test_a_step_without_memory_is_refused(shard: SteppedShard, nbytes: int) -> None:
    shard.copy.nbytes = nbytes
    with pytest.raises(InvalidRequestError, match="name the memory"):
        shard.begin(1)
    shard.copy.nbytes = NBYTES
    shard.check_after(1, steps=1)


def test_a_step_stores_nothing_from_beyond_its_memory(daemon: Daemon) -> None:
    """Beyond it are other tenants' states. The version has no parameter, so that a small copy is
    enough for it."""
    shard = SteppedShard(daemon)
    shard.step()
    order = SaveRequest(seq=1, token=1)
    shard.client.offload(order, parts=frozenset({StatePart.OPTIMIZER}))
    shard.copy = HostArena(4096)
    step = shard.client.begin_step(shard.copy, 1)
    step.begin()
    with pytest.raises(InvalidRequestError, match="reaches to byte"):
        step.save(SaveRequest(seq=2, keep_seq=1, token=1), ALL_PARTS)
    step.end()
    shard.close()
    daemon.terminate()
    check(daemon)


def test_memory_of_an_earlier_step_is_cleared_around_the_slices(shard: SteppedShard) -> None:
    shard.copy = HostArena(NBYTES + PAGE_BYTES)
    step = shard.begin(1)
    shard.add()
    shard.copy.buffer[NBYTES:] = bytes([7]) * PAGE_BYTES
    shard.save(step, 2)
    step = shard.begin(2)
    assert not any(shard.copy.buffer[NBYTES:])
    step.end()


def test_a_step_that_cannot_be_mapped_keeps_no_descriptor(shard: SteppedShard) -> None:
    step = shard.client.begin_step(shard.copy, 1)
    before, shard.copy.address = open_files(), shard.copy.address + 1
    with pytest.raises(OSError, match="Invalid argument"):
        step.begin()
    shard.copy.address -= 1
    step.end()
    assert open_files() == before
    shard.check_after(1, steps=1)


def test_memory_that_cannot_be_mapped_to_be_read_keeps_no_descriptor() -> None:
    arena, before = HostArena(NBYTES), open_files()
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(OSError, match="No such device"):
        arena.attach(reader, None)
    assert open_files() == before


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_step_of_an_earlier_grant_than_its_version_is_refused(shard: SteppedShard) -> None:
    shard.token = 5
    shard.register()
    shard.load(1)
    shard.step()
    shard.offload(2, keep_seq=1)
    step = shard.begin(2)
    shard.add()
    for token, error in ((4, StaleTokenError), (1 << 30, InvalidRequestError)):
        with pytest.raises(error):
            step.save(SaveRequest(seq=3, keep_seq=2, token=token), ALL_PARTS)
    step.save(SaveRequest(seq=3, keep_seq=2, token=5), ALL_PARTS)
    step.end()
    shard.client.end_step(step)
    shard.check_after(3, steps=3)


def test_a_version_that_no_other_rank_has_made_is_dropped(
    daemon: Daemon, shard: SteppedShard
) -> None:
    before = used_bytes(daemon)
    step = shard.begin(1)
    shard.add()
    step.save(SaveRequest(seq=2, keep_seq=1, token=1), ALL_PARTS)
    step.undo()
    step.end()
    assert used_bytes(daemon) == before
    shard.register()
    with pytest.raises(StateLostError):
        shard.load(2)
    shard.check_after(1, steps=1)
