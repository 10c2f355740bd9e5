"""Pinned memory of the host tier is made ready in the background, on the memory nodes of GPUs."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from plexrl.errors import StateTierFullError
from plexrl.statemanager.config import default_prefault_bytes
from plexrl.statemanager.layout.ranges import Piece
from plexrl.statemanager.store.tiers.host.prefault.budget import (
    RESERVE,
    emptiest,
    may_prefault,
)
from plexrl.statemanager.store.tiers.host.prefault.idle_process import IdleProcess
from plexrl.statemanager.store.tiers.host.prefault.prefaulted_pool import PrefaultedPool
from plexrl.statemanager.store.tiers.host.segment import HostSegment
from plexrl.statemanager.store.tiers.host.worker_file_pool import WorkerFilePool
from tests.examples import examples
from tests.statemanager.conftest import MIB, wait_until

PAGE = 4096
TENANTS = ("ours", "theirs")
NODES = (0, 1)


@pytest.fixture
def directory() -> Iterator[Path]:
    """On a memory file system."""
    path = Path(tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@given(st.integers(0, 1 << 45), st.integers(0, 1 << 45), st.integers(0, 1 << 45))
def test_others_keep_their_part_of_the_machine(nbytes: int, usable: int, available: int) -> None:
    allowed = may_prefault(nbytes, usable_bytes=usable, available_bytes=available)
    assert allowed == (available - nbytes >= int(usable * RESERVE))


def test_the_default_leaves_space_for_what_is_not_in_segments() -> None:
    assert default_prefault_bytes(64 << 30, has_gpus=True) == 60 << 30
    assert default_prefault_bytes(64 << 30, has_gpus=False) == 0


@given(st.integers(2, 5), st.lists(st.integers(1, 4), max_size=30))
def test_memory_nodes_get_equal_parts(count: int, sizes: list[int]) -> None:
    nodes, on = tuple(range(count)), dict[int | None, int]()
    for size in sizes:
        (node,) = emptiest(nodes, on)
        on[node] = on.get(node, 0) + size
    filled = [on.get(node, 0) for node in nodes]
    assert max(filled) - min(filled) <= 4, "by no more than the largest segment"
    assert emptiest((), on) == ()


class PinnedHistory(RuleBasedStateMachine):
    """A pool whose segments are pinned and made ready while it is used."""

    @initialize(bound=st.integers(0, 40), segment=st.integers(1, 16))
    def start(self, bound: int, segment: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm"))
        self.bound, self.segment = bound * PAGE, segment * PAGE
        self.owned: dict[int, tuple[Piece, ...]] = {}
        self.count = 0
        self.open()

    def open(self) -> None:
        self.pinned: dict[int, int] = {}
        self.pool = PrefaultedPool(
            self.directory,
            self.bound,
            segment_bytes_max=self.segment,
            memory_nodes=NODES,
            on_map=self.pin,
            on_unmap=lambda address, _: self.pinned.__delitem__(address),
        )

    def pin(self, address: int, nbytes: int) -> None:
        assert address not in self.pinned
        self.pinned[address] = nbytes

    def used(self) -> int:
        return sum(piece.nbytes for pieces in self.owned.values() for piece in pieces)

    @rule(
        nbytes=st.integers(1, 12 * PAGE),
        tenant=st.integers(0, 1),
        near=st.sampled_from((None, *NODES, 7)),
    )
    def alloc(self, nbytes: int, tenant: int, near: int | None) -> None:
        whole = -(-nbytes // PAGE) * PAGE
        fits = self.used() + whole <= self.bound
        try:
            pieces = self.pool.alloc(nbytes, TENANTS[tenant], near)
        except StateTierFullError:
            # Memory of a segment that another tenant uses in part cannot be had.
            assert not fits or any(number % 2 != tenant for number in self.owned)
            return
        assert fits
        assert sum(piece.nbytes for piece in pieces) == whole
        self.count += 1
        number = 2 * self.count + tenant
        self.owned[number] = pieces
        for piece in pieces:
            self.pool.view(piece)[:] = number.to_bytes(8, "little") * (piece.nbytes // 8)

    @precondition(lambda self: self.owned)
    @rule(index=st.integers(0, 100))
    def free(self, index: int) -> None:
        self.pool.free(self.owned.pop(sorted(self.owned)[index % len(self.owned)]))

    @rule(nbytes=st.integers(0, 40 * PAGE), waits=st.booleans())
    def prefault(self, nbytes: int, waits: bool) -> None:
        self.pool.prefault(nbytes)
        if waits:
            self.settle()
            assert self.pool.resident_bytes >= min(nbytes, self.bound) // PAGE * PAGE

    @rule()
    def restart(self) -> None:
        self.pool.close()
        assert not self.pinned
        self.open()
        assert not self.pinned, "that is not waited for"
        for number, pieces in self.owned.items():
            assert self.pool.claim(pieces, TENANTS[number % 2])
        self.pool.remove_unclaimed()
        self.pool.prefault(0)

    def settle(self) -> None:
        if self.pool._prefaulting is not None:
            self.pool._prefaulting.join()

    @invariant()
    def every_owner_has_its_own(self) -> None:
        for number, pieces in getattr(self, "owned", {}).items():
            for piece in pieces:
                assert self.pool.view(piece) == number.to_bytes(8, "little") * (piece.nbytes // 8)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.settle()
        self.pool.check()
        segments = {path.name: path.stat().st_size for path in self.directory.iterdir()}
        assert sum(self.pinned.values()) == sum(segments.values()) <= self.bound
        self.pool.close()
        assert not self.pinned
        shutil.rmtree(self.directory)


def test_any_history_of_a_pool_that_is_being_prefaulted() -> None:
    run_state_machine_as_test(
        PinnedHistory,
        settings=settings(max_examples=examples(40), stateful_step_count=25, deadline=None),
    )


def test_an_allocation_is_near_its_gpu_while_there_is_space(directory: Path) -> None:
    pool = PrefaultedPool(
        directory, 8 * MIB, segment_bytes_max=MIB, memory_nodes=NODES, on_map=lambda *_: None
    )
    pool.prefault(8 * MIB)
    wait_until(lambda: pool.resident_bytes == 8 * MIB)

    def nodes_of(pieces: tuple[Piece, ...]) -> set[int | None]:
        return {pool._segments[piece.segment].node for piece in pieces}

    far = pool.alloc(MIB // 2, "ours", 0)
    near = pool.alloc(3 * MIB, "ours", 1)
    assert nodes_of(far) == {0}, "its tenant's free memory would have sufficed for"
    assert nodes_of(near) == {1}
    assert nodes_of(pool.alloc(2 * MIB, "ours", 1)) == {0, 1}, "rather than none"
    pool.close()


def test_a_rank_without_a_known_node_gets_any_memory(directory: Path) -> None:
    pool = PrefaultedPool(directory, MIB, memory_nodes=NODES)
    pool.place_rank(("job/actor", 0), 1)
    pool.place_rank(("job/actor", 1), None)
    assert [pool.node_of(("job/actor", rank)) for rank in (0, 1, 2)] == [1, None, None]
    (piece,) = pool.alloc(PAGE, "ours", pool.node_of(("job/actor", 0)))
    (other,) = pool.alloc(MIB // 2, "theirs", pool.node_of(("job/actor", 1)))
    assert pool._segments[piece.segment].node == 1
    assert pool._segments[other.segment].node is None
    pool.forget_ranks("job/actor")
    assert pool.node_of(("job/actor", 0)) is None
    pool.close()


def test_files_of_workers_are_near_their_gpus(directory: Path) -> None:
    pool = WorkerFilePool(directory, 8 * MIB, memory_nodes=NODES)
    first = pool.alloc_file(MIB, "actor rank 0", 1)
    pool.free([first])
    second = pool.alloc_file(MIB, "actor rank 1", 0)
    assert second != first, "it is on the other node"
    assert pool.alloc_file(MIB, "actor rank 2", 1) == first
    pool.close()


def test_a_file_takes_the_place_of_memory_that_was_made_ready(directory: Path) -> None:
    pinned: dict[int, int] = {}
    pool = WorkerFilePool(
        directory,
        4 * MIB,
        segment_bytes_max=MIB,
        on_map=pinned.__setitem__,
        on_unmap=lambda at, _: pinned.__delitem__(at),
    )
    pool.prefault(4 * MIB)
    wait_until(lambda: pool.resident_bytes == 4 * MIB)
    piece = pool.alloc_file(3 * MIB // 2, "actor rank 0")
    assert sum(pinned.values()) <= 4 * MIB
    pool.free([piece])
    pool.alloc(4 * MIB, "ours")
    pool.check()
    pool.close()
    assert not pinned


class Stopped:
    """A pool whose process stops after the first of eight segments: no core is idle."""

    def __init__(self, directory: Path) -> None:
        self.priorities: list[tuple[int, int]] = []
        self.pool = PrefaultedPool(
            directory, 8 * MIB, segment_bytes_max=MIB, on_map=self.stop, may_spare=lambda _: True
        )
        self.pool.prefault(8 * MIB)
        wait_until(lambda: self.pool.resident_bytes == MIB)
        # Before it asks the process that is stopped, it would start another.
        wait_until(self.pool._idle._talking.locked)

    def stop(self, address: int, nbytes: int) -> None:
        del address, nbytes
        process = self.pool._idle._process
        if process is not None and not self.priorities:
            nice = os.getpriority(os.PRIO_PROCESS, process.pid)
            self.priorities.append((os.sched_getscheduler(process.pid), nice))
            os.kill(process.pid, signal.SIGSTOP)


def test_pages_are_allocated_at_idle_priority_and_the_pool_serves_meanwhile(
    directory: Path,
) -> None:
    stopped = Stopped(directory)
    assert stopped.priorities == [(os.SCHED_IDLE, 19)]
    pieces = stopped.pool.alloc(MIB // 2, "ours")
    assert stopped.pool.resident_bytes == MIB, "the next segment is still in the making"
    stopped.pool.free(pieces)
    stopped.pool.close()
    assert len(list(directory.iterdir())) == 1, "the half-made segment is gone"


def test_an_allocation_that_needs_the_memory_ends_its_making(directory: Path) -> None:
    stopped = Stopped(directory)
    pieces = stopped.pool.alloc(8 * MIB, "ours")
    assert sum(piece.nbytes for piece in pieces) == 8 * MIB
    stopped.pool.close()
    stopped.pool.check()


def test_nothing_is_made_while_the_machine_has_no_memory_to_spare(directory: Path) -> None:
    asked = threading.Event()

    def may_spare(nbytes: int) -> bool:
        assert nbytes == MIB // 2
        asked.set()
        return False

    pool = PrefaultedPool(
        directory, 4 * MIB, segment_bytes_max=MIB, on_map=lambda *_: None, may_spare=may_spare
    )
    pool.prefault(4 * MIB)
    assert asked.wait(10)
    pool.close()
    assert not list(directory.iterdir())


def test_an_allocation_of_pages_can_be_ended(directory: Path) -> None:
    idle, path = IdleProcess(), directory / "file"
    path.touch()
    idle.allocate(path, 0, MIB)
    assert path.stat().st_blocks * 512 == MIB
    with pytest.raises(OSError, match="No such file") as absent:
        idle.allocate(directory / "absent", 0, MIB)
    assert absent.value.errno == errno.ENOENT
    assert idle._process is not None
    os.kill(idle._process.pid, signal.SIGSTOP)
    ending = threading.Timer(0.05, idle.end)
    ending.start()
    with pytest.raises(OSError, match="ended") as ended:
        idle.allocate(path, MIB, MIB)
    assert ended.value.errno == errno.ECANCELED
    idle.allocate(path, MIB, MIB)
    assert path.stat().st_size == 2 * MIB, "by another process"
    idle.end()
    ending.join()


DIES = """
import os, signal, sys
from pathlib import Path
from plexrl.statemanager.store.tiers.host.prefault.idle_process import IdleProcess

