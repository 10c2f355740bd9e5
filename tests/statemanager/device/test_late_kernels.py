"""A worker's kernels run after the call that started them: other processes must not read or write
the memory before they have ended."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.lora import LoraSpec
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.wire.operations import OperationKind
from plexrl.worker.interface.backend import SharedWeights
from plexrl.worker.training.backend import TrainingBackend
from plexrl.worker.training.fsdp.model import FsdpModel
from plexrl.worker.training.model import TrainingRank
from tests.statemanager.device.test_emulated_workers import TRAINER, Daemon, Rank
from tests.statemanager.emulated_cuda import EmulatedCuda
from tests.statemanager.emulated_gpu import EmulatedArena, EmulatedGpu


class LateArena(EmulatedArena):
    """Its kernels have ended before the memory is returned."""

    def detach(self) -> None:
        assert isinstance(self.driver, EmulatedCuda)
        assert not self.driver.is_busy
        super().detach()


class LateGpu(EmulatedGpu):
    """A GPU with a kernel that runs when it is waited for."""

    def make_arena(self, nbytes: int) -> LateArena:
        return LateArena(self.driver, nbytes, uuid=self.uuid)

    def write_zeros(self, arena: WorkerArena) -> None:
        """Start to write zeros to the whole arena."""
        assert isinstance(arena, LateArena)
        self.driver.set_zero(arena.address, arena.nbytes, self.driver.create_stream())


class LateWeights:
    """Frozen weights whose last kernel runs after `fill`."""

    def __init__(self, weights: SharedWeights, gpu: LateGpu) -> None:
        self._weights, self._gpu = weights, gpu
        self.arena, self.content = weights.arena, weights.content

    def fill(self) -> None:
        self._weights.fill()
        self._gpu.write_zeros(self.arena)


class LateStart(TrainingBackend):
    """Its last kernel runs after `materialise`."""

    def __init__(self, spec: DeploymentSpec, gpu: LateGpu) -> None:
        place = TrainingRank(spec=spec, rank=0, device=gpu)
        super().__init__(place, FsdpModel(place), Path("/nowhere"))
        self._gpu = gpu

    @property
    def frozen_base(self) -> SharedWeights | None:
        base = super().frozen_base
        return None if base is None else LateWeights(base, self._gpu)

    def materialise(self) -> None:
        super().materialise()
        self._gpu.write_zeros(self.arena)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="plexrl-", dir="/dev/shm") as host_dir:
        made = Daemon(tmp_path, Path(host_dir))
        yield made
        made.stop()


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_version_is_loaded_after_the_last_kernel_of_the_start(daemon: Daemon) -> None:
    first = Rank(TRAINER, daemon.config, EmulatedGpu(daemon.another_driver()))
    first.move(OperationKind.LOAD, 0)
    first.train()
    stored = {name: value.clone() for name, value in first.state().items()}
    first.move(OperationKind.OFFLOAD, 1)
    first.close()
    gpu = LateGpu(daemon.another_driver())
    second = Rank(TRAINER, daemon.config, gpu, backend=LateStart(TRAINER, gpu))
    second.move(OperationKind.LOAD, 1)
    gpu.wait()
    found = second.state()
    assert all(torch.equal(found[name], value) for name, value in stored.items())
    second.close()


def test_shared_weights_are_lent_after_the_last_kernel_that_fills_them(daemon: Daemon) -> None:
    spec = replace(TRAINER, lora=LoraSpec(rank=2))
    gpu = LateGpu(daemon.another_driver())
    rank = Rank(spec, daemon.config, gpu, backend=LateStart(spec, gpu))
    rank.move(OperationKind.LOAD, 0)
    rank.close()
