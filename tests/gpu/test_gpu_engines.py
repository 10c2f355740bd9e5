"""The built-in engine on real GPUs: its cache in the arena, CUDA graphs, tensor parallelism."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from plexrl.statemanager.config import StateManagerConfig
from plexrl.wire.operations import OperationKind
from plexrl.worker.state.device import Capture, GpuDevice
from tests.gpu import tensor_ranks
from tests.statemanager.device.test_emulated_workers import ENGINE, TRAINER, Rank, on_cpu
from tests.statemanager.device_rigs import real_driver

pytestmark = pytest.mark.gpu


class CountingGpu(GpuDevice):
    """Counts graphs and their replays."""

    captured = replayed = 0

    def step_capture(self) -> Capture:
        made = super().step_capture()
        assert made is not None

        def capture(work: Callable[[], None]) -> Callable[[], None]:
            launch = made(work)
            self.captured += 1

            def replay() -> None:
                self.replayed += 1
                launch()

            return replay

        return capture


@pytest.fixture
def counting(device: GpuDevice) -> CountingGpu:
    return CountingGpu(device.uuid, real_driver())


def test_graphs_outlive_an_offload_and_draw_what_steps_without_draw(
    node: StateManagerConfig, counting: CountingGpu
) -> None:
    rank = Rank(ENGINE, node, counting)
    rank.move(OperationKind.LOAD, 0)
    drawn = [rank.generate(), rank.generate(), rank.generate()]
    captured, replayed = counting.captured, counting.replayed
    assert captured > 0
    assert replayed > captured
    rank.move(OperationKind.OFFLOAD, 0)
    # What another tenant leaves in the memory must not matter.
    other = torch.full((256 << 20,), 255, dtype=torch.uint8, device=counting.torch_device)
    del other
    counting.free_cached()
    rank.move(OperationKind.LOAD, 0)
    drawn.append(rank.generate())
    assert counting.captured == captured
    assert counting.replayed > replayed
    rank.close()
    wanted = Rank.of(on_cpu(ENGINE, lambda _: None)).generate()
    assert all(np.allclose(each, wanted, atol=1e-3) for each in drawn)


def test_graphs_use_the_weights_of_the_last_sync(
    node: StateManagerConfig, counting: CountingGpu
) -> None:
    plain = GpuDevice(counting.uuid, real_driver())
    trainer = Rank(TRAINER, node, plain)
    trainer.move(OperationKind.LOAD, 0)
    trainer.train()
    trainer.move(OperationKind.PUBLISH, 1)
    trainer.move(OperationKind.OFFLOAD, 1)
    drawn = {}
    for graphs in (True, False):
        engine = Rank(replace(ENGINE, cuda_graphs=graphs), node, counting)
        engine.move(OperationKind.LOAD, 0)
        before = [engine.generate() for _ in range(3)]
        captured, replayed = counting.captured, counting.replayed
        engine.sync(1, node.listen, delta=False)
        drawn[graphs] = engine.generate()
        assert counting.captured == captured
        assert (counting.replayed > replayed) == graphs
        assert not np.allclose(drawn[graphs], before[-1], atol=1e-4)
        engine.close()
    trainer.close()
    assert np.allclose(drawn[True], drawn[False], atol=1e-3)


def test_an_offload_frees_the_cache_and_copies_none_of_it(
    node: StateManagerConfig, device: GpuDevice
) -> None:
    cache = 2 << 30
    rank = Rank(replace(ENGINE, kv_cache_bytes=cache), node, device)
    rank.move(OperationKind.LOAD, 0)
    rank.generate()
    assert rank.backend.arena.nbytes > cache
    moved = rank.move(OperationKind.OFFLOAD, 1)
    assert moved["bytes_moved"] < 64 << 20
    assert moved["memory_after"]["arena_bytes"] == 0
    assert torch.cuda.memory_reserved() < cache // 8
    rank.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize("graphs", [True, False])
def test_two_ranks_draw_over_nccl_what_one_draws(
    node: StateManagerConfig, tmp_path: Path, graphs: bool
) -> None:
    uuids, spec = real_driver().uuids()[:2], replace(ENGINE, cuda_graphs=graphs)
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        tensor_ranks.run,
        args=(uuids, node, str(tmp_path), spec.to_json()),
        nprocs=2,
        start_method="spawn",
    )
    wanted = Rank.of(on_cpu(ENGINE, lambda _: None)).generate()
    for found in np.load(tmp_path / "drawn.npy"):
        assert np.allclose(found, wanted, atol=1e-3)
