"""What every device backend promises: one suite, run over each of them.

The runs on the emulated CUDA driver prove that we make the right calls in the right order. That the
hardware does what they ask is proved by the runs on a real GPU only.
"""

import multiprocessing
import os
import random
import signal
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import (
    DeviceMemoryFullError,
    InvalidRequestError,
    StateLostError,
)
from plexrl.statemanager.device.backend import DeviceAllocation, WorkerArena
from plexrl.statemanager.device.filled_allocation import allocate_filled
from plexrl.statemanager.device.memory import ByteRun
from tests.statemanager.conftest import wait_until
from tests.statemanager.device_rigs import (
    RIGS,
    HostBlock,
    Rig,
    hold_until_killed,
    read,
    rig_named,
    segments,
    write,
)

KIB = 1 << 10
ARENA_BYTES = 700 * KIB
"""Several segments on a CPU node, several units on an emulated GPU."""
LARGE_BYTES = 5 << 20
"""Several segments on a GPU too."""
UID = 1000


@pytest.fixture(params=RIGS)
def rig(request: Any) -> Iterator[Rig]:
    with rig_named(request.param) as made:
        yield made


def borrow(rig: Rig, nbytes: int = ARENA_BYTES) -> tuple[DeviceAllocation, WorkerArena]:
    arena = rig.make_arena(nbytes)
    loan = allocate_filled(rig.backend, arena.nbytes, device=0, uid=UID)
    arena.attach(segments(loan), keep_contents=False)
    return loan, arena


def give_back(rig: Rig, loan: DeviceAllocation, arena: WorkerArena) -> None:
    arena.detach()
    rig.backend.recycle(loan)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_both_sides_see_the_same_memory(rig: Rig) -> None:
    loan, arena = borrow(rig)
    chance = random.Random(1)
    for offset in (0, 1, 256 * KIB - 3, 512 * KIB - 1, ARENA_BYTES - 5000):
        contents = chance.randbytes(5000)
        write(loan, offset, contents)
        assert rig.peek(arena, offset, 5000) == contents
        contents = chance.randbytes(5000)
        rig.poke(arena, offset, contents)
        assert read(loan, offset, 5000) == contents
    give_back(rig, loan, arena)


def test_many_runs_are_one_copy(rig: Rig) -> None:
    loan, arena = borrow(rig)
    contents = random.Random(2).randbytes(ARENA_BYTES)
    rig.poke(arena, 0, contents)
    source, target = HostBlock(bytes(ARENA_BYTES)), HostBlock(bytes(ARENA_BYTES))
    step = 997
    starts = range(0, ARENA_BYTES, step)
    loan.read([ByteRun(s, source.address + s, min(step, ARENA_BYTES - s)) for s in starts])
    assert source.contents() == contents
    loan.write([ByteRun(s, target.address + s, min(step, ARENA_BYTES - s)) for s in starts])
    assert rig.peek(arena, 0, ARENA_BYTES) == bytes(ARENA_BYTES)
    give_back(rig, loan, arena)


def test_an_arena_keeps_its_address_and_nothing_else_over_an_offload(rig: Rig) -> None:
    loan, arena = borrow(rig)
    address = arena.address
    rig.poke(arena, 0, b"\xff" * ARENA_BYTES)
    assert arena.is_attached
    assert arena.resident_bytes() >= ARENA_BYTES
    give_back(rig, loan, arena)
    assert not arena.is_attached
    assert arena.resident_bytes() == 0
    again = allocate_filled(rig.backend, arena.nbytes, device=0, uid=UID)
    arena.attach(segments(again), keep_contents=False)
    assert arena.address == address
    assert rig.peek(arena, 0, ARENA_BYTES) == bytes(ARENA_BYTES)
    give_back(rig, again, arena)


