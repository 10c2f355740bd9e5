"""Clean exits: no memory is left, and the next daemon serves all complete versions."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tests.statemanager.conftest import DEADLINE_S, MIB, MakeShard, StartDaemon, wait_until


def test_a_clean_exit_persists_versions_and_leaves_no_socket_and_no_memory(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon()
    shards = [make_shard(daemon, rank=rank, world_size=2) for rank in range(2)]
    expected = [shard.fill(rank) for rank, shard in enumerate(shards)]
    for shard in shards:
        shard.client.publish(seq=4, token=1)
        shard.offload(4, meta={"rank": shard.slices[0].offset[0]})
    daemon.terminate()
    assert not Path(daemon.config.listen).exists()
    assert not Path(daemon.config.host_dir).exists()

    daemon.start()
    for shard, contents in zip(shards, expected, strict=True):
        report = shard.load(4)
        assert report.tier == "nvme"
        assert report.meta == {"rank": shard.slices[0].offset[0]}
        assert np.array_equal(shard.contents, contents)


def test_a_clean_exit_without_persistence_leaves_nothing(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(persist_on_exit=False)
    make_shard(daemon).offload(1)
    daemon.terminate()
    assert not Path(daemon.config.host_dir).exists()
    assert not daemon.nvme_files()


def test_versions_that_do_not_fit_nvme_stay_for_the_next_daemon(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(nvme_bytes=MIB // 2 + MIB // 4)
    shards = [make_shard(daemon, deployment=f"{name}/actor") for name in "ab"]
    expected = [shard.fill(index) for index, shard in enumerate(shards)]
    for shard in shards:
        shard.offload(1)
    log = daemon.terminate()
    assert "NVMe is full" in log
    assert len(daemon.host_files()) == len(daemon.nvme_files()) == 1

    daemon.start()
    tiers = set()
    for shard, contents in zip(shards, expected, strict=True):
        tiers.add(shard.load(1).tier)
        assert np.array_equal(shard.contents, contents)
    assert tiers == {"host", "nvme"}


def test_a_running_offload_finishes_before_the_exit(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon()
    shard = make_shard(daemon, elements=8 * MIB)
    expected = shard.fill(1)
    with ThreadPoolExecutor(1) as pool:
        offload = pool.submit(shard.offload, 1)
        wait_until(lambda: bool(daemon.host_files()) or offload.done())
        daemon.terminate()
        offload.result(DEADLINE_S)
    daemon.start()
    shard.load(1)
    assert np.array_equal(shard.contents, expected)
