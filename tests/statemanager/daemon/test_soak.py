"""Repeated `kill -9` of daemons and workers at random times and fault points.

Every load returns exactly a completed version, the last one in progress, or a typed error. No
complete version is lost. At the end no memory, descriptor or file is left.
"""

import os
import random
from pathlib import Path

import pytest

from tests.examples import examples
from tests.free_ports import free_port
from tests.statemanager.conftest import MIB, StartDaemon, wait_until
from tests.statemanager.memory_files import NewSegments
from tests.statemanager.soak import Soak, leftovers
from tests.statemanager.soak_worker import STATE_BYTES


def soak(start_daemon: StartDaemon, folder: Path, *, kills: int, seed: int) -> None:
    segments = NewSegments()
    daemons = [
        start_daemon(
            # Neither host tier can hold all versions, so versions are spilled and promoted.
            host_bytes=int(3.5 * STATE_BYTES),
            nvme_bytes=64 * MIB,
            segment_bytes_max=STATE_BYTES,
            checkpoint_url=str(folder),
            # The same port after a restart, because readers have the address.
            serve_tcp=f"127.0.0.1:{free_port()}",
        )
        for _ in range(2)
    ]
    before = [daemon.descriptors() for daemon in daemons]
    here = len(list(Path("/proc/self/fd").iterdir()))
    print(f"replay with PLEXRL_SOAK_SEED={seed}")  # noqa: T201
    played = Soak(daemons[0], daemons[1], folder, seed)
    try:
        played.run(kills)
        played.end()
    finally:
        print(dict(sorted(played.counts.items())))  # noqa: T201
        played.close()
    for daemon, count in zip(daemons, before, strict=True):
        wait_until(lambda daemon=daemon, count=count: daemon.descriptors() == count)  # type: ignore[misc]
    # The fork server uses two.
    assert len(list(Path("/proc/self/fd").iterdir())) <= here + 3
    for daemon in daemons:
        daemon.terminate()
        assert not Path(daemon.config.host_dir).exists()
        assert not Path(daemon.config.listen).exists()
    assert [path.name for path in leftovers(*daemons) if path.name != "ticket.key"] == []
    # Daemons and workers have ended, so only this process can hold memory.
    assert segments.nbytes() == 0


def test_a_short_soak(start_daemon: StartDaemon, tmp_path: Path) -> None:
    seed = int(os.environ.get("PLEXRL_SOAK_SEED", "0")) or random.SystemRandom().getrandbits(32)
    soak(start_daemon, tmp_path / "checkpoints", kills=examples(8), seed=seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_soak(start_daemon: StartDaemon, tmp_path: Path) -> None:
    seed = int(os.environ.get("PLEXRL_SOAK_SEED", "0")) or random.SystemRandom().getrandbits(32)
    soak(start_daemon, tmp_path / "checkpoints", kills=220, seed=seed)
