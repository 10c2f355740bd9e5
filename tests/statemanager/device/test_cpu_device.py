"""The CPU device: reuse of idle segments, and checks of adopted files."""

import fcntl
import os

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.device.backend import DeviceSegment
from plexrl.statemanager.device.cpu.arena import KEPT_ARENAS, CpuArena
from plexrl.statemanager.device.cpu.device import SEALS, CpuDevice
from plexrl.statemanager.device.filled_allocation import allocate_filled
from tests.statemanager.conftest import wait_until
from tests.statemanager.device_rigs import read, segments, write
from tests.statemanager.memory_files import NewSegments

MIB = 1 << 20
F_SEAL_FUTURE_WRITE = 0x10
"""Linux value; the `fcntl` module lacks it."""
UID, OTHER_UID = 1000, 1001


def inode(segment_fd: int) -> int:
    return os.fstat(segment_fd).st_ino


def inodes(device: CpuDevice, uid: int, nbytes: int = MIB) -> set[int]:
    """Allocate and recycle memory; returns its files."""
    loan = allocate_filled(device, nbytes, device=0, uid=uid)
    fds = loan.descriptors()
    found = {inode(fd) for fd in fds}
    for fd in fds:
        os.close(fd)
    device.recycle(loan)
    return found


def test_a_segment_is_reused_for_the_same_user_only() -> None:
    device = CpuDevice()
    first = inodes(device, UID)
    assert inodes(device, UID) == first
    assert not inodes(device, OTHER_UID) & first
    device.close()


def test_freed_memory_is_not_reused() -> None:
    device = CpuDevice()
    loan = device.allocate(MIB, device=0, uid=UID)
    fds = loan.descriptors()
    taken = {inode(fd) for fd in fds}
    device.free(loan)
    assert not inodes(device, UID) & taken
    for fd in fds:
        os.close(fd)
    device.close()


def test_idle_memory_is_evicted_and_never_exceeds_the_peak() -> None:
    device = CpuDevice(bytes_max=4 * MIB)
    loans = [device.allocate(MIB, device=0, uid=UID) for _ in range(3)]
    for loan in loans:
        device.recycle(loan)
    assert device.usage(0).idle_bytes == 3 * MIB
    large = device.allocate(4 * MIB, device=0, uid=UID)
    usage = device.usage(0)
    assert (usage.lent_bytes, usage.idle_bytes, usage.free_bytes) == (4 * MIB, 0, 0)
    device.recycle(large)
    odd = [device.allocate(256 * 1024, device=0, uid=OTHER_UID) for _ in range(4)]
    usage = device.usage(0)
    assert usage.lent_bytes + usage.idle_bytes <= 4 * MIB
    for loan in odd:
        device.free(loan)
    device.close()
    assert device.usage(0).idle_bytes == 0


def test_prefaulted_memory_is_allocated_first() -> None:
    device = CpuDevice(prefault_bytes=128 * MIB)
    assert device.usage(0).idle_bytes == 128 * MIB
    loan = device.allocate(64 * MIB, device=0, uid=UID)
    assert loan.is_clean, "new memory needs no clearing"
    assert device.usage(0).idle_bytes == 64 * MIB
    device.free(loan)
    device.close()


def test_an_attach_keeps_earlier_writes() -> None:
    device = CpuDevice()
    arena = CpuArena(3 * MIB)
    arena.buffer[0], arena.buffer[2 * MIB], arena.buffer[-1] = 1, 2, 3
    loan = allocate_filled(device, arena.nbytes, device=0, uid=UID)
    arena.attach(segments(loan), keep_contents=True)
    assert (arena.buffer[0], arena.buffer[2 * MIB], arena.buffer[-1]) == (1, 2, 3)
    assert read(loan, 2 * MIB, 1) == b"\x02"
    arena.detach()
    assert not any(arena.buffer)
    device.recycle(loan)
    device.close()


def test_a_returned_segment_is_out_of_the_arenas_reach_and_comes_back_with_its_contents() -> None:
    device = CpuDevice()
    arena = CpuArena(3 * MIB)
    loan = allocate_filled(device, arena.nbytes, device=0, uid=UID)
    arena.attach(segments(loan), keep_contents=False)
    arena.buffer[0], arena.buffer[-1] = 1, 2
    arena.detach()
    assert not any(arena.buffer)
    assert arena.returned_bytes() == 3 * MIB
    arena.buffer[0] = 9
    assert read(loan, 0, 1) == b"\x01", "a write after the return reached the segment"
    write(loan, 5, b"other")
    arena.attach(segments(loan), keep_contents=False)
    assert arena.returned_bytes() == 0
    assert (arena.buffer[0], bytes(arena.buffer[5:10]), arena.buffer[-1]) == (1, b"other", 2)
    arena.buffer[1] = 7
    assert read(loan, 1, 1) == b"\x07"
    arena.detach()
    device.recycle(loan)
    device.close()


