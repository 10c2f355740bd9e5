"""A worker's device: where its tensors and arenas are, and over what its ranks communicate.

A worker sees one GPU only, so that is `cuda:0` in every worker; its UUID names it everywhere else.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plexrl.process.children.startup import show_only_gpu
from plexrl.process.memory.numa import work_near
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.device.cuda.arena import CudaArena

if TYPE_CHECKING:
    import torch

    from plexrl.statemanager.device.cuda.driver import CudaDriver

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures the work that a call starts on the device; the result starts the same work again."""


class WorkerDevice:
    """The CPU."""

    uuid = ""
    """UUID of the GPU; empty: the CPU."""
    collectives = "gloo"
    """Backends of the process group."""

    @property
    def torch_device(self) -> "torch.device":
        """Device of the worker's tensors."""
        import torch

        return torch.device("cpu")

    def make_arena(self, nbytes: int) -> WorkerArena:
        """Reserve addresses for at least `nbytes` of state, without memory."""
        return Arena(nbytes)

    def place(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """A tensor of the CPU, on the device; the copy may still be under way."""
        return tensor

    def step_capture(self) -> Capture | None:
        """Captures steps of an engine; None: they run as they are."""
        return None

    def wait(self) -> None:
        """Wait for all work of this process on the device, before another process reads its
        state."""

    def free_cached(self) -> None:
        """Return memory that the framework keeps for reuse to the device, before an offload."""

    def free_bytes(self) -> int | None:
        """Free memory of the device, as the driver reports it; None: unbounded."""
        return None

    def take_peak_bytes(self) -> int:
        """Most memory of the framework's allocator since the last call; 0: not measured. Arenas
        are not in it, because their memory is mapped from the StateManager's."""
        return 0

    def kept_bytes(self) -> int:
        """Memory that the framework's allocator has now, as of CUDA graphs; 0: not measured."""
        return 0


class GpuDevice(WorkerDevice):
    """The only GPU that this process sees."""

    collectives = "cpu:gloo,cuda:nccl"
    """NCCL for tensors on GPUs, gloo for objects and all else."""

    def __init__(self, uuid: str, driver: "CudaDriver") -> None:
        """`uuid` as NVIDIA's tools print it, such as `GPU-…`."""
        self.uuid = uuid
        self._driver = driver

    @property
    def torch_device(self) -> "torch.device":
        import torch

        return torch.device("cuda", 0)

    def make_arena(self, nbytes: int) -> WorkerArena:
        return CudaArena(self._driver, nbytes, uuid=self.uuid)

    def place(self, tensor: "torch.Tensor") -> "torch.Tensor":
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def step_capture(self) -> Capture | None:
        return CudaGraphs()

    def wait(self) -> None:
        self._driver.enter(0)
        self._driver.synchronize()

    def free_cached(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def free_bytes(self) -> int | None:
        self._driver.enter(0)
        return self._driver.memory_info()[0]

    def take_peak_bytes(self) -> int:
        import torch

        found = int(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        return found

    def kept_bytes(self) -> int:
        import torch

        return int(torch.cuda.memory_reserved())


class CudaGraphs:
    """Captures work as CUDA graphs that share the memory of their activations: one runs at a
    time, and leaves its results in memory that is not theirs."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Capture`. Work of these shapes has run before, so that libraries are ready."""
        import torch

        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process, such as NCCL's, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


CPU = WorkerDevice()


def open_device(uuid: str) -> WorkerDevice:
    """The device of this process from now on; `uuid` empty: the CPU, and no library finds a GPU. No
    CUDA call may precede. From then on the calling thread runs, and allocates host memory, on the
    NUMA node of the GPU.

    Raises:
        DeviceUnavailableError: this process cannot use that GPU.
    """
    show_only_gpu(uuid)
    if not uuid:
        return CPU
    import torch

    from plexrl.statemanager.device.cuda.bindings import BoundDriver

    driver = BoundDriver()
    # Before there is a context: its threads, and all later ones, are to stay there too.
    for address in driver.pci_addresses()[:1]:
        work_near(address)
    driver.enter(0)
    torch.cuda.set_device(0)
    return GpuDevice(uuid, driver)
