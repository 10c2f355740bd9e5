"""A trainer and an engine on an emulated GPU: register, offload, load, a crash, adoption.

Torch computes on the CPU, in memory that the daemon lent over the emulated driver, where unmapped
memory cannot be accessed. What each does must not differ by a bit from the same on the CPU.
"""

import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from plexrl.errors import DeviceMemoryFullError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.memory.state_terms import state_terms
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.daemon.server import DaemonServer
from plexrl.statemanager.device.backend import DeviceKind
from plexrl.statemanager.device.cuda.device import CudaDevices
from plexrl.statemanager.layout.keys import StatePart
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import Claims, TicketRole
from plexrl.statemanager.store.store import Store
from plexrl.wire.messages import RankShare
from plexrl.wire.operations import (
    ForwardBackwardParams,
    ForwardParams,
    GenerateParams,
    OperationKind,
    SamplingParams,
    SyncWeightsParams,
)
from plexrl.worker.interface.backend import Backend, BackendCall
from plexrl.worker.process.backend_factory import make_backend
from plexrl.worker.state.arena_tensors import view
from plexrl.worker.state.device import CPU, WorkerDevice
from plexrl.worker.state.state_mover import StateMover
from tests.statemanager.emulated_cuda import GRANULARITY, EmulatedCuda
from tests.statemanager.emulated_gpu import EmulatedGpu
from tests.wire.runs import make_run, move_of
from tests.worker.training.cases import QWEN2, QWEN3_MOE
from tests.worker.training.ranks import ADAM, LOSS, batch

KIB, MIB = 1 << 10, 1 << 20
TRAINER = DeploymentSpec(model=QWEN2, kind="train", backend="fsdp", workers=1)
DEEPSPEED = replace(TRAINER, backend="deepspeed")
MEGATRON = replace(TRAINER, backend="megatron")
DEEPSPEED_BF16 = replace(DEEPSPEED, compute_dtype="bfloat16")
MEGATRON_BF16 = replace(MEGATRON, compute_dtype="bfloat16")
MEGATRON_MOE = replace(MEGATRON, model=QWEN3_MOE)
ENGINE = DeploymentSpec(
    model=QWEN2, kind="rollout", backend="torch", workers=1, max_sequence_tokens=16
)
REFERENCE = DeploymentSpec(model=QWEN2, kind="forward", backend="torch", workers=1)


class Daemon:
    """A StateManager in this process, which can be restarted."""

    def __init__(self, folder: Path, host_dir: Path) -> None:
        self.name = f"gpu-{uuid.uuid4().hex[:8]}"
        self.driver = self.another_driver()
        (host_dir / "host").mkdir(mode=0o700)
        self.config = StateManagerConfig(
            node="gpu",
            listen=str(host_dir / "s.sock"),
            host_dir=str(host_dir / "host"),
            host_bytes=64 * MIB,
            nvme_dir=str(folder / "nvme"),
            nvme_bytes=64 * MIB,
            device=DeviceKind.CUDA,
        )
        self.start()

    def another_driver(self) -> EmulatedCuda:
        """The driver of another process."""
        driver = EmulatedCuda(self.name, device_bytes=16 * MIB)
        driver.enter(0)
        return driver

    def start(self) -> None:
        devices = self.devices = CudaDevices(self.driver)
        self._store = Store(
            self.config, on_map=devices.register_host, on_unmap=devices.unregister_host
        )
        self._server = DaemonServer(self.config, self._store, devices)
        self._thread = threading.Thread(target=self._server.serve)
        self._thread.start()

    def stop(self) -> None:
        self._server.close()
        self._thread.join()
        self._store.close()
        Path(self.config.listen).unlink()

    def taken_bytes(self) -> int:
        """Device memory that is not kept for the next load."""
        return self.driver.taken_bytes(0) - self.devices.usage(0).idle_bytes


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="plexrl-", dir="/dev/shm") as host_dir:
        made = Daemon(tmp_path, Path(host_dir))
        yield made
        made.stop()


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("current_device", "current_stream", "synchronize"):
        # Megatron's shims replace these for a whole process.
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if "megatron.core.parallel_state" in sys.modules:
        sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
    dist.destroy_process_group()