def test_a_kept_mapping_does_not_keep_memory_that_the_daemon_gave_up() -> None:
    """Neither an idle segment that is evicted, nor one of another worker that died."""
    device = CpuDevice()
    taken = NewSegments()
    first, second = CpuArena(MIB), CpuArena(MIB)
    for arena in (first, second):
        loan = allocate_filled(device, MIB, device=0, uid=UID)
        arena.attach(segments(loan), keep_contents=False)
        if arena is first:
            arena.detach()
            device.recycle(loan)
    device.free(loan, is_unmapped=True)
    second.detach()
    wait_until(lambda: taken.nbytes() == 0)
    loan = allocate_filled(device, MIB, device=0, uid=UID)
    first.attach(segments(loan), keep_contents=False)
    first.detach()
    device.recycle(loan)
    device.close()
    assert taken.nbytes() == 0
    first.close()
    second.close()


def test_an_arena_keeps_one_mapping_of_a_segment_that_came_back_with_new_contents() -> None:
    device = CpuDevice()
    arena = CpuArena(3 * MIB)
    loan = allocate_filled(device, arena.nbytes, device=0, uid=UID)
    for keep_contents in (False, True, True):
        arena.attach(segments(loan), keep_contents=keep_contents)
        arena.detach()
        assert arena.returned_bytes() == 3 * MIB
    arena.buffer[1] = 4
    arena.attach(segments(loan), keep_contents=True)
    arena.detach()
    assert read(loan, 1, 1) == b"\x04"
    arena.forget_returned()
    assert arena.returned_bytes() == 0
    device.recycle(loan)
    device.close()


def test_an_arena_bounds_the_mappings_that_it_keeps() -> None:
    device = CpuDevice()
    arena = CpuArena(MIB)
    loans = [allocate_filled(device, MIB, device=0, uid=UID) for _ in range(KEPT_ARENAS + 2)]
    for loan in loans:
        arena.attach(segments(loan), keep_contents=False)
        arena.detach()
    assert arena.returned_bytes() == KEPT_ARENAS * MIB
    arena.forget_returned()
    assert arena.returned_bytes() == 0
    for loan in loans:
        device.recycle(loan)
    device.close()


def test_an_arena_that_cannot_be_attached_keeps_its_contents() -> None:
    device = CpuDevice()
    arena = CpuArena(3 * MIB // 2)
    arena.buffer[0], arena.buffer[-1] = 1, 2
    loan = allocate_filled(device, arena.nbytes, device=0, uid=UID)
    whole = segments(loan)
    os.close(whole[-1].fd)
    unreadable = os.open("/proc/self/status", os.O_RDONLY)
    broken = [*whole[:-1], DeviceSegment(fd=unreadable, nbytes=whole[-1].nbytes)]
    with pytest.raises(Exception, match="cannot be mapped"):
        arena.attach(broken, keep_contents=True)
    assert (arena.buffer[0], arena.buffer[-1]) == (1, 2)
    assert not arena.is_attached
    write(loan, 0, b"\x09")
    assert arena.buffer[0] == 1, "the failed attach left its mapping in the arena"
    device.free(loan)
    device.close()


@pytest.mark.parametrize(
    "seals",
    [
        0,
        fcntl.F_SEAL_SHRINK,
        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW,
        SEALS | fcntl.F_SEAL_WRITE,
    ],
)
def test_a_file_without_the_seals_is_not_mapped(seals: int) -> None:
    device = CpuDevice()
    fd = os.memfd_create("plexrl-forged", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(InvalidRequestError, match="seals"):
        device.adopt([fd], [MIB], device=0, uid=UID)
    assert device.usage(0).lent_bytes == 0
    os.close(fd)


def test_a_worker_cannot_resize_or_seal_a_segment() -> None:
    device = CpuDevice()
    loan = device.allocate(MIB, device=0, uid=UID)
    (fd,) = loan.descriptors()
    for nbytes in (0, 4096, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    os.close(fd)
    device.free(loan)