def test_a_worker_reads_the_filled_bytes_and_zeros_elsewhere(rig: Rig) -> None:
    former = borrow(rig)
    rig.poke(former[1], 0, b"\xff" * former[1].nbytes)
    give_back(rig, *former)

    def fill(loan: DeviceAllocation) -> Sequence[tuple[int, int]]:
        write(loan, 300 * KIB, b"second")
        write(loan, 5, b"first")
        return [(300 * KIB, 6), (5, 5)]

    arena = rig.make_arena(ARENA_BYTES)
    loan = allocate_filled(rig.backend, arena.nbytes, device=0, uid=UID, fill=fill)
    arena.attach(segments(loan), keep_contents=False)
    expected = bytearray(arena.nbytes)
    expected[5:10], expected[300 * KIB : 300 * KIB + 6] = b"first", b"second"
    assert rig.peek(arena, 0, arena.nbytes) == bytes(expected)
    give_back(rig, loan, arena)


def test_a_failed_fill_allocates_nothing(rig: Rig) -> None:
    def fill(_: DeviceAllocation) -> Sequence[tuple[int, int]]:
        raise StateLostError("no such version")

    with pytest.raises(StateLostError, match="no such version"):
        allocate_filled(rig.backend, ARENA_BYTES, device=0, uid=UID, fill=fill)
    assert rig.backend.usage(0).lent_bytes == 0


def test_a_part_becomes_a_whole_arena_with_its_contents(rig: Rig) -> None:
    arena = rig.make_arena(LARGE_BYTES)

    def part_of(bytes_max: int, bytes_wanted: int = LARGE_BYTES) -> DeviceAllocation | None:
        return rig.backend.allocate_part(
            arena.nbytes, device=0, uid=UID, bytes_max=bytes_max, bytes_wanted=bytes_wanted
        )

    assert part_of(1) is None
    assert part_of(LARGE_BYTES, bytes_wanted=0) is None
    for bytes_max in (LARGE_BYTES - 1, 4 * LARGE_BYTES):
        part = part_of(bytes_max)
        assert part is not None
        assert part.nbytes <= bytes_max
        end = min(part.nbytes, arena.nbytes)
        contents = random.Random(bytes_max).randbytes(end)
        write(part, 0, contents)

        def fill(whole: DeviceAllocation, end: int = end) -> Sequence[tuple[int, int]]:
            write(whole, arena.nbytes - 1, b"z")
            return [(0, end - 1), (arena.nbytes - 1, 1)]

        loan = allocate_filled(rig.backend, arena.nbytes, device=0, uid=UID, fill=fill, part=part)
        with pytest.raises(StateLostError):
            read(part, 0, 1)
        assert rig.backend.usage(0).lent_bytes == loan.nbytes
        arena.attach(segments(loan), keep_contents=False)
        found = rig.peek(arena, 0, arena.nbytes)
        assert found[: end - 1] == contents[:-1]
        assert not any(found[end - 1 : -1]), "the rest reads as zero"
        assert found[-1:] == b"z"
        give_back(rig, loan, arena)


@pytest.mark.parametrize("rig_name", RIGS)
def test_a_part_that_cannot_grow_stays_as_it_is(rig_name: str) -> None:
    with rig_named(rig_name, bytes_max=2 * LARGE_BYTES) as rig:
        other, arena = borrow(rig, LARGE_BYTES)
        nbytes = LARGE_BYTES * 3 // 2
        part = rig.backend.allocate_part(
            nbytes, device=0, uid=UID, bytes_max=LARGE_BYTES, bytes_wanted=nbytes
        )
        assert part is not None
        write(part, 0, b"mine")
        before = rig.backend.usage(0)
        with pytest.raises(DeviceMemoryFullError):
            rig.backend.extend(part, nbytes)
        assert rig.backend.usage(0) == before
        assert read(part, 0, 4) == b"mine"
        give_back(rig, other, arena)
        whole = rig.backend.extend(part, nbytes)
        assert read(whole, 0, 4) == b"mine"
        rig.backend.recycle(whole)
        assert rig.backend.usage(0).lent_bytes == 0


