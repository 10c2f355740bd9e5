"""Returned device memory is kept for its user's next load, and never stands in anybody's way."""

import uuid
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import DeviceMemoryFullError
from plexrl.statemanager.device.cuda.device import CudaDevices
from plexrl.statemanager.device.cuda.idle_segments import IdleSegment, IdleSegments
from tests.statemanager.emulated_cuda import EmulatedCuda

MIB = 1 << 20
DEVICE_BYTES = 8 * MIB


@pytest.fixture
def driver() -> Iterator[EmulatedCuda]:
    made = EmulatedCuda(f"idle-{uuid.uuid4().hex[:8]}", device_bytes=DEVICE_BYTES)
    made.enter(0)
    yield made
    made.check_nothing_left()


SEGMENTS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 2)), max_size=8)
"""Bytes and user of each."""


@given(SEGMENTS, st.integers(0, 12), st.lists(st.integers(1, 4), max_size=6), st.integers(1, 2))
def test_every_segment_is_used_once_or_released_once(
    returned: list[tuple[int, int]], bytes_max: int, sizes: list[int], uid: int
) -> None:
    idle = IdleSegments(bytes_max)
    all_of_them = [IdleSegment(handle, *each) for handle, each in enumerate(returned)]
    surplus = idle.put(all_of_them)
    assert idle.nbytes <= bytes_max
    kept = all_of_them[len(surplus) :]
    assert surplus == all_of_them[: len(surplus)], "the oldest go first"
    found, left = idle.take(sizes, uid)
    taken = [each for each in found if each is not None]
    assert sorted([*surplus, *taken, *left]) == all_of_them
    assert idle.nbytes == 0
    for size, each in zip(sizes, found, strict=True):
        assert each is None or (each.nbytes, each.uid) == (size, uid)
    for size in set(sizes):
        fitting = sum((each.nbytes, each.uid) == (size, uid) for each in kept)
        assert sum(each.nbytes == size for each in taken) == min(fitting, sizes.count(size))


def test_the_next_load_of_the_same_user_creates_nothing(driver: EmulatedCuda) -> None:
    devices = CudaDevices(driver)
    devices.recycle(devices.allocate(2 * MIB, device=0, uid=1))
    usage = devices.usage(0)
    assert (usage.lent_bytes, usage.idle_bytes) == (0, 2 * MIB)
    assert usage.free_bytes == DEVICE_BYTES - 2 * MIB
    # A creation would fail.
    driver.fail_next("create")
    loan = devices.allocate(2 * MIB, device=0, uid=1)
    assert not loan.is_clean, "what it held must be cleared before another worker sees it"
    devices.free(loan)
    with pytest.raises(Exception, match="CUDA_ERROR_UNKNOWN"):
        devices.allocate(2 * MIB, device=0, uid=1)
    devices.close()


@pytest.mark.parametrize(("nbytes", "uid"), [(2 * MIB, 2), (5 * MIB, 1), (7 * MIB, 2)])
def test_what_does_not_serve_the_next_load_is_free_during_it(
    driver: EmulatedCuda, nbytes: int, uid: int
) -> None:
    devices = CudaDevices(driver)
    devices.recycle(devices.allocate(2 * MIB, device=0, uid=1))
    devices.recycle(loan := devices.allocate(3 * MIB, device=0, uid=1))
    assert not devices.usage(0).lent_bytes
    loan = devices.allocate(nbytes, device=0, uid=uid)
    assert driver.taken_bytes(0) == nbytes
    devices.free(loan)
    assert driver.taken_bytes(0) == 0
    devices.close()


def test_memory_is_kept_within_its_bound_and_not_beside_a_resident(driver: EmulatedCuda) -> None:
    devices = CudaDevices(driver)
    devices.recycle(devices.allocate(DEVICE_BYTES, device=0, uid=1))
    assert driver.taken_bytes(0) == 0, "it is more than half of the device"
    loans = [devices.allocate(MIB, device=0, uid=1) for _ in range(2)]
    devices.recycle(loans.pop())
    assert driver.taken_bytes(0) == MIB, "the other may need the memory"
    devices.recycle(loans.pop())
    assert driver.taken_bytes(0) == MIB
    devices.release_idle(0)
    assert driver.taken_bytes(0) == 0
    none_kept = CudaDevices(driver, idle_bytes_max=0)
    none_kept.recycle(none_kept.allocate(MIB, device=0, uid=1))
    assert driver.taken_bytes(0) == 0
    for each in (devices, none_kept):
        each.close()


def test_a_load_that_finds_no_room_leaves_nothing(driver: EmulatedCuda) -> None:
    devices = CudaDevices(driver)
    devices.recycle(devices.allocate(3 * MIB, device=0, uid=1))
    with pytest.raises(DeviceMemoryFullError):
        devices.allocate(DEVICE_BYTES + MIB, device=0, uid=1)
    assert driver.taken_bytes(0) == 0
    devices.close()
