"""One rig for each device backend: both of its sides, and a way to look behind them.

`cuda` on the emulated driver proves the sequence of calls, not the hardware; the rig on a real GPU
runs where there is one.
"""

import ctypes
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Protocol

import pytest

from plexrl.errors import DeviceUnavailableError
from plexrl.statemanager.device.backend import (
    DeviceAllocation,
    DeviceBackend,
    DeviceSegment,
    WorkerArena,
)
from plexrl.statemanager.device.cpu.arena import CpuArena
from plexrl.statemanager.device.cpu.device import CpuDevice
from plexrl.statemanager.device.cuda.arena import CudaArena
from plexrl.statemanager.device.cuda.bindings import BoundDriver
from plexrl.statemanager.device.cuda.device import CudaDevices
from plexrl.statemanager.device.cuda.driver import CudaDriver
from plexrl.statemanager.device.memory import ByteRun
from tests.statemanager.emulated_cuda import EmulatedCuda
from tests.statemanager.memory_files import NewSegments

SEGMENT_BYTES_MAX = 256 << 10
"""On the emulated driver an arena has several segments; a GPU's unit is larger."""


class HostBlock:
    """Host memory for copies."""

    def __init__(self, contents: bytes) -> None:
        self._memory = ctypes.create_string_buffer(contents, max(1, len(contents)))
        self.address = ctypes.addressof(self._memory)
        self.nbytes = len(contents)

    def contents(self) -> bytes:
        return self._memory.raw[: self.nbytes]

    def run(self, offset: int) -> ByteRun:
        """A run that copies all of it to or from an arena offset."""
        return ByteRun(offset, self.address, self.nbytes)


def read(loan: DeviceAllocation, offset: int, nbytes: int) -> bytes:
    """Read as the daemon."""
    block = HostBlock(bytes(nbytes))
    loan.read([block.run(offset)])
    return block.contents()


def write(loan: DeviceAllocation, offset: int, contents: bytes) -> None:
    """Write as the daemon."""
    block = HostBlock(contents)
    loan.write([block.run(offset)])


class Rig(Protocol):
    backend: DeviceBackend

    def another_backend(self) -> DeviceBackend:
        """The devices of a restarted daemon."""
        ...

    def make_arena(self, nbytes: int) -> WorkerArena: ...

    def poke(self, arena: WorkerArena, offset: int, contents: bytes) -> None:
        """Write as the worker."""
        ...

    def peek(self, arena: WorkerArena, offset: int, nbytes: int) -> bytes:
        """Read as the worker."""
        ...

    def taken_bytes(self) -> int:
        """Physical memory of both sides, if it can be attributed."""
        ...

    def name(self) -> str:
        """Name from which a worker process makes its own rig (`rig_named`)."""
        ...


class CpuRig:
    """Memory files."""

    def __init__(self, bytes_max: int | None = None) -> None:
        self._bytes_max = bytes_max
        self.backend: DeviceBackend = self.another_backend()
        self._segments = NewSegments()

    def another_backend(self) -> CpuDevice:
        return CpuDevice(bytes_max=self._bytes_max)

    def make_arena(self, nbytes: int) -> CpuArena:
        return CpuArena(nbytes)

    def poke(self, arena: WorkerArena, offset: int, contents: bytes) -> None:
        assert isinstance(arena, CpuArena)
        arena.buffer[offset : offset + len(contents)] = contents

    def peek(self, arena: WorkerArena, offset: int, nbytes: int) -> bytes:
        assert isinstance(arena, CpuArena)
        return bytes(arena.buffer[offset : offset + nbytes])

    def taken_bytes(self) -> int:
        return self._segments.nbytes()

    def name(self) -> str:
        return "cpu"

    def close(self) -> None:
        self.backend.close()


class CudaRig:
    """GPUs, through a driver that may be the emulated one."""

    def __init__(self, driver: CudaDriver, name: str, bytes_max: int | None = None) -> None:
        self.driver = driver
        self._name = name
        self._bytes_max = bytes_max
        self.backend: DeviceBackend = self.another_backend()
        driver.enter(0)
        self._stream = driver.create_stream()
        self._free_before, _ = driver.memory_info()

    def another_backend(self) -> CudaDevices:
        return CudaDevices(
            self.driver, bytes_max=self._bytes_max, segment_bytes_max=SEGMENT_BYTES_MAX
        )

    def make_arena(self, nbytes: int) -> CudaArena:
        return CudaArena(self.driver, nbytes)

    def poke(self, arena: WorkerArena, offset: int, contents: bytes) -> None:
        block = HostBlock(contents)
        self.driver.copy_to_device(
            arena.address + offset, block.address, block.nbytes, self._stream
        )
        self.driver.synchronize_stream(self._stream)

    def peek(self, arena: WorkerArena, offset: int, nbytes: int) -> bytes:
        block = HostBlock(bytes(nbytes))
        self.driver.copy_to_host(block.address, arena.address + offset, nbytes, self._stream)
        self.driver.synchronize_stream(self._stream)
        return block.contents()

    def taken_bytes(self) -> int:
        free, _ = self.driver.memory_info()
        return self._free_before - free

    def name(self) -> str:
        return self._name

    def close(self) -> None:
        self.backend.close()
        self.driver.destroy_stream(self._stream)


RIGS = (
    pytest.param("cpu", id="cpu"),
    pytest.param("emulated", id="cuda on an emulated driver"),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
)


@contextmanager
def rig_named(name: str, bytes_max: int | None = None) -> Iterator[Rig]:
    """The rig of that name; "emulated" makes new devices, "emulated NAME" shares another's."""
    if name == "cpu":
        cpu = CpuRig(bytes_max)
        yield cpu
        cpu.close()
    elif name == "cuda":
        driver = real_driver()
        rig = CudaRig(driver, name, bytes_max)
        yield rig
        rig.close()
    else:
        shared = name.partition(" ")[2] or f"emulated-{uuid.uuid4().hex[:8]}"
        emulated = EmulatedCuda(shared)
        rig = CudaRig(emulated, f"emulated {shared}", bytes_max)
        yield rig
        rig.close()


def real_driver() -> BoundDriver:
    """The GPU's, or a skipped test."""
    try:
        driver = BoundDriver()
        driver.enter(0)
    except DeviceUnavailableError:
        pytest.skip("no CUDA device")
    return driver


def segments(loan: DeviceAllocation) -> list[DeviceSegment]:
    """The segments as sent to the worker."""
    pairs = zip(loan.descriptors(), loan.segment_bytes, strict=True)
    return [DeviceSegment(fd=fd, nbytes=nbytes) for fd, nbytes in pairs]


def hold_until_killed(pipe: Connection, rig_name: str, nbytes: int, count: int) -> None:
    """A worker process: attach segments that come over the pipe, write to them, wait."""
    with rig_named(rig_name) as rig:
        arena = rig.make_arena(nbytes)
        sizes = pipe.recv()
        taken = [DeviceSegment(fd=recv_handle(pipe), nbytes=sizes[index]) for index in range(count)]
        arena.attach(taken, keep_contents=False)
        rig.poke(arena, 0, b"worker")
        pipe.send(os.getpid())
        pipe.recv()
