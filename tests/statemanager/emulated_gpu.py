"""A worker's GPU on the emulated driver: torch computes on the CPU, in that driver's memory."""

import ctypes
from collections.abc import Callable

import torch

from plexrl.statemanager.device.cuda.arena import CudaArena
from plexrl.worker.state.device import Capture, GpuDevice
from tests.statemanager.emulated_cuda import EmulatedCuda


class EmulatedArena(CudaArena):
    """Its addresses are addresses of this process. Without memory behind them, any access ends the
    process, as it ends a kernel's."""

    @property
    def buffer(self) -> memoryview:
        """The whole arena, which it keeps alive, as `ArenaBytes` does. It must have memory, as for
        torch on a real GPU."""
        assert self.is_attached, "torch asks the driver for the device of an address"
        memory = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        memory.arena = self  # type: ignore[attr-defined]  # ctypes lets objects have attributes
        return memoryview(memory).cast("B")


class EmulatedGraphs:
    """Runs the work at each replay: with the same tensors, as a graph with the same addresses. A
    capture runs nothing."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


class EmulatedGpu(GpuDevice):
    """As `GpuDevice`, for a process with one emulated driver."""

    collectives = "gloo"

    def __init__(self, driver: EmulatedCuda) -> None:
        super().__init__(driver.uuids()[0], driver)
        self.driver = driver
        self.capture = EmulatedGraphs()

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def make_arena(self, nbytes: int) -> EmulatedArena:
        return EmulatedArena(self.driver, nbytes, uuid=self.uuid)

    def step_capture(self) -> Capture:
        return self.capture

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def take_peak_bytes(self) -> int:
        return 0

    def free_cached(self) -> None:
        """Torch keeps nothing on the emulated device."""
