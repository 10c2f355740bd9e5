"""vLLM on an emulated GPU: its weights in memory that comes and goes, its cache freed."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plexrl.errors import DeviceMemoryFullError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.memory.device_memory import device_memory
from plexrl.model.memory.state_terms import state_terms
from plexrl.model.spec import tiny_qwen2
from plexrl.wire.operations import OperationKind
from tests.statemanager.device.test_emulated_workers import Daemon, Rank
from tests.statemanager.emulated_cuda import GRANULARITY
from tests.statemanager.emulated_gpu import EmulatedGpu
from tests.worker.rollout.vllm.backends import MARKS, deployment
from tests.worker.training.cases import QWEN2

pytestmark = MARKS
SPEC = deployment(model=tiny_qwen2(QWEN2.vocabulary, seed=2, hidden=128))
NEEDED = sum(term.nbytes for term in device_memory(SPEC).terms if not term.stays)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Its device has 16 MiB."""
    with tempfile.TemporaryDirectory(prefix="plexrl-", dir="/dev/shm") as host_dir:
        made = Daemon(tmp_path, Path(host_dir))
        yield made
        made.stop()


def test_vllm_draws_from_memory_that_comes_and_goes(daemon: Daemon) -> None:
    """Load, offload, a restart of the daemon that adopts the weights, a sync; torch on the CPU is
    in memory of the emulated driver, which no access survives without a mapping."""
    device = EmulatedGpu(daemon.another_driver())
    rank = Rank(SPEC, daemon.config, device)
    backend: Any = rank.backend
    spare = daemon.driver.memory_info()[0] - NEEDED
    taken = device.driver.create(0, (spare // GRANULARITY + 1) * GRANULARITY)
    with pytest.raises(DeviceMemoryFullError, match="rank 0 of 'job/rollout' needs"):
        rank.move(OperationKind.LOAD, 0)
    device.driver.release(taken)
    rank.move(OperationKind.LOAD, 0)
    assert daemon.taken_bytes() == rank.backend.arena.nbytes
    drawn = [rank.generate()]
    assert backend.engine.weights.bytes_copied == 0
    assert backend.engine.cache_bytes_held > 0
    moved = rank.move(OperationKind.OFFLOAD, 1)
    assert moved["bytes_moved"] <= state_terms(SPEC).weights + (64 << 10)
    assert daemon.taken_bytes() == 0
    assert backend.engine.cache_bytes_held == 0
    rank.move(OperationKind.LOAD, 1)
    daemon.stop()
    daemon.start()
    drawn.append(rank.generate())
    rank.move(OperationKind.OFFLOAD, 1)
    # The trainer uses the process group of one rank that vLLM has made.
    trainer = DeploymentSpec(model=SPEC.model, kind="train", backend="fsdp", workers=1)
    learner = Rank(trainer, daemon.config, device)
    learner.move(OperationKind.LOAD, 0)
    learner.train()
    learner.move(OperationKind.PUBLISH, 1)
    learner.move(OperationKind.OFFLOAD, 1)
    rank.move(OperationKind.LOAD, 1)
    drawn.append(rank.generate())
    rank.sync(1, daemon.config.listen, delta=False)
    other = rank.generate()
    assert all(np.array_equal(each, drawn[0]) for each in drawn)
    assert not np.allclose(other, drawn[0], atol=1e-4)
    learner.close()
    rank.close()
