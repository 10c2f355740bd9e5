"""Earlier versions stay on NVMe while there is space, and are dropped first."""

from pathlib import Path

import numpy as np
import pytest

from plexrl.errors import StateLostError
from plexrl.statemanager.config import TenantLimit
from tests.statemanager.conftest import MIB, Daemon, MakeShard, Shard, StartDaemon, wait_until

STATE = MIB // 2
"""State size of a shard from `make_shard`."""


def with_an_earlier_version(daemon: Daemon, make_shard: MakeShard) -> Shard:
    """Store versions 1 (the earlier one) and 4."""
    shard = make_shard(daemon)
    for seq, keep_seq, previous_seq in ((1, 0, 0), (2, 1, 0), (3, 2, 1), (4, 3, 1), (4, 4, 1)):
        shard.fill(seq)
        shard.snapshot(seq, keep_seq=keep_seq, previous_seq=previous_seq)
    return shard


def holds(shard: Shard, seq: int) -> bool:
    try:
        shard.load(seq)
    except StateLostError:
        return False
    return np.array_equal(shard.contents, shard.version(seq))


def test_the_earlier_version_is_kept_and_versions_in_between_are_not(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = with_an_earlier_version(daemon, make_shard)
    assert [holds(shard, seq) for seq in (1, 2, 3, 4)] == [True, False, False, True]


def test_an_earlier_version_survives_the_host_tier_and_the_daemon(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = with_an_earlier_version(daemon, make_shard)
    wait_until(lambda: len(daemon.nvme_files()) == 1 and len(daemon.host_files()) == 1)
    daemon.kill()
    for path in Path(daemon.config.host_dir).iterdir():
        path.unlink()
    daemon.start()
    assert not holds(shard, 4)
    assert holds(shard, 1)


def test_a_load_names_the_earlier_version(daemon: Daemon, make_shard: MakeShard) -> None:
    shard = make_shard(daemon)
    for seq in (1, 2):
        shard.fill(seq)
        shard.offload(seq, keep_seq=seq - 1)
        assert not daemon.nvme_files()
        shard.load(seq)
    shard.client.load(seq=2, token=1, previous_seq=1)
    wait_until(lambda: len(daemon.nvme_files()) == 1)
    assert holds(shard, 2)
    assert holds(shard, 1)


@pytest.mark.parametrize("nvme_bytes", [1, STATE + MIB // 4])
def test_an_earlier_version_is_dropped_before_a_save_is_refused(
    start_daemon: StartDaemon, make_shard: MakeShard, nvme_bytes: int
) -> None:
    host_bytes = 4 * STATE + MIB // 4
    daemon = start_daemon(host_bytes=host_bytes, nvme_bytes=nvme_bytes)
    shard = with_an_earlier_version(daemon, make_shard)
    others = [make_shard(daemon, deployment=f"{name}/actor") for name in "abc"]
    if nvme_bytes > STATE:
        others.append(make_shard(daemon, deployment="d/actor"))
    for index, other in enumerate(others):
        other.fill(index)
        other.offload(1)
    assert not holds(shard, 1)
    assert holds(shard, 4)
    for index, other in enumerate(others):
        other.load(1)
        assert np.array_equal(other.contents, other.version(index))


def test_an_earlier_version_does_not_count_against_the_quota(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    limit = TenantLimit(total_bytes=2 * STATE + MIB // 4, host_bytes=None)
    daemon = start_daemon(tenant_limits={"": limit})
    shard = make_shard(daemon)
    for seq in (1, 2):
        shard.fill(seq)
        shard.snapshot(seq, keep_seq=seq, previous_seq=1)
    assert holds(shard, 2)
    assert holds(shard, 1)
    other = make_shard(daemon, deployment="other/actor")
    other.fill(7)
    other.offload(1)
    assert not holds(shard, 1)
    assert holds(shard, 2)