def test_returned_memory_is_free_again(rig: Rig) -> None:
    for _ in range(3):
        loan, arena = borrow(rig)
        assert rig.taken_bytes() >= ARENA_BYTES
        give_back(rig, loan, arena)
        usage = rig.backend.usage(0)
        assert usage.lent_bytes == 0
        assert rig.taken_bytes() == usage.idle_bytes
    rig.backend.close()
    assert rig.taken_bytes() == 0


@pytest.mark.parametrize("rig_name", RIGS)
def test_a_full_device_refuses_and_changes_nothing(rig_name: str) -> None:
    with rig_named(rig_name, bytes_max=4 << 20) as rig:
        loan, arena = borrow(rig, 2 << 20)
        rig.poke(arena, 0, b"mine")
        before = rig.backend.usage(0)
        with pytest.raises(DeviceMemoryFullError, match="offload another job") as refused:
            rig.backend.allocate(4 << 20, device=0, uid=UID)
        assert refused.value.details["needed_bytes"] == 4 << 20
        assert rig.backend.usage(0) == before
        assert read(loan, 0, 4) == b"mine"
        give_back(rig, loan, arena)
        rig.backend.free(rig.backend.allocate(4 << 20, device=0, uid=UID))


def test_a_restarted_daemon_adopts_its_workers_memory(rig: Rig) -> None:
    restarted = rig.another_backend()
    # Its first use, for which a driver takes some memory of its own.
    restarted.usage(0)
    taken_before = rig.taken_bytes()
    loan, arena = borrow(rig)
    rig.poke(arena, 0, b"before")
    rig.backend.free(loan)
    assert rig.peek(arena, 0, 6) == b"before", "the worker's memory ended with the daemon"
    fds = [segment.fd for segment in arena.segments]
    adopted = restarted.adopt(fds, [s.nbytes for s in arena.segments], device=0, uid=UID)
    assert adopted.nbytes == arena.nbytes or adopted.nbytes > arena.nbytes
    assert read(adopted, 0, 6) == b"before"
    write(adopted, 0, b"beyond")
    assert rig.peek(arena, 0, 6) == b"beyond"
    arena.detach()
    restarted.recycle(adopted)
    restarted.close()
    # Freed memory is uncounted at once, and destroyed soon after.
    wait_until(lambda: rig.taken_bytes() <= taken_before)


def test_only_segments_are_adopted(rig: Rig) -> None:
    loan, arena = borrow(rig)
    own = arena.segments[0]
    receiving, sending = os.pipe()
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, own.nbytes)
    with tempfile.TemporaryFile() as file:
        file.truncate(own.nbytes)
        foreign: list[tuple[list[int], list[int]]] = [
            ([receiving], [own.nbytes]),
            ([file.fileno()], [own.nbytes]),
            ([unsealed], [own.nbytes]),
            ([own.fd], [2 * own.nbytes]),
            ([own.fd, file.fileno()], [own.nbytes, own.nbytes]),
            ([own.fd], []),
            ([], []),
        ]
        before = rig.backend.usage(0)
        for fds, sizes in foreign:
            with pytest.raises(InvalidRequestError):
                rig.backend.adopt(fds, sizes, device=0, uid=UID)
            assert rig.backend.usage(0).lent_bytes == before.lent_bytes
    for fd in (receiving, sending, unsealed):
        os.close(fd)
    give_back(rig, loan, arena)


def test_a_copy_stays_in_its_arena(rig: Rig) -> None:
    loan, arena = borrow(rig)
    block = HostBlock(b"12345678")
    for offset in (-1, loan.nbytes - 7, loan.nbytes + (1 << 40)):
        with pytest.raises(InvalidRequestError, match="not in an arena"):
            loan.write([block.run(offset)])
        with pytest.raises(InvalidRequestError, match="not in an arena"):
            loan.read([block.run(offset)])
        with pytest.raises(InvalidRequestError, match="not in an arena"):
            loan.clear(offset, 8)
    give_back(rig, loan, arena)