class Rank:
    """A backend on a device, and its moves."""

    def __init__(
        self,
        spec: DeploymentSpec,
        node: StateManagerConfig,
        device: WorkerDevice,
        rank: int = 0,
        *,
        backend: Backend | None = None,
    ) -> None:
        """`backend`: absent: that of the spec."""
        count = spec.layout.world_size
        self.backend = backend or make_backend(spec, rank, count, Path("/nowhere"), device)
        claims = Claims(
            role=TicketRole.WORKER,
            job="job",
            deployment=f"job/{spec.kind}",
            rank=rank,
            world_size=count,
        )
        key = read_ticket_key(node.ticket_key_path)
        self._client = StateManagerClient(
            node.listen,
            deployment=claims.deployment,
            rank=rank,
            world_size=count,
            ticket=key.mint(claims),
        )
        self._mover = StateMover(self.backend, self._client, f"group-{spec.kind}", device)

    @classmethod
    def of(cls, backend: Backend) -> "Rank":
        """A backend that is never moved."""
        rank = object.__new__(cls)
        rank.backend = backend
        return rank

    def move(self, kind: OperationKind, seq: int) -> dict[str, Any]:
        return self._mover.move(move_of(kind, seq))

    def take_peak_bytes(self) -> int:
        return self._mover.take_peak_bytes()

    def sync(self, seq: int, source: str, *, delta: bool) -> dict[str, Any]:
        """Pull what the trainer published as `seq`."""
        command = make_run(
            OperationKind.SYNC_WEIGHTS,
            seq=seq,
            source="job/train",
            sources=(source,),
            source_seq=seq,
            trainer_step=seq,
            params=SyncWeightsParams(source="job/train", delta=delta),
        )
        return self._mover.move(command)

    def run(self, kind: OperationKind, params: Any, **share: Any) -> None:
        arrays = batch(3) if kind == OperationKind.FORWARD_BACKWARD else {}
        self.backend.run(_call(kind, params, arrays, **share))

    def train(self) -> None:
        params = ForwardBackwardParams(loss=LOSS)
        self.run(OperationKind.FORWARD_BACKWARD, params, micro_batches=2, denominator=9.0)
        self.run(OperationKind.OPTIM_STEP, ADAM)

    def submit(self) -> None:
        """Begin to generate six tokens."""
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, seed=1)
        params = GenerateParams(samples_per_prompt=1, sampling=sampling)
        arrays = {"tokens": np.array([3, 4, 5], np.int32), "lengths": np.array([3], np.int32)}
        backend: Any = self.backend
        backend.submit(_call(OperationKind.GENERATE, params, arrays), None)

    def step(self) -> np.ndarray[Any, Any] | None:
        """Draw one token; returns the log-probabilities with the last one."""
        backend: Any = self.backend
        for _, result in backend.step():
            return np.asarray(result.arrays["logprobs"])
        return None

    def generate(self) -> np.ndarray[Any, Any]:
        self.submit()
        while True:
            drawn = self.step()
            if drawn is not None:
                return drawn

    def stats(self) -> Any:
        backend: Any = self.backend
        return backend.stats()

    def logprobs(self) -> np.ndarray[Any, Any]:
        arrays = {name: batch(3)[name] for name in ("tokens", "lengths")}
        call = _call(OperationKind.FORWARD, ForwardParams(), arrays, micro_batches=2)
        return np.asarray(self.backend.run(call).arrays["logprobs"])

    def state(self) -> dict[str, torch.Tensor]:
        """Whole tensors, which a backend may keep in several boxes."""
        found: dict[str, torch.Tensor] = {}
        for piece in self.backend.slices():
            if piece.key.part == StatePart.GRADIENT:
                continue
            value, name = view(self.backend.arena, piece), f"{piece.key.part}/{piece.key.name}"
            whole = found.setdefault(name, value.new_full(piece.global_shape, torch.nan))
            ranges = zip(piece.offset, piece.shape, strict=True)
            whole[tuple(slice(first, first + extent) for first, extent in ranges)] = value
        return found

    def close(self) -> None:
        self._client.close()
        self.backend.arena.close()


def _call(kind: OperationKind, params: Any, arrays: Any, **share: Any) -> BackendCall:
    return BackendCall(
        operation="op", kind=kind, params=params, share=RankShare(**share), arrays=arrays, seq=1
    )


def on_cpu(spec: DeploymentSpec, run: Callable[[Backend], None]) -> Backend:
    backend = make_backend(spec, 0, 1, Path("/nowhere"), CPU)
    backend.lay_out()
    backend.materialise()
    run(backend)
    return backend


