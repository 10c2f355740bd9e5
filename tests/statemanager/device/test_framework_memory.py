"""Memory that a worker's framework allocates on an emulated GPU before its arena is reserved."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from plexrl.errors import DeviceMemoryFullError
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.wire.operations import OperationKind
from plexrl.worker.interface.backend import Backend, BackendCall, BackendResult
from plexrl.worker.state.arena_tensors import ArenaLayout, whole_box
from tests.statemanager.device.test_emulated_workers import ENGINE, MIB, TRAINER, Daemon, Rank
from tests.statemanager.emulated_cuda import EmulatedCuda
from tests.statemanager.emulated_gpu import EmulatedGpu


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Its device has 16 MiB."""
    with tempfile.TemporaryDirectory(prefix="plexrl-", dir="/dev/shm") as host_dir:
        made = Daemon(tmp_path, Path(host_dir))
        yield made
        made.stop()


class AllocatingGpu(EmulatedGpu):
    """A GPU whose framework has an allocator."""

    def __init__(self, driver: EmulatedCuda) -> None:
        super().__init__(driver)
        self._sizes: dict[int, int] = {}
        self._peak = 0

    def allocate(self, nbytes: int) -> int:
        handle = self.driver.create(0, nbytes)
        self._sizes[handle] = nbytes
        self._peak = max(self._peak, self.kept_bytes())
        return handle

    def release(self, handle: int) -> None:
        self.driver.release(handle)
        del self._sizes[handle]

    def take_peak_bytes(self) -> int:
        peak, self._peak = self._peak, self.kept_bytes()
        return peak

    def kept_bytes(self) -> int:
        return sum(self._sizes.values())


class AllocatingBackend(Backend):
    """Its framework allocates the weights before they get an arena, and a cache, as vLLM does."""

    def __init__(self, device: AllocatingGpu, weights_bytes: int, cache_bytes: int) -> None:
        self._device = device
        self._weights_bytes, self._cache_bytes = weights_bytes, cache_bytes
        self._cache: int | None = None

    @property
    def lay_out_bytes(self) -> int:
        return self._weights_bytes + self._cache_bytes

    def lay_out(self) -> None:
        # For a communication library.
        self._device.driver.create(0, MIB)
        weights = self._device.allocate(self._weights_bytes)
        self._cache = self._device.allocate(self._cache_bytes)
        self._device.release(weights)
        layout = ArenaLayout()
        layout.add(
            StateKey(part=StatePart.PARAMETER, name="w"), whole_box((self._weights_bytes,)), "U8"
        )
        self._slices = tuple(layout.slices)
        self.arena = self._device.make_arena(layout.nbytes)

    def slices(self) -> tuple[StateSlice, ...]:
        return self._slices

    def before_offload(self) -> None:
        assert self._cache is not None
        self._device.release(self._cache)
        self._cache = None

    def run(self, call: BackendCall) -> BackendResult:
        """Fill the cache."""
        del call
        if self._cache is None:
            self._cache = self._device.allocate(self._cache_bytes)
        return BackendResult()

    def gather(self, value: str) -> list[str]:
        return [value]


def test_a_framework_that_allocates_before_its_arena_finds_memory_and_is_counted_once(
    daemon: Daemon,
) -> None:
    neighbour = AllocatingGpu(daemon.another_driver())
    other = Rank(
        TRAINER, daemon.config, neighbour, backend=AllocatingBackend(neighbour, 7 * MIB, MIB)
    )
    other.move(OperationKind.LOAD, 0)
    other.move(OperationKind.OFFLOAD, 1)
    assert daemon.devices.usage(0).idle_bytes >= 7 * MIB
    device = AllocatingGpu(daemon.another_driver())
    rank = Rank(ENGINE, daemon.config, device, backend=AllocatingBackend(device, 5 * MIB, 6 * MIB))
    rank.move(OperationKind.LOAD, 0)
    rank.take_peak_bytes()
    for _ in range(2):
        rank.move(OperationKind.OFFLOAD, 1)
        rank.move(OperationKind.LOAD, 1)
        rank.run(OperationKind.GENERATE, None)
        assert rank.take_peak_bytes() == 7 * MIB, "the cache and what is outside of the allocator"
    with pytest.raises(DeviceMemoryFullError, match="'job/rollout' has not offloaded"):
        other.move(OperationKind.LOAD, 1)
    rank.close()
    other.close()


class OneOfTwo(AllocatingBackend):
    """Its other rank may be refused."""

    is_refused, is_laid_out = True, False

    def lay_out(self) -> None:
        self.is_laid_out = True
        super().lay_out()

    def gather_at_start(self, value: str) -> list[str]:
        refusal = {"error": DeviceMemoryFullError("rank 1 needs more").to_wire()}
        return [value, json.dumps(refusal) if self.is_refused else value]


def test_a_framework_starts_only_if_there_is_memory_on_all_ranks(daemon: Daemon) -> None:
    device = AllocatingGpu(daemon.another_driver())
    backend = OneOfTwo(device, 5 * MIB, 6 * MIB)
    rank = Rank(ENGINE, daemon.config, device, backend=backend)
    with pytest.raises(DeviceMemoryFullError, match="rank 1 needs more"):
        rank.move(OperationKind.LOAD, 0)
    assert not backend.is_laid_out
    backend.is_refused = False
    rank.move(OperationKind.LOAD, 0)
    assert backend.is_laid_out
    rank.close()