def test_an_ended_allocation_cannot_be_used(rig: Rig) -> None:
    loan, arena = borrow(rig)
    give_back(rig, loan, arena)
    block = HostBlock(b"x")
    with pytest.raises(StateLostError, match="returned this memory"):
        loan.read([block.run(0)])
    with pytest.raises(StateLostError, match="returned this memory"):
        loan.write([block.run(0)])
    with pytest.raises(StateLostError, match="returned this memory"):
        loan.descriptors()


def test_segments_that_do_not_fit_an_arena_are_refused(rig: Rig) -> None:
    loan, arena = borrow(rig)
    other = rig.make_arena(4 << 20)
    open_before = open_descriptors()
    with pytest.raises(InvalidRequestError, match="do not fit"):
        other.attach(segments(loan), keep_contents=False)
    with pytest.raises(InvalidRequestError, match="do not fit"):
        arena.attach(segments(loan), keep_contents=False)
    assert open_descriptors() == open_before
    assert not other.is_attached
    give_back(rig, loan, arena)


def test_an_unknown_device_is_refused(rig: Rig) -> None:
    with pytest.raises(Exception, match="device"):
        rig.backend.allocate(ARENA_BYTES, device=99, uid=UID)
    assert rig.backend.usage(0).lent_bytes == 0


def test_a_killed_worker_leaks_nothing(rig: Rig) -> None:
    loan = allocate_filled(rig.backend, ARENA_BYTES, device=0, uid=UID)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(
        target=hold_until_killed, args=(theirs, rig.name(), ARENA_BYTES, len(loan.segment_bytes))
    )
    worker.start()
    assert worker.pid is not None
    ours.send(loan.segment_bytes)
    for fd in loan.descriptors():
        send_handle(ours, fd, worker.pid)
        os.close(fd)
    assert ours.recv() == worker.pid
    assert read(loan, 0, 6) == b"worker"
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert read(loan, 0, 6) == b"worker", "the daemon's memory ended with the worker"
    rig.backend.free(loan, is_unmapped=True)
    # Freed memory is uncounted at once, and destroyed soon after.
    wait_until(lambda: rig.taken_bytes() == 0)
    assert rig.backend.usage(0).lent_bytes == 0


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_events_keeps_every_arenas_contents(rig: Rig, seed: int) -> None:
    """The model is a dictionary of the expected contents of each attached arena."""
    chance = random.Random(seed)
    sizes = [100 * KIB, 256 * KIB, 600 * KIB, 1300 * KIB]
    arenas = [rig.make_arena(chance.choice(sizes)) for _ in range(5)]
    loans: dict[int, DeviceAllocation] = {}
    expected: dict[int, bytearray] = {}
    for _ in range(60):
        index = chance.randrange(len(arenas))
        arena = arenas[index]
        if index not in loans:
            loans[index] = allocate_filled(rig.backend, arena.nbytes, device=0, uid=UID)
            arena.attach(segments(loans[index]), keep_contents=False)
            expected[index] = bytearray(arena.nbytes)
        offset = chance.randrange(arena.nbytes)
        contents = chance.randbytes(min(arena.nbytes - offset, chance.choice((1, 999, 300 * KIB))))
        expected[index][offset : offset + len(contents)] = contents
        if chance.random() < 0.5:
            write(loans[index], offset, contents)
        else:
            rig.poke(arena, offset, contents)
        held = bytes(expected[index])
        assert read(loans[index], 0, arena.nbytes) == held
        assert rig.peek(arena, 0, arena.nbytes) == held
        match chance.randrange(4):
            case 0:
                arena.detach()
                rig.backend.recycle(loans.pop(index))
            case 1:
                rig.backend.free(loans.pop(index))
                assert rig.peek(arena, 0, arena.nbytes) == held
                arena.detach()
    for index, loan in loans.items():
        assert rig.peek(arenas[index], 0, arenas[index].nbytes) == bytes(expected[index])
        arenas[index].detach()
        rig.backend.free(loan)
    for arena in arenas:
        arena.close()
    assert rig.backend.usage(0).lent_bytes == 0
    rig.backend.close()
    assert rig.taken_bytes() == 0
