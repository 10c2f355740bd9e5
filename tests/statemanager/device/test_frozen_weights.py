"""Frozen weights: allocated once, read by many ranks, evicted when memory is short."""

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plexrl.errors import ConflictError, DeviceMemoryFullError, StaleTokenError
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.device.cpu.device import CpuDevice
from plexrl.statemanager.device.frozen_weights import FrozenWeightsCache, WeightsKey, WeightsMapping
from plexrl.statemanager.protocol.messages import Attach, DeviceUse
from tests.statemanager.conftest import DEADLINE_S, MIB, MakeShard, Shard, StartDaemon, wait_until


class Reader:
    """A rank that maps frozen weights, and counts how often it fills them."""

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
        assert not self.bytes.any(), "new memory is clean"
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
    """Makes readers, and closes them."""
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
    """Protection of the arena's first pages, from /proc."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, allowed, *_ = line.split()
        first, end = (int(part, 16) for part in addresses.split("-"))
        if first <= arena.address < end:
            return allowed
    raise AssertionError("the arena is not mapped")


def lent_bytes(shard: Shard) -> int:
    return int(shard.agent.usage()["device"]["lent_bytes"])


def test_two_ranks_share_weights_and_a_switch_copies_none_of_them(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon(device_bytes=2 * MIB)
    one, two = (make_shard(daemon, deployment=f"{name}/actor", elements=MIB // 16) for name in "ab")
    first, second = make_reader(one), make_reader(two)
    assert first.borrow() == MIB
    assert lent_bytes(one) == 2 * MIB
    expected = one.fill(1)
    assert second.borrow() == 0
    assert lent_bytes(one) == 2 * MIB, "shared memory counts once"
    assert first.holds()
    assert second.holds()
    for _ in range(3):
        moved = one.offload(1).bytes_moved
        assert moved <= expected.size
        assert not first.bytes.any(), "returned weights are unmapped"
        one.load(1)
        assert first.borrow() == 0
        assert first.holds()
    assert np.array_equal(one.contents, expected)
    assert (first.fills, second.fills) == (1, 0)


def test_filled_weights_are_read_only_for_the_filler_too(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon()
    readers = [make_reader(make_shard(daemon, deployment=f"{name}/actor")) for name in "ab"]
    assert [reader.borrow() for reader in readers] == [MIB, 0]
    assert [protection(reader.arena) for reader in readers] == ["r--s", "r--s"]
    assert all(reader.holds() for reader in readers)


def test_idle_weights_are_evicted_and_filled_again(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon(device_bytes=2 * MIB)
    shard = make_shard(daemon, deployment="a/actor", elements=MIB // 8)
    reader = make_reader(shard)
    reader.borrow()
    full = make_shard(daemon, registered=False, deployment="b/actor", elements=MIB // 4)
    with pytest.raises(DeviceMemoryFullError):
        full.register()
    assert reader.holds(), "weights in use stay"
    shard.offload(1)
    assert lent_bytes(shard) == MIB, "memory is not short yet"
    full.register()
    with pytest.raises(DeviceMemoryFullError):
        shard.load(1)
    full.offload(1)
    shard.load(1)
    assert reader.borrow() == MIB
    assert reader.holds()
    assert reader.fills == 2


def test_a_stale_worker_evicts_no_idle_weights(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon(device_bytes=2 * MIB)
    former = make_shard(daemon, deployment="b/actor", elements=MIB // 4, token=1)
    former.offload(1)
    shard = make_shard(daemon, deployment="a/actor", elements=MIB // 8, token=2)
    make_reader(shard).borrow()
    shard.offload(1)
    for move in (lambda: former.load(1), lambda: former.client.request(Attach(token=1))):
        with pytest.raises(StaleTokenError):
            move()
        assert lent_bytes(shard) == MIB


def test_a_load_counts_the_weights_that_are_borrowed_next_and_keeps_them(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon(device_bytes=3 * MIB)
    shard = make_shard(daemon, deployment="a/actor", elements=MIB // 8)
    reader = make_reader(shard)
    shard.client.expect_use(
        DeviceUse(working_bytes=MIB, base_bytes=MIB, base_content=reader.content)
    )
    shard.offload(1)
    holder = make_shard(daemon, deployment="b/actor", elements=MIB // 8)
    with pytest.raises(DeviceMemoryFullError, match=rf"needs {3 * MIB} .*{2 * MIB} of state"):
        shard.load(1)
    holder.offload(1)
    shard.load(1)
    reader.borrow()
    shard.offload(1)
    shard.load(1)
    assert reader.borrow() == 0, "they were idle, and count once"
    shard.offload(1)
    holder.load(1)
    with pytest.raises(DeviceMemoryFullError, match=f"needs {2 * MIB} "):
        shard.load(1)
    assert lent_bytes(shard) == 2 * MIB, "without them there would be no more room"


def test_weights_that_do_not_fit_undo_the_load_before_them(
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


def test_weights_of_a_failed_filler_are_filled_by_the_next_rank(
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


def test_weights_of_a_dead_filler_are_filled_by_a_waiting_rank(
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
            # The kernel does the same for a killed process.
            one.client.close()
            raise OSError("killed")

        with pytest.raises(OSError, match="killed"):
            one.client.borrow_base(dying.arena, content="model", token=one.token, fill=die)
        assert borrowed[0].result(DEADLINE_S) == MIB
    assert waiting.holds()
    assert waiting.fills == 1


def test_a_deployment_that_waits_for_weights_can_be_released(
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


def test_weights_are_filled_again_after_a_restart_of_the_daemon(
    start_daemon: StartDaemon, make_shard: MakeShard, make_reader: MakeReader
) -> None:
    daemon = start_daemon()
    shard = make_shard(daemon)
    reader = make_reader(shard)
    reader.borrow()
    expected = shard.fill(1)
    daemon.kill()
    daemon.start()
    assert reader.holds(), "mapped weights stay"
    shard.offload(1)
    shard.load(1)
    assert reader.borrow() == MIB
    assert reader.holds()
    assert np.array_equal(shard.contents, expected)
    shard.offload(1)
    shard.load(1)
    assert reader.borrow() == 0


def test_weights_are_freed_with_the_last_process_that_used_them(
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
def test_tenants_users_and_models_do_not_share_weights(
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
    assert bases.borrow(key(), "b") is None, "another rank fills them"
    assert not bases.mark_filled(key(), "b"), "only the filler can mark them filled"
    assert bases.mark_filled(key(), "a")
    fds, _, is_whole = lent(bases.borrow(key(), "b"))
    assert is_whole
    with pytest.raises(PermissionError):
        mmap.mmap(fds[0], 0)
    close(fds)


def test_memory_of_a_disconnected_user_is_not_reused(
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
