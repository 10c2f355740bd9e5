"""Properties of DeepSpeed that the conformance suite does not cover."""

import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from plexrl.errors import InvalidRequestError
from plexrl.wire.operations import AdamParams
from plexrl.worker.state.host.optimizer import step_of_torch
from plexrl.worker.training.deepspeed import DeepSpeedModel
from plexrl.worker.training.deepspeed.cpu_adam import CpuAdam
from plexrl.worker.training.model import TrainingRank
from tests.worker.training.cases import Case
from tests.worker.training.compiling import compiles
from tests.worker.training.deepspeed import deepspeed_ranks as ranks


def test_a_node_without_deepspeed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "plexrl.worker.training.deepspeed.zero", raising=False)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    model = DeepSpeedModel(TrainingRank(spec=Case(backend="deepspeed").spec, rank=0))
    with pytest.raises(InvalidRequestError, match=r"'plexrl\[deepspeed\]'"):
        model.lay_out()


def test_free_memory_of_a_gpu_that_is_visible_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    from plexrl.worker.training.deepspeed.zero import OnlyGpu

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5c8f2d10-0000-0000-0000-000000000000")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5, 9))
    assert OnlyGpu().available_memory() == 5


def test_zero_needs_no_compiler_and_an_offload_frees_what_is_derived(tmp_path: Path) -> None:
    mp.start_processes(  # type: ignore[no-untyped-call, attr-defined]
        ranks.without_a_compiler, args=(str(tmp_path),), start_method="forkserver"
    )
    assert (tmp_path / "store").exists()


@pytest.fixture(scope="module")
def cpu_adam() -> CpuAdam:
    return CpuAdam()


class _Optimizer:
    """One tensor's state."""

    def __init__(self, elements: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.parameter = torch.randn(elements, generator=generator)
        self.gradient = torch.randn(elements, generator=generator)
        self.moments = (torch.zeros(elements), torch.zeros(elements))

    def chunk(self, first: int, end: int) -> tuple[torch.Tensor, ...]:
        return tuple(each[first:end] for each in (self.parameter, self.gradient, *self.moments))


PARAMS = AdamParams(learning_rate=1e-2, weight_decay=0.1)
ELEMENTS = 4096 + 48


@compiles
def test_cpu_adam_is_adamw(cpu_adam: CpuAdam) -> None:
    found, wanted = _Optimizer(ELEMENTS), _Optimizer(ELEMENTS)
    for count in range(1, 6):
        for update, each in ((cpu_adam.update, found), (step_of_torch, wanted)):
            update(PARAMS, torch.tensor(float(count)), *each.chunk(0, ELEMENTS))
    assert torch.allclose(found.parameter, wanted.parameter, rtol=1e-5, atol=1e-7)
    for one, other in zip(found.moments, wanted.moments, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-9)


@compiles
def test_cpu_adams_bits_do_not_depend_on_what_it_did_before(cpu_adam: CpuAdam) -> None:
    """Neither on the steps that this process has made, nor on how they were cut into chunks."""
    calm, disturbed, other = (_Optimizer(ELEMENTS) for _ in range(3))
    for count in range(1, 9):
        number = torch.tensor(float(count))
        cpu_adam.update(PARAMS, number, *calm.chunk(0, ELEMENTS))
    for count in range(1, 9):
        number = torch.tensor(float(count))
        kernel = CpuAdam()
        kernel.update(PARAMS, torch.tensor(100.0 * count), *other.chunk(0, ELEMENTS))
        for first, end in ((0, 16), (16, 2048), (2048, ELEMENTS)):
            kernel.update(PARAMS, number, *disturbed.chunk(first, end))
    assert torch.equal(calm.parameter, disturbed.parameter)
    for one, another in zip(calm.moments, disturbed.moments, strict=True):
        assert torch.equal(one, another)


@compiles
def test_cpu_adam_outlives_a_worker_that_was_killed_while_it_compiled() -> None:
    context = mp.spawn(ranks.after_a_killed_compilation, join=False)  # type: ignore[no-untyped-call, attr-defined]
    try:
        assert context.join(1500), "it waits for a lock without a holder"
    finally:
        context.processes[0].kill()
