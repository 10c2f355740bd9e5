"""Frozen weights that many adapters lie on: lent once, read by many, gone when room is wanted."""

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plexrl.errors import ConflictError, DeviceMemoryFullError
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.device.cpu.device import CpuDevice
from plexrl.statemanager.device.frozen_weights import FrozenWeightsCache, WeightsKey, WeightsMapping
from tests.statemanager.conftest import DEADLINE_S, MIB, MakeShard, Shard, StartDaemon, wait_until


class Reader:
    """A rank's base, and how often it had to fill it."""

    def __init__(self, shard: Shard, content: str = "model", nbytes: int = MIB) -> None:
        self.shard, self.content = shard, content
        self.arena = Arena(nbytes)
        self.bytes = np.frombuffer(self.arena.buffer, dtype=np.uint8)
        self.fills = 0

    def borrow(self) -> int:
        return self.shard.client.borrow_base(
            self.arena, content=self.content, token=self.shard.token, fill=self.fill
        )

    def fill(self) -> None:
        assert not self.bytes.any(), "a base is lent clean"
        self.fills += 1
        np.copyto(self.bytes, self.expected)

    @property
    def expected(self) -> np.ndarray:
        seed = sum(self.content.encode())
        return np.random.default_rng(seed).integers(1, 256, self.bytes.size, dtype=np.uint8)

    def holds(self) -> bool:
        return np.array_equal(self.bytes, self.expected)


MakeReader = Callable[[Shard], Reader]


@pytest.fixture
def make_reader() -> Iterator[MakeReader]:
    """Makes readers; takes from them what they have mapped."""
    readers: list[Reader] = []

    def make(shard: Shard) -> Reader:
        readers.append(Reader(shard))
        return readers[-1]

    yield make
    for reader in readers:
        reader.arena.close()


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    made = CpuDevice()
    yield made
    made.close()


@pytest.fixture
def bases(device: CpuDevice) -> Iterator[FrozenWeightsCache]:
    made = FrozenWeightsCache(device)
    yield made
    for user in ("a", "b"):
        made.forget(user)
    assert device.usage(0).lent_bytes == 0