@pytest.mark.filterwarnings("ignore")  # of megatron-core, when it is imported
@pytest.mark.parametrize(
    "spec",
    [TRAINER, DEEPSPEED, DEEPSPEED_BF16, MEGATRON, MEGATRON_BF16, MEGATRON_MOE],
    ids=lambda spec: f"{spec.backend}-{spec.model.architecture}-{spec.compute_dtype}",
)
def test_a_trainer_computes_in_memory_that_comes_and_goes(
    daemon: Daemon, spec: DeploymentSpec
) -> None:
    rank = Rank(spec, daemon.config, EmulatedGpu(daemon.another_driver()))
    free = daemon.driver.memory_info()[0]
    rank.move(OperationKind.LOAD, 0)
    rank.train()
    moved = rank.move(OperationKind.OFFLOAD, 1)
    assert daemon.taken_bytes() == 0
    idle = daemon.devices.usage(0).idle_bytes
    assert idle > 0
    assert moved["memory_after"]["device_free_bytes"] == free - idle
    rank.move(OperationKind.LOAD, 1)
    rank.train()
    daemon.stop()
    daemon.start()
    rank.move(OperationKind.OFFLOAD, 2)
    assert daemon.taken_bytes() == 0
    rank.move(OperationKind.LOAD, 2)
    found = rank.state()
    rank.close()

    def twice(backend: Backend) -> None:
        for _ in range(2):
            Rank.of(backend).train()

    wanted = Rank.of(on_cpu(spec, twice)).state()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


class BusyGpu(EmulatedGpu):
    """A GPU on which torch's allocator needs the whole device, and keeps some of it."""

    kept = 0

    def take_peak_bytes(self) -> int:
        return self.driver.memory_info()[1]

    def kept_bytes(self) -> int:
        return self.kept


def test_a_load_needs_free_memory_for_what_the_framework_allocated_before(daemon: Daemon) -> None:
    device = BusyGpu(daemon.another_driver())
    rank = Rank(TRAINER, daemon.config, device)
    rank.move(OperationKind.LOAD, 0)
    rank.take_peak_bytes()
    rank.move(OperationKind.OFFLOAD, 1)
    with pytest.raises(DeviceMemoryFullError, match="rank 0 of 'job/train' needs"):
        rank.move(OperationKind.LOAD, 1)
    assert daemon.taken_bytes() == 0, "nothing was lent"
    device.kept = device.take_peak_bytes()
    rank.move(OperationKind.LOAD, 1)
    rank.train()
    rank.close()


def test_an_engine_draws_from_memory_that_comes_and_goes(daemon: Daemon) -> None:
    rank = Rank(ENGINE, daemon.config, EmulatedGpu(daemon.another_driver()))
    rank.move(OperationKind.LOAD, 0)
    drawn = [rank.generate()]
    rank.move(OperationKind.OFFLOAD, 0)
    assert daemon.taken_bytes() == 0
    rank.move(OperationKind.LOAD, 0)
    drawn.append(rank.generate())
    daemon.stop()
    daemon.start()
    rank.move(OperationKind.OFFLOAD, 0)
    rank.move(OperationKind.LOAD, 0)
    drawn.append(rank.generate())
    rank.close()
    wanted = Rank.of(on_cpu(ENGINE, lambda _: None)).generate()
    assert all(np.array_equal(each, wanted) for each in drawn)


def test_a_kv_cache_comes_and_goes_with_the_weights_and_is_never_copied(daemon: Daemon) -> None:
    """The cache is many times as large as the weights."""
    spec = replace(ENGINE, kv_cache_bytes=12 * MIB)
    terms = state_terms(spec)
    rank = Rank(spec, daemon.config, EmulatedGpu(daemon.another_driver()))
    rank.move(OperationKind.LOAD, 0)
    assert daemon.taken_bytes() == rank.backend.arena.nbytes
    needed = terms.weights + terms.kv_cache
    assert needed <= rank.backend.arena.nbytes <= needed + GRANULARITY + 64 * KIB
    wanted = rank.generate()
    moved = rank.move(OperationKind.OFFLOAD, 1)
    assert daemon.taken_bytes() == 0
    assert moved["bytes_moved"] <= terms.weights + 64 * KIB
    loaded = rank.move(OperationKind.LOAD, 1)
    assert loaded["bytes_moved"] == moved["bytes_moved"]
    assert np.array_equal(rank.generate(), wanted)
    rank.close()


