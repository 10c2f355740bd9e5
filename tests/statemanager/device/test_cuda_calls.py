"""Our use of the CUDA driver without a GPU: on the emulated one, and up to the real one's door.

What this proves is the sequence of calls and what becomes of their failures, not the hardware.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from plexrl.errors import (
    DeviceError,
    DeviceMemoryFullError,
    DeviceUnavailableError,
    StateLostError,
)
from plexrl.statemanager.device.cuda import host_pinning
from plexrl.statemanager.device.cuda.arena import ArenaBytes, CudaArena
from plexrl.statemanager.device.cuda.bindings import BoundDriver, bytes_by_process
from plexrl.statemanager.device.cuda.device import (
    CUDA_SEGMENT_BYTES_MAX,
    CudaDevices,
    cuda_segment_sizes,
)
from plexrl.statemanager.device.cuda.driver import driver_error
from plexrl.statemanager.device.cuda.host_pinning import HostPinning
from plexrl.statemanager.device.mapping import map_zero, unmap
from plexrl.statemanager.device.memory import ByteRun
from tests.statemanager.device_rigs import HostBlock, segments
from tests.statemanager.emulated_cuda import EmulatedCuda

MIB = 1 << 20


@pytest.fixture
def driver() -> Iterator[EmulatedCuda]:
    """An emulated driver, on which the test must leave nothing."""
    made = EmulatedCuda(f"calls-{uuid.uuid4().hex[:8]}")
    made.enter(0)
    yield made
    made.check_nothing_left()


@pytest.fixture
def host() -> Iterator[int]:
    """The address of 8 MiB of host memory."""
    address = map_zero(8 * MIB)
    yield address
    unmap(address, 8 * MIB)


def test_a_failure_at_any_call_of_an_allocation_leaves_nothing(driver: EmulatedCuda) -> None:
    devices = CudaDevices(driver)
    for call in ("create", "reserve", "map", "allow_access"):
        driver.fail_next(call)
        with pytest.raises(DeviceError, match="CUDA_ERROR_UNKNOWN"):
            devices.allocate(MIB, device=0, uid=0)
        driver.check_nothing_left()
        assert devices.usage(0).lent_bytes == 0
    devices.free(devices.allocate(MIB, device=0, uid=0))


def test_a_failure_at_any_call_of_an_attach_leaves_nothing(driver: EmulatedCuda) -> None:
    devices = CudaDevices(driver)
    arena = CudaArena(driver, MIB)
    loan = devices.allocate(arena.nbytes, device=0, uid=0)
    for call in ("import_fd", "map", "allow_access"):
        driver.fail_next(call)
        with pytest.raises(DeviceError, match="CUDA_ERROR_UNKNOWN"):
            arena.attach(segments(loan), keep_contents=False)
        assert not arena.is_attached
    arena.attach(segments(loan), keep_contents=False)
    arena.detach()
    devices.free(loan)
    assert driver.taken_bytes(0) == 0
    del arena


@pytest.mark.parametrize(("call", "left"), [("unmap", 0), ("release", 1)])
def test_a_failure_at_a_call_of_a_return_keeps_no_other_handle(call: str, left: int) -> None:
    driver = EmulatedCuda(f"calls-{uuid.uuid4().hex[:8]}")
    driver.enter(0)
    before, devices = CudaDevices(driver), CudaDevices(driver)
    loans = [before.allocate(MIB, device=0, uid=0) for _ in range(2)]
    fds = [segment.fd for loan in loans for segment in segments(loan)]
    adopted = devices.adopt(fds, (MIB, MIB), device=0, uid=0)
    for fd in fds:
        os.close(fd)
    for loan in loans:
        before.free(loan)
    driver.fail_next(call)
    with pytest.raises(DeviceError):
        devices.free(adopted)
    assert driver.handles_held == left
    assert devices.usage(0).lent_bytes == 0


def test_memory_that_is_attached_for_reading_refuses_writes(driver: EmulatedCuda) -> None:
    devices = CudaDevices(driver)
    arena = CudaArena(driver, MIB)
    loan = devices.allocate(arena.nbytes, device=0, uid=0)
    block = HostBlock(b"shared")
    loan.write([block.run(0)])
    stream = driver.create_stream()
    read = HostBlock(b"......")
    arena.attach(segments(loan), keep_contents=False, read_only=True)
    driver.copy_to_host(read.run(0).address, arena.address, 6, stream)
    driver.synchronize_stream(stream)
    assert read.contents() == b"shared"
    with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        driver.copy_to_device(arena.address, block.run(0).address, 6, stream)
    with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        driver.set_zero(arena.address + MIB // 2, MIB // 2, stream)
    arena.detach()
    arena.attach(segments(loan), keep_contents=False)
    driver.copy_to_device(arena.address, block.run(0).address, 6, stream)
    driver.synchronize_stream(stream)
    driver.destroy_stream(stream)
    arena.detach()
    devices.free(loan)
    del arena


def test_memory_of_another_device_is_not_adopted(driver: EmulatedCuda) -> None:
    devices = CudaDevices(driver)
    loan = devices.allocate(MIB, device=1, uid=0)
    fds = [segment.fd for segment in segments(loan)]
    with pytest.raises(Exception, match="does not lie on device 0"):
        devices.adopt(fds, loan.segment_bytes, device=0, uid=0)
    adopted = devices.adopt(fds, loan.segment_bytes, device=1, uid=0)
    devices.free(adopted)
    devices.free(loan)
    for fd in fds:
        os.close(fd)


def test_a_device_that_fails_in_a_copy_loses_its_state_but_not_the_daemon(
    driver: EmulatedCuda,
) -> None:
    devices = CudaDevices(driver)
    loan = devices.allocate(MIB, device=0, uid=0)
    block = HostBlock(b"x")
    driver.broken = True
    with pytest.raises(StateLostError, match="CUDA_ERROR_ECC_UNCORRECTABLE"):
        loan.read([block.run(0)])
    with pytest.raises(StateLostError, match="restart the worker"):
        loan.write([block.run(0)])
    driver.broken = False
    loan.write([block.run(0)])
    devices.free(loan)


def test_host_memory_is_pinned_in_pieces_that_no_copy_crosses(
    monkeypatch: pytest.MonkeyPatch, host: int
) -> None:
    monkeypatch.setattr(host_pinning, "PIN_BYTES_MAX", 4 * MIB)
    monkeypatch.setattr(host_pinning, "PIN_BYTES_MIN", 4096)
    driver = EmulatedCuda(f"pin-{uuid.uuid4().hex[:8]}", pin_bytes_max=3 * MIB)
    devices = CudaDevices(driver)
    devices.register_host(host, 8 * MIB)
    assert driver.pinned == {host + start * MIB: 2 * MIB for start in range(0, 8, 2)}
    loan = devices.allocate(8 * MIB, device=0, uid=0)
    loan.write([ByteRun(0, host, 8 * MIB)])
    loan.read([ByteRun(MIB, host + MIB + 7, 5 * MIB)])
    devices.unregister_host(host, 8 * MIB)
    loan.read([ByteRun(0, host, 8 * MIB)])
    devices.free(loan)
    driver.check_nothing_left()


def test_memory_that_cannot_be_pinned_is_used_unpinned_with_one_warning(
    driver: EmulatedCuda, host: int, caplog: pytest.LogCaptureFixture
) -> None:
    pinning = HostPinning(driver)
    pinning.add(host + 4096, 4096)
    pinning.add(host, 8 * MIB)
    pinning.add(host + 8192 + 1, 4096)
    assert driver.pinned == {host + 4096: 4096}, "a range is pinned completely or not at all"
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "ulimit" in caplog.text or "locked memory" in caplog.text
    assert len(caplog.records) == 1
    pinning.remove(host)
    pinning.close()


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        ("CUDA_ERROR_OUT_OF_MEMORY", DeviceMemoryFullError),
        ("CUDA_ERROR_NO_DEVICE", DeviceUnavailableError),
        ("CUDA_ERROR_STUB_LIBRARY", DeviceUnavailableError),
        ("CUDA_ERROR_ECC_UNCORRECTABLE", DeviceError),
        ("CUDA_ERROR_THAT_IS_NEW", DeviceError),
    ],
)
def test_a_driver_error_names_call_code_and_remedy(result: str, kind: type[DeviceError]) -> None:
    error = driver_error("cuMemCreate", result)
    assert type(error) is kind
    assert error.details == {"call": "cuMemCreate", "result": result}
    assert error.message.startswith(f"cuMemCreate: {result}: ")


def test_segments_of_a_gpu_are_whole_units() -> None:
    unit = 2 * MIB
    for nbytes in (1, unit, unit + 1, 3 * CUDA_SEGMENT_BYTES_MAX + 5):
        sizes = cuda_segment_sizes(nbytes, unit)
        assert 0 <= sum(sizes) - nbytes < unit
        assert all(size % unit == 0 and size <= CUDA_SEGMENT_BYTES_MAX for size in sizes)


def test_an_arena_has_a_cuda_array_interface(driver: EmulatedCuda) -> None:
    arena = CudaArena(driver, MIB)
    shown = ArenaBytes(arena).__cuda_array_interface__
    assert shown["shape"] == (MIB,)
    assert shown["typestr"] == "|u1"
    assert shown["data"] == (arena.address, False)
    assert shown["version"] == 3
    del arena


def test_memory_of_processes_is_read_from_the_tools_rows() -> None:
    rows = "GPU-a, 12, 300\nGPU-b, 13, 1\nGPU-a, 14, [N/A]\n\nGPU-a, 12, 1\n"
    assert bytes_by_process(rows, "GPU-a") == {12: 301 * MIB}
    assert bytes_by_process("", "GPU-a") == {}


class RdmaApi:
    """The driver's functions for a device with or without GPUDirect RDMA, which may also refuse to
    create memory for it; the types are the real ones."""

    def __init__(self, *, supported: bool, refused: bool = False) -> None:
        self._real = pytest.importorskip("cuda.bindings.driver")
        self._supported, self._refused = supported, refused
        self.created: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def cuDeviceGet(self, device: int) -> tuple[object, int]:
        return self._real.CUresult.CUDA_SUCCESS, device

    def cuDeviceGetAttribute(self, wanted: object, device: int) -> tuple[object, int]:
        names = self._real.CUdevice_attribute
        assert wanted == names.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        return self._real.CUresult.CUDA_SUCCESS, int(self._supported and device == 0)

    def cuMemCreate(self, nbytes: int, props: Any, flags: int) -> tuple[object, int]:
        flag = props.allocFlags.gpuDirectRDMACapable
        if flag and self._refused:
            return self._real.CUresult.CUDA_ERROR_NOT_SUPPORTED, 0
        self.created.append(flag)
        return self._real.CUresult.CUDA_SUCCESS, nbytes + flags


@pytest.mark.parametrize(
    ("supported", "refused", "flag"), [(True, False, 1), (False, False, 0), (True, True, 0)]
)
def test_memory_allows_gpudirect_rdma_where_the_device_does(
    monkeypatch: pytest.MonkeyPatch, supported: bool, refused: bool, flag: int
) -> None:
    api = RdmaApi(supported=supported, refused=refused)
    bound = BoundDriver()
    monkeypatch.setattr(bound, "_api", api)
    assert [bound.create(0, MIB), bound.create(0, 2 * MIB)] == [MIB, 2 * MIB]
    bound.create(1, MIB)
    assert api.created == [flag, flag, 0]


def test_every_call_reports_a_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings check arguments before they look for the driver, so this tries those too."""
    pytest.importorskip("cuda.bindings.driver")
    bound = BoundDriver()
    with suppress(DeviceUnavailableError):
        bound.enter(0)
        pytest.skip("this machine has a driver")
    monkeypatch.setattr(bound, "_initialised", True)
    for call in (
        lambda: bound.enter(0),
        lambda: bound.memory_info(),
        lambda: bound.granularity(0),
        lambda: bound.create(0, MIB),
        lambda: bound.release(1),
        lambda: bound.device_of(1),
        lambda: bound.export_fd(1),
        lambda: bound.import_fd(1),
        lambda: bound.reserve(MIB),
        lambda: bound.unreserve(4096, MIB),
        lambda: bound.map(4096, MIB, 1),
        lambda: bound.unmap(4096, MIB),
        lambda: bound.allow_access(0, 4096, MIB),
        lambda: bound.create_stream(),
        lambda: bound.destroy_stream(1),
        lambda: bound.copy_to_host(4096, 4096, 1, 1),
        lambda: bound.copy_to_device(4096, 4096, 1, 1),
        lambda: bound.copy_batch([(4096, 4096, 1)] * 2, 1, to_host=True),
        lambda: bound.set_zero(4096, 1, 1),
        lambda: bound.synchronize_stream(1),
        lambda: bound.synchronize(),
        lambda: bound.register_host(4096, MIB),
        lambda: bound.unregister_host(4096),
    ):
        with pytest.raises(DeviceUnavailableError, match="NVIDIA driver"):
            call()
