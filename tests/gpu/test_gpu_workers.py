"""A trainer and an engine on a real GPU, in memory that the StateManager lends and takes back."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gpu.replicas import Replica
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.layout.versions import Extent, Section
from plexrl.statemanager.protocol.messages import ReplicatedSection
from plexrl.wire.operations import OperationKind
from plexrl.worker.interface.backend import Backend
from plexrl.worker.state.contents.device_digest import CHUNK_ROWS, ROW_BYTES, DeviceDigests
from plexrl.worker.state.device import GpuDevice
from tests.statemanager.device.test_emulated_workers import (
    DEEPSPEED,
    ENGINE,
    MEGATRON,
    MEGATRON_MOE,
    REFERENCE,
    TRAINER,
    Rank,
    on_cpu,
)

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore")  # of the libraries, when they are imported
@pytest.mark.parametrize(
    "spec",
    [TRAINER, DEEPSPEED, MEGATRON, MEGATRON_MOE],
    ids=lambda spec: f"{spec.backend}-{spec.model.architecture}",
)
def test_a_trainer_takes_the_same_steps_as_on_the_cpu(
    node: StateManagerConfig, device: GpuDevice, spec: DeploymentSpec
) -> None:
    skip_without_library(spec)
    rank = Rank(spec, node, device)
    rank.move(OperationKind.LOAD, 0)
    rank.train()
    moved = rank.move(OperationKind.OFFLOAD, 1)
    assert moved["memory_after"]["arena_bytes"] == 0
    rank.move(OperationKind.LOAD, 1)
    rank.train()
    found = {name: value.cpu() for name, value in rank.state().items()}
    rank.close()

    def twice(backend: Backend) -> None:
        for _ in range(2):
            Rank.of(backend).train()

    # All backends agree on the CPU, and Megatron computes on the GPU wherever there is one.
    wanted = Rank.of(on_cpu(replace(spec, backend="fsdp"), twice)).state()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=1e-3), name


@pytest.mark.filterwarnings("ignore")  # of the libraries, when they are imported
@pytest.mark.parametrize(
    "spec",
    [
        replace(each, compute_dtype="bfloat16")
        for each in (TRAINER, DEEPSPEED, MEGATRON, MEGATRON_MOE)
    ],
    ids=lambda spec: f"{spec.backend}-{spec.model.architecture}",
)
def test_a_trainer_in_bfloat16_computes_after_a_switch_as_on_the_cpu(
    node: StateManagerConfig, device: GpuDevice, spec: DeploymentSpec
) -> None:
    skip_without_library(spec)
    rank = Rank(spec, node, device)
    rank.move(OperationKind.LOAD, 0)
    rank.move(OperationKind.OFFLOAD, 0)
    rank.move(OperationKind.LOAD, 0)
    exact = replace(spec, backend="fsdp", compute_dtype="float32")
    wanted = Rank.of(on_cpu(exact, lambda _: None)).logprobs()
    assert np.allclose(rank.logprobs(), wanted, atol=0.03)
    before = {name: value.clone() for name, value in rank.state().items()}
    rank.train()
    after = rank.state()
    assert not any(torch.equal(before[name], value) for name, value in after.items())
    rank.close()


def skip_without_library(spec: DeploymentSpec) -> None:
    """Skips a test whose backend is not installed."""
    if spec.backend != "fsdp":
        pytest.importorskip({"deepspeed": "deepspeed", "megatron": "megatron.core"}[spec.backend])


def test_an_engine_draws_the_same_after_a_switch(
    node: StateManagerConfig, device: GpuDevice
) -> None:
    rank = Rank(ENGINE, node, device)
    rank.move(OperationKind.LOAD, 0)
    before = rank.generate()
    rank.move(OperationKind.OFFLOAD, 0)
    rank.move(OperationKind.LOAD, 0)
    assert np.array_equal(rank.generate(), before)
    rank.close()


def test_a_rollout_draws_from_what_a_trainer_published(
    node: StateManagerConfig, device: GpuDevice
) -> None:
    trainer, engine = Rank(TRAINER, node, device), Rank(ENGINE, node, device)
    engine.move(OperationKind.LOAD, 0)
    trainer.move(OperationKind.LOAD, 0)
    for seq in (1, 2):
        trainer.train()
        trainer.move(OperationKind.PUBLISH, seq)
        report = engine.sync(seq, node.listen, delta=seq == 2)
        assert report["way"] == ("delta" if seq == 2 else "full")
        drawn = engine.state()
        for name, value in trainer.state().items():
            assert name not in drawn or torch.equal(drawn[name], value), name
        assert np.isfinite(engine.generate()).all()
    trainer.close()
    engine.close()


@pytest.mark.parametrize("layers_on_device", [None, 1], ids=["all layers", "layers in host memory"])
def test_a_reference_computes_as_on_the_cpu(
    node: StateManagerConfig, device: GpuDevice, layers_on_device: int | None
) -> None:
    spec = replace(REFERENCE, layers_on_device=layers_on_device)
    rank = Rank(spec, node, device)
    rank.move(OperationKind.LOAD, 0)
    rank.move(OperationKind.OFFLOAD, 0)
    rank.move(OperationKind.LOAD, 0)
    wanted = Rank.of(on_cpu(spec, lambda _: None)).logprobs()
    assert np.allclose(rank.logprobs(), wanted, atol=1e-3)
    rank.close()


@pytest.fixture(params=["highest", "high"])
def float32_precision(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a framework lets a GPU multiply float32 in: "high" is TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("float32_precision")
def test_a_digest_is_the_same_as_on_the_cpu(device: GpuDevice) -> None:
    nbytes = 3 * CHUNK_ROWS * ROW_BYTES + 12_345
    memory = torch.randint(256, (nbytes,), dtype=torch.uint8)
    extents = [
        Extent(arena_offset=start, file_offset=start, nbytes=end - start)
        for start, end in ((0, 5_000_001), (5_000_192, nbytes))
    ]
    section = Section(start=0, nbytes=nbytes, share_key="key")
    wanted = [ReplicatedSection(section=section, extents=tuple(extents))]
    found = DeviceDigests().of_sections(memory.to(device.torch_device), wanted)
    assert found == DeviceDigests().of_sections(memory, wanted)


def test_two_replicas_are_stored_once_and_loaded_by_both(
    node: StateManagerConfig, device: GpuDevice
) -> None:
    ranks = [Replica(node, device, rank, 64 << 20) for rank in range(2)]
    for each in ranks:
        each.move(OperationKind.LOAD, 0)
        each.fill(1)
    wanted = ranks[0].common.clone()
    for kind in (OperationKind.OFFLOAD, OperationKind.LOAD):
        for each in ranks:
            each.move(kind, 1)
    for each in ranks:
        assert torch.equal(each.common, wanted)
        each.close()