def test_captured_steps_outlive_an_offload(daemon: Daemon) -> None:
    device = EmulatedGpu(daemon.another_driver())
    rank = Rank(ENGINE, daemon.config, device)
    rank.move(OperationKind.LOAD, 0)
    drawn = [rank.generate(), rank.generate()]
    captured, replayed = device.capture.captured, device.capture.replayed
    assert captured > 0
    rank.move(OperationKind.OFFLOAD, 0)
    rank.move(OperationKind.LOAD, 0)
    drawn.append(rank.generate())
    assert device.capture.captured == captured
    assert device.capture.replayed > replayed
    rank.close()
    wanted = Rank.of(on_cpu(ENGINE, lambda _: None)).generate()
    assert all(np.array_equal(each, wanted) for each in drawn)


def test_steps_are_captured_only_if_the_deployment_wants_it(daemon: Daemon) -> None:
    device = EmulatedGpu(daemon.another_driver())
    rank = Rank(replace(ENGINE, cuda_graphs=False), daemon.config, device)
    rank.move(OperationKind.LOAD, 0)
    for _ in range(3):
        rank.generate()
    assert device.capture.captured == 0
    rank.close()


def test_generations_that_an_offload_interrupts_are_computed_again(daemon: Daemon) -> None:
    rank = Rank(ENGINE, daemon.config, EmulatedGpu(daemon.another_driver()))
    rank.move(OperationKind.LOAD, 0)
    wanted = rank.generate()
    rank.submit()
    for _ in range(3):
        assert rank.step() is None
    rank.move(OperationKind.OFFLOAD, 0)
    rank.move(OperationKind.LOAD, 0)
    drawn = None
    while drawn is None:
        drawn = rank.step()
    assert np.array_equal(drawn, wanted)
    assert rank.stats().tokens_recomputed == 5
    rank.close()


def test_a_rollout_draws_from_what_a_trainer_on_the_same_gpu_published(daemon: Daemon) -> None:
    """Generate, train, sync, generate: two rounds, the second one by a delta."""
    device = EmulatedGpu(daemon.another_driver())
    trainer = Rank(TRAINER, daemon.config, device)
    engine = Rank(ENGINE, daemon.config, device)
    engine.move(OperationKind.LOAD, 0)
    drawn = [engine.generate()]
    for seq in (1, 2):
        if seq == 1:
            engine.move(OperationKind.OFFLOAD, 0)
        trainer.move(OperationKind.LOAD, seq - 1)
        trainer.train()
        trainer.move(OperationKind.PUBLISH, seq)
        trainer.move(OperationKind.OFFLOAD, seq)
        if seq == 1:
            engine.move(OperationKind.LOAD, 0)
        report = engine.sync(seq, daemon.config.listen, delta=seq == 2)
        assert report["way"] == ("delta" if seq == 2 else "full")
        drawn.append(engine.generate())
    trainer.close()
    engine.close()
    assert daemon.taken_bytes() == 0

    learner = on_cpu(TRAINER, lambda _: None)
    drawing = on_cpu(ENGINE, lambda _: None)
    wanted = [Rank.of(drawing).generate()]
    for seq in (1, 2):
        Rank.of(learner).train()
        weights = {
            piece.key.name: view(learner.arena, piece)
            for piece in learner.slices()
            if piece.key.part == StatePart.PARAMETER
        }
        for piece in drawing.slices():
            view(drawing.arena, piece).copy_(weights[piece.key.name])
        drawing.after_pull(seq=seq, trainer_step=seq)
        wanted.append(Rank.of(drawing).generate())
    assert not np.array_equal(drawn[0], drawn[1])
    assert all(np.array_equal(*pair) for pair in zip(drawn, wanted, strict=True))


@pytest.mark.parametrize("layers_on_device", [None, 1], ids=["all layers", "layers in host memory"])
def test_a_reference_computes_from_memory_that_comes_and_goes(
    daemon: Daemon, layers_on_device: int | None
) -> None:
    spec = replace(REFERENCE, layers_on_device=layers_on_device)
    rank = Rank(spec, daemon.config, EmulatedGpu(daemon.another_driver()))
    rank.move(OperationKind.LOAD, 0)
    found = [rank.logprobs()]
    rank.move(OperationKind.OFFLOAD, 0)
    assert daemon.taken_bytes() == 0
    rank.move(OperationKind.LOAD, 0)
    found.append(rank.logprobs())
    rank.close()
    wanted = Rank.of(on_cpu(spec, lambda _: None)).logprobs()
    assert all(np.array_equal(each, wanted) for each in found)
