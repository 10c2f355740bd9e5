"""Device memory over a real daemon: allocation, reuse, and no leaks."""

import multiprocessing
import os
import random
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import pytest

from plexrl.errors import ConflictError, DeviceMemoryFullError, StateLostError
from plexrl.statemanager.device.segments import segment_sizes
from plexrl.statemanager.protocol.messages import Attach, Detach
from tests.examples import examples
from tests.statemanager.conftest import MIB, Daemon, MakeShard, Shard, StartDaemon, wait_until
from tests.statemanager.memory_files import NewSegments

KILLS = examples(15)


def lent_bytes(observer: Shard) -> int:
    """Device memory that the daemon counts as allocated."""
    lent = observer.agent.usage()["device"]["lent_bytes"]
    assert isinstance(lent, int)
    return lent


def test_an_offload_frees_memory_for_the_next_job(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(device_bytes=MIB)
    first = make_shard(daemon, deployment="a/actor", elements=MIB // 8)
    expected = first.fill(1)
    first.offload(1)
    second = make_shard(daemon, deployment="b/actor", elements=MIB // 8)
    assert not second.contents.any(), "the second job sees the first job's data"
    second.offload(1)
    first.load(1)
    assert np.array_equal(first.contents, expected)
    assert daemon.segment_bytes() == MIB, "it is the same memory"


def test_a_full_device_refuses_the_next_job_and_changes_nothing(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(device_bytes=MIB)
    first = make_shard(daemon, deployment="a/actor", elements=MIB // 8)
    expected = first.fill(1)
    second = make_shard(daemon, registered=False, deployment="b/actor", elements=MIB // 8)
    before = second.fill(2)
    with pytest.raises(DeviceMemoryFullError, match="offload another job") as refused:
        second.register()
    assert refused.value.details["needed_bytes"] == MIB
    assert refused.value.details["holders"] == [
        {"deployment": "a/actor", "rank": 0, "lent_bytes": MIB, "process_bytes": 0}
    ]
    assert np.array_equal(second.contents, before)
    assert np.array_equal(first.contents, expected)
    first.offload(1)
    second.register()
    assert np.array_equal(second.contents, before)
    with pytest.raises(DeviceMemoryFullError):
        first.load(1)
    assert not first.contents.any()
    second.offload(2)
    first.load(1)
    assert np.array_equal(first.contents, expected)


def test_bytes_that_a_load_does_not_write_read_as_zero(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(device_bytes=MIB)
    first = make_shard(daemon, deployment="a/actor", elements=MIB // 8)
    expected = first.fill(1)
    half = expected.size // 2
    first.offload(1, parts=frozenset({first.slices[0].key.part}))
    other = make_shard(daemon, deployment="b/actor", elements=MIB // 8)
    other.contents[:] = 0xFF
    other.offload(1)
    first.load(1)
    assert np.array_equal(first.contents[:half], expected[:half])
    assert not first.contents[half:].any()


def test_a_restarted_daemon_adopts_the_memory_of_its_workers(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(device_bytes=MIB)
    shard = make_shard(daemon, elements=MIB // 8)
    expected = shard.fill(1)
    daemon.kill()
    daemon.start()
    shard.snapshot(1)
    assert lent_bytes(shard) == MIB
    assert daemon.segment_bytes() == MIB
    shard.contents[:] = 0
    shard.load(1)
    assert np.array_equal(shard.contents, expected)
    shard.offload(1)
    assert lent_bytes(shard) == 0


def test_a_failed_load_allocates_nothing(daemon: Daemon, make_shard: MakeShard) -> None:
    shard = make_shard(daemon)
    shard.offload(1)
    with pytest.raises(StateLostError):
        shard.load(7)
    assert lent_bytes(shard) == 0
    shard.load(1)
    assert lent_bytes(shard) == MIB // 2


def test_memory_is_allocated_once(daemon: Daemon, make_shard: MakeShard) -> None:
    shard = make_shard(daemon)
    with pytest.raises(ConflictError, match="already has device memory"):
        shard.client.request(Attach(token=1))
    shard.client.request(Detach())
    shard.client.request(Detach())
    assert lent_bytes(shard) == 0


def test_a_rank_can_be_registered_again_after_another_process(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    first = make_shard(daemon)
    expected = first.fill(1)
    second = make_shard(daemon)
    second.close()
    first.register()
    assert np.array_equal(first.contents, expected)
    first.offload(1)
    first.load(1)
    assert np.array_equal(first.contents, expected)


def test_a_second_arena_of_a_rank_replaces_the_first(daemon: Daemon, make_shard: MakeShard) -> None:
    first, second = make_shard(daemon), make_shard(daemon, registered=False)
    expected = second.fill(3)
    first.client.register(second.arena, second.slices, group="g", token=1)
    assert np.array_equal(second.contents, expected)
    assert lent_bytes(first) == MIB // 2
    first.offload(1)
    first.load(1)
    assert np.array_equal(second.contents, expected)


def _move_for_ever(pipe: Connection, daemon: Daemon, rank: int, elements: int) -> None:
    """A worker process that offloads and loads until it is killed."""
    shard = Shard(daemon, deployment=f"job{rank}/actor", elements=elements)
    shard.register()
    shard.fill(rank)
    pipe.send(os.getpid())
    seq = 0
    while True:
        seq += 1
        shard.offload(seq, keep_seq=seq)
        shard.load(seq)


def _kill(worker: BaseProcess) -> None:
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()


def test_killed_workers_leave_no_memory_behind(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    """The capacity fits the live workers, so a leaked allocation would cause a refusal."""
    chance = random.Random(50)
    segments = NewSegments()
    elements = MIB // 8
    daemon = start_daemon(device_bytes=3 * MIB)
    observer = make_shard(daemon, registered=False)
    context = multiprocessing.get_context("fork")
    pause = context.Event()
    workers: list[BaseProcess] = []
    for kill in range(KILLS):
        if len(workers) == 3:
            worker = workers.pop(chance.randrange(3))
            # At a random time of its moves.
            pause.wait(chance.uniform(0, 0.01))
            _kill(worker)
            wait_until(lambda: lent_bytes(observer) <= 2 * MIB)
        ours, theirs = context.Pipe()
        worker = context.Process(target=_move_for_ever, args=(theirs, daemon, kill, elements))
        worker.start()
        workers.append(worker)
        assert ours.recv() == worker.pid
        assert lent_bytes(observer) <= 3 * MIB
    for worker in workers:
        _kill(worker)
    wait_until(lambda: lent_bytes(observer) == 0)
    usage = observer.agent.usage()["device"]
    assert usage["idle_bytes"] <= 3 * MIB
    # Freed memory is uncounted at once, and destroyed soon after.
    wait_until(lambda: daemon.segment_bytes() == usage["idle_bytes"])
    assert segments.nbytes() == 0


def test_segments_are_few_and_hold_the_arena() -> None:
    for nbytes in (1, 4096, 1 << 18, (1 << 18) + 1, 100 * MIB, 5 << 30, 300 << 30):
        sizes = segment_sizes(nbytes)
        assert 0 <= sum(sizes) - nbytes < 1 << 18
        assert len(sizes) <= 300
        assert sorted(sizes, reverse=True) == list(sizes)
