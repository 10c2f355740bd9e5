"""An optimizer in host memory, against the one on the device, on real gloo ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from tests.statemanager.conftest import Daemon, daemon_in
from tests.worker.state import host_optimizer_ranks as ranks


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = daemon_in(tmp_path, 256 << 20)
    yield made
    made.clean_up()


@pytest.mark.parametrize("count", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_host_and_device_agree_bit_for_bit_over_switches_and_checkpoints(
    daemon: Daemon, tmp_path: Path, count: int
) -> None:
    arguments = (str(tmp_path), daemon.config.listen)
    for work in (ranks.train_alike, ranks.restore):
        mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            work,
            args=(count, str(tmp_path / work.__name__), *arguments),
            nprocs=count,
            start_method="forkserver",
        )
        # A clean exit finishes the checkpoint; what was stored is there again.
        daemon.terminate()
        assert not daemon.host_files(), "a clean exit spills"
        daemon.start()
    assert (tmp_path / "j" / "host").exists()
