"""A prefetch promotes a version before its load, if that needs no eviction."""

import numpy as np
import pytest

from tests.statemanager.conftest import MIB, Daemon, MakeShard, Shard, StartDaemon, wait_until

STATE = MIB // 2
ROOM = STATE + MIB // 4
"""Capacity of a host tier for one shard."""


def tier_of(shard: Shard, deployment: str, rank: int = 0) -> str:
    versions = shard.agent.usage()["deployments"][deployment]["versions"]
    return next(str(v["tier"]) for v in versions if v["rank"] == rank)


@pytest.fixture
def crowded(start_daemon: StartDaemon, make_shard: MakeShard) -> tuple[Daemon, Shard, Shard]:
    """A daemon whose host tier is almost full with the second shard's version; the first shard's
    version and a small one are on NVMe."""
    daemon = start_daemon(host_bytes=ROOM)
    first = make_shard(daemon, deployment="a/actor")
    second = make_shard(daemon, deployment="b/actor")
    small = make_shard(daemon, deployment="z/actor", elements=1024)
    first.fill(1)
    first.offload(1)
    small.offload(1)
    daemon.terminate()
    daemon.start()
    second.fill(2)
    second.offload(1)
    assert (tier_of(first, "a/actor"), tier_of(first, "b/actor")) == ("nvme", "host")
    return daemon, first, second


def test_a_prefetched_version_is_loaded_from_memory(
    crowded: tuple[Daemon, Shard, Shard],
) -> None:
    _, first, second = crowded
    second.agent.release("b/actor")
    first.agent.prefetch("a/actor", 1)
    wait_until(lambda: tier_of(first, "a/actor") == "host")
    assert first.load(1).tier == "host"
    assert np.array_equal(first.contents, first.version(1))


def test_every_rank_is_prefetched(start_daemon: StartDaemon, make_shard: MakeShard) -> None:
    daemon = start_daemon(host_bytes=2 * STATE + MIB // 4)
    shards = [make_shard(daemon, rank=rank, world_size=2) for rank in range(2)]
    other = make_shard(daemon, deployment="b/actor", elements=128 * 1024)
    for rank, shard in enumerate(shards):
        shard.fill(rank)
        shard.offload(1)
    other.offload(1)
    assert [tier_of(other, "job/actor", rank) for rank in range(2)] == ["nvme", "nvme"]
    other.agent.release("b/actor")
    other.agent.prefetch("job/actor", 1)
    wait_until(lambda: [tier_of(other, "job/actor", rank) for rank in range(2)] == ["host", "host"])
    for rank, shard in enumerate(shards):
        assert shard.load(1).tier == "host"
        assert np.array_equal(shard.contents, shard.version(rank))


def test_a_prefetch_evicts_nothing(crowded: tuple[Daemon, Shard, Shard]) -> None:
    _, first, second = crowded
    first.agent.prefetch("a/actor", 1)
    _wait_until_handled(first)
    assert (tier_of(first, "a/actor"), tier_of(first, "b/actor")) == ("nvme", "host")
    assert first.load(1).tier == "nvme"
    assert np.array_equal(first.contents, first.version(1))
    assert second.load(1).tier == "host"


def test_unknown_and_damaged_versions_are_skipped(
    crowded: tuple[Daemon, Shard, Shard],
) -> None:
    daemon, first, second = crowded
    second.agent.release("b/actor")
    path = next(path for path in daemon.nvme_objects() if path.name.startswith("a"))
    contents = bytearray(path.read_bytes())
    contents[5000] ^= 1
    path.write_bytes(contents)
    for deployment, seq in (("a/actor", 7), ("nobody", 1), ("a/actor", 1)):
        first.agent.prefetch(deployment, seq)
    _wait_until_handled(first)
    assert tier_of(first, "a/actor") == "nvme"
    assert [path.name[0] for path in daemon.host_files()] == ["z"]


def test_a_clean_exit_during_prefetches_loses_nothing(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(host_bytes=1)
    shards = [make_shard(daemon, rank=rank, world_size=4) for rank in range(4)]
    for rank, shard in enumerate(shards):
        shard.fill(rank)
        shard.offload(1)
    daemon.terminate()
    # A daemon with a larger capacity recovers all of it from NVMe.
    roomy = start_daemon(nvme_dir=daemon.config.nvme_dir)
    asking = make_shard(roomy, deployment="b/actor")
    for _ in range(3):
        asking.agent.prefetch("job/actor", 1)
        roomy.terminate()
        roomy.start()
    for rank in range(4):
        shard = make_shard(roomy, rank=rank, world_size=4)
        shard.load(1)
        assert np.array_equal(shard.contents, shard.version(rank))


def _wait_until_handled(shard: Shard) -> None:
    """Hints are handled in order, so a visible effect proves that earlier ones were handled."""
    shard.agent.prefetch("z/actor", 1)
    wait_until(lambda: tier_of(shard, "z/actor") == "host")