def protection(arena: Arena) -> str:
    """Of the arena's first pages, as the kernel tells it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, allowed, *_ = line.split()
        first, end = (int(part, 16) for part in addresses.split("-"))
        if first <= arena.address < end:
            return allowed
    raise AssertionError("the arena is not mapped")


def lent_bytes(shard: Shard) -> int:
    return int(shard.agent.usage()["device"]["lent_bytes"])


def test_two_ranks_read_one_base_and_a_switch_moves_none_of_it(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon(device_bytes=2 * MIB)
    one, two = (make_shard(daemon, deployment=f"{name}/actor", elements=MIB // 16) for name in "ab")
    first, second = make_reader(one), make_reader(two)
    assert first.borrow() == MIB
    assert lent_bytes(one) == 2 * MIB
    expected = one.fill(1)
    assert second.borrow() == 0
    assert lent_bytes(one) == 2 * MIB, "it is counted once"
    assert first.holds()
    assert second.holds()
    for _ in range(3):
        moved = one.offload(1).bytes_moved
        assert moved <= expected.size
        assert not first.bytes.any(), "what was given back is not there"
        one.load(1)
        assert first.borrow() == 0
        assert first.holds()
    assert np.array_equal(one.contents, expected)
    assert (first.fills, second.fills) == (1, 0)


def test_a_base_that_is_whole_is_read_only_for_who_filled_it_too(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon()
    readers = [make_reader(make_shard(daemon, deployment=f"{name}/actor")) for name in "ab"]
    assert [reader.borrow() for reader in readers] == [MIB, 0]
    assert [protection(reader.arena) for reader in readers] == ["r--s", "r--s"]
    assert all(reader.holds() for reader in readers)


def test_a_base_that_nobody_uses_gives_way_and_is_filled_again(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon(device_bytes=2 * MIB)
    shard = make_shard(daemon, deployment="a/actor", elements=MIB // 8)
    reader = make_reader(shard)
    reader.borrow()
    full = make_shard(daemon, registered=False, deployment="b/actor", elements=MIB // 4)
    with pytest.raises(DeviceMemoryFullError):
        full.register()
    assert reader.holds(), "what is in use stays"
    shard.offload(1)
    assert lent_bytes(shard) == MIB, "nobody wants the room yet"
    full.register()
    with pytest.raises(DeviceMemoryFullError):
        shard.load(1)
    full.offload(1)
    shard.load(1)
    assert reader.borrow() == MIB
    assert reader.holds()
    assert reader.fills == 2


def test_a_base_that_finds_no_room_gives_back_what_was_loaded_before_it(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon(device_bytes=2 * MIB)
    holder = make_shard(daemon, deployment="a/actor", elements=MIB // 8)
    shard = make_shard(daemon, deployment="b/actor", elements=MIB // 8)
    expected = shard.fill(1)
    shard.snapshot(1)
    reader = make_reader(shard)
    with pytest.raises(DeviceMemoryFullError):
        reader.borrow()
    assert lent_bytes(shard) == MIB
    holder.offload(1)
    shard.load(1)
    assert reader.borrow() == MIB
    assert np.array_equal(shard.contents, expected)


def test_a_base_whose_filler_failed_is_filled_by_the_next(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon()
    one, two = (make_shard(daemon, deployment=f"{name}/actor") for name in "ab")
    failing, reader = make_reader(one), make_reader(two)

    def fail() -> None:
        failing.bytes[:] = 7
        raise OSError("the model's files are gone")

    with pytest.raises(OSError, match="gone"):
        one.client.borrow_base(failing.arena, content="model", token=one.token, fill=fail)
    assert reader.borrow() == MIB
    assert reader.holds()


def test_a_filler_that_dies_leaves_its_base_to_whoever_waits(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon(device_bytes=4 * MIB)
    one, two = (make_shard(daemon, deployment=f"{name}/actor", elements=1024) for name in "ab")
    dying, waiting = make_reader(one), make_reader(two)
    with ThreadPoolExecutor(1) as pool:
        borrowed: list[Future[int]] = []

        def die() -> None:
            borrowed.append(pool.submit(waiting.borrow))
            dying.bytes[:] = 7
            # As the kernel does it for a process that is killed.
            one.client.close()
            raise OSError("killed")

        with pytest.raises(OSError, match="killed"):
            one.client.borrow_base(dying.arena, content="model", token=one.token, fill=die)
        assert borrowed[0].result(DEADLINE_S) == MIB
    assert waiting.holds()
    assert waiting.fills == 1


def test_a_deployment_that_waits_for_a_base_can_be_released(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon()
    one, two = (make_shard(daemon, deployment=f"{name}/actor") for name in "ab")
    filling, waiting = make_reader(one), make_reader(two)
    with ThreadPoolExecutor(1) as pool:
        borrowed: list[Future[int]] = []

        def fill() -> None:
            borrowed.append(pool.submit(waiting.borrow))
            one.agent.release("b/actor")
            assert not borrowed[0].done()
            filling.fill()

        one.client.borrow_base(filling.arena, content="model", token=one.token, fill=fill)
        with pytest.raises(ConflictError, match="released"):
            borrowed[0].result(DEADLINE_S)
    assert filling.holds()


def test_a_restarted_daemon_has_bases_filled_again(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon()
    shard = make_shard(daemon)
    reader = make_reader(shard)
    reader.borrow()
    expected = shard.fill(1)
    daemon.kill()
    daemon.start()
    assert reader.holds(), "what the worker has mapped stays"
    shard.offload(1)
    shard.load(1)
    assert reader.borrow() == MIB
    assert reader.holds()
    assert np.array_equal(shard.contents, expected)
    shard.offload(1)
    shard.load(1)
    assert reader.borrow() == 0


def test_a_base_goes_with_the_last_process_that_used_it(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon()
    shards = [make_shard(daemon, deployment=f"{name}/actor", elements=1024) for name in "abc"]
    readers = [make_reader(shard) for shard in shards[:2]]
    for reader in readers:
        reader.borrow()
    shards[0].offload(1)
    shards[0].close()
    rest = 2 * 256 * 1024
    wait_until(lambda: lent_bytes(shards[2]) == rest + MIB)
    assert readers[1].holds()
    shards[1].close()
    wait_until(lambda: lent_bytes(shards[2]) == rest // 2)


def key(**fields: Any) -> WeightsKey:
    return WeightsKey(tenant="t", uid=1, device=0, content="m", nbytes=MIB)._replace(**fields)


def lent(found: WeightsMapping | None) -> WeightsMapping:
    assert found is not None
    return found


def close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("other", [{"tenant": "u"}, {"uid": 2}, {"content": "n"}])
def test_what_tenants_users_and_models_have_is_kept_apart(
    device: CpuDevice, bases: FrozenWeightsCache, other: dict[str, Any]
) -> None:
    fds, _, _ = lent(bases.borrow(key(), "a"))
    close(fds)
    assert bases.mark_filled(key(), "a")
    fds, _, is_whole = lent(bases.borrow(key(**other), "b"))
    close(fds)
    assert not is_whole
    assert device.usage(0).lent_bytes == 2 * MIB


def test_readers_cannot_write(bases: FrozenWeightsCache) -> None:
    fds, _, _ = lent(bases.borrow(key(), "a"))
    close(fds)
    assert bases.borrow(key(), "b") is None, "another fills it"
    assert not bases.mark_filled(key(), "b"), "only who fills it says that it is whole"
    assert bases.mark_filled(key(), "a")
    fds, _, is_whole = lent(bases.borrow(key(), "b"))
    assert is_whole
    with pytest.raises(PermissionError):
        mmap.mmap(fds[0], 0)
    close(fds)


def test_memory_of_a_user_that_vanished_is_not_lent_again(
    device: CpuDevice, bases: FrozenWeightsCache
) -> None:
    for user in ("a", "b"):
        fds, _, _ = lent(bases.borrow(key(), user))
        close(fds)
        bases.mark_filled(key(), user)
    bases.forget("a")
    bases.give_back("b")
    assert device.usage(0).lent_bytes == MIB
    assert bases.evict_idle(0)
    assert not bases.evict_idle(0)
    wait_until(lambda: device.usage(0).lent_bytes + device.usage(0).idle_bytes == 0)