idle, path = IdleProcess(), Path(sys.argv[1])
idle.allocate(path, 0, 4096)
print(idle._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_ends_with_a_daemon_that_is_killed(directory: Path) -> None:
    (directory / "file").touch()
    command = [sys.executable, "-c", DIES, str(directory / "file")]
    killed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    status = Path("/proc", killed.stdout.strip(), "stat")
    # Whoever adopted it may leave it a zombie for a while.
    wait_until(
        lambda: not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    )


def test_a_segment_that_a_killed_daemon_was_making_is_made_again(directory: Path) -> None:
    half_made = HostSegment(directory, 0, MIB)
    half_made.fallocate(Piece(0, 0, MIB // 4))
    half_made.close()
    pinned: dict[int, int] = {}
    pool = PrefaultedPool(
        directory,
        2 * MIB,
        segment_bytes_max=MIB,
        on_map=pinned.__setitem__,
        on_unmap=lambda at, _: pinned.__delitem__(at),
    )
    pool.remove_unclaimed()
    assert not list(directory.iterdir())
    pool.prefault(2 * MIB)
    wait_until(lambda: pool.resident_bytes == 2 * MIB)
    assert sum(pinned.values()) == 2 * MIB
    pool.close()
    assert not pinned


def test_a_full_memory_file_system_ends_the_work_and_not_the_process(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = IdleProcess.allocate

    def first_segment_only(idle: IdleProcess, path: Path, offset: int, nbytes: int) -> None:
        if not path.name.startswith("000000"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(idle, path, offset, nbytes)

    monkeypatch.setattr(IdleProcess, "allocate", first_segment_only)
    pool = PrefaultedPool(directory, 4 * MIB, segment_bytes_max=MIB, on_map=lambda *_: None)
    pool.prefault(4 * MIB)
    wait_until(lambda: "not completely prefaulted" in caplog.text)
    assert pool.resident_bytes == sum(path.stat().st_size for path in directory.iterdir())
    assert pool.alloc(MIB // 4, "ours"), "what was made is of use"
    pool.check()
    pool.close()
