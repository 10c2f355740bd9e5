"""`kill -9` of the daemon at every fault point: no complete version is lost or mixed."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.statemanager.store.tiers.fault_points import POINTS, FaultPoints
from tests.statemanager.conftest import (
    DEADLINE_S,
    MIB,
    Daemon,
    MakeShard,
    Shard,
    StartDaemon,
    wait_until,
)
from tests.statemanager.daemon.test_crashes import stored_versions

ELEMENTS = MIB
STATE = 8 * ELEMENTS
"""Two blocks."""
PUBLISHED = 9


def test_an_unknown_fault_point_is_refused() -> None:
    for name in ("put.nowhere", "put.copied:x"):
        with pytest.raises(InvalidRequestError, match="unknown fault point"):
            FaultPoints([name])


def exercise(daemon: Daemon, shard: Shard) -> None:
    """All moves, in a host tier for one version."""
    for seq in (3, 4):
        shard.fill(seq)
        # The previous version is kept, so it spills; its predecessor is dropped from NVMe.
        shard.snapshot(seq, keep_seq=seq - 1)
    shard.load(3)
    shard.load(4)
    shard.client.publish(seq=PUBLISHED, token=1)
    shard.fill(5)
    shard.snapshot(5, keep_seq=4)
    # The next version spilled it, and the load promotes it.
    shard.client.pull(
        sources=[daemon.config.listen], source="job/actor", seq=PUBLISHED, wants=shard.slices[:1]
    )


# A version that arrives from another node is killed at its point in `test_far_migration`.
HERE = sorted(POINTS - {"arrive.block"})


@pytest.mark.parametrize("point", [*HERE, "spill.block:2", "put.named:2", "load.block:2"])
def test_a_daemon_killed_at_a_point_loses_nothing_and_leaks_nothing(
    start_daemon: StartDaemon, make_shard: MakeShard, point: str
) -> None:
    daemon = start_daemon(host_bytes=STATE + 2 * MIB, nvme_bytes=8 * STATE)
    shard = make_shard(daemon, elements=ELEMENTS)
    for seq in (1, 2):
        shard.fill(seq)
        shard.snapshot(seq, keep_seq=1)
    daemon.kill()
    whole = {1, 2}
    assert set(stored_versions(daemon)) == whole

    config = daemon.config
    daemon.config = daemon.with_config(fault_points=(point,))
    daemon.start()
    with ThreadPoolExecutor(1) as pool:
        exercising = pool.submit(_outcome, daemon, shard)
        wait_until(lambda: not daemon.is_alive() or exercising.done())
        assert not daemon.is_alive(), f"nothing came to {point}"
        daemon.wait()
        daemon.config = config
        for seq, contents in stored_versions(daemon).items():
            # The published version has the parameters of version 4.
            expected = shard.version(4 if seq == PUBLISHED else seq)
            nbytes = STATE // 2 if seq == PUBLISHED else STATE
            assert np.array_equal(contents, expected[:nbytes])
        daemon.start()
        # The client reconnects and repeats its request.
        assert exercising.result(DEADLINE_S) is None
    for seq in (4, 5):
        shard.load(seq)
        assert np.array_equal(shard.contents, shard.version(seq))
    daemon.kill()
    # The store's check asserts that every page and file has exactly one owner.
    stored_versions(daemon)


def _outcome(daemon: Daemon, shard: Shard) -> PlexRLError | None:
    try:
        exercise(daemon, shard)
    except PlexRLError as error:
        return error
    return None
