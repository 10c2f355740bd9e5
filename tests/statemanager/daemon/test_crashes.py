"""`kill -9` of daemon or worker at any time: every load is exact, and no complete version is
lost."""

import multiprocessing
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from plexrl.errors import StaleTokenError, StateLostError, UnavailableError
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.store.store import Store
from tests.examples import examples
from tests.statemanager.conftest import (
    DEADLINE_S,
    MIB,
    Daemon,
    MakeShard,
    Shard,
    StartDaemon,
    wait_until,
)
from tests.statemanager.host_memory import HostMemory

KILLS = examples(5)


def test_a_killed_daemon_loses_no_complete_version(daemon: Daemon, make_shard: MakeShard) -> None:
    shard = make_shard(daemon)
    expected = shard.fill(1)
    shard.offload(1, meta={"step": 3})
    daemon.kill()
    daemon.start()
    assert shard.load(1).meta == {"step": 3}
    assert np.array_equal(shard.contents, expected)


def test_a_killed_daemon_loses_no_spilled_version(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(host_bytes=1)
    shard = make_shard(daemon)
    expected = shard.fill(1)
    shard.offload(1)
    daemon.kill()
    daemon.start()
    assert shard.load(1).tier == "nvme"
    assert np.array_equal(shard.contents, expected)


def test_a_restarted_daemon_still_refuses_a_stale_token(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    former = make_shard(daemon, deployment="a/actor", token=1)
    make_shard(daemon, deployment="b/actor", token=2)
    daemon.kill()
    daemon.start()
    with pytest.raises(StaleTokenError):
        former.offload(1)


def test_a_client_registers_again_under_its_newest_token(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = make_shard(daemon, token=1)
    expected = shard.fill(1)
    shard.token = 5
    shard.snapshot(1)
    daemon.kill()
    daemon.start()
    shard.offload(2)
    shard.load(2)
    assert np.array_equal(shard.contents, expected)


def test_an_arena_is_kept_when_the_daemon_does_not_come_back(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = make_shard(daemon, timeout_s=2.0)
    expected = shard.fill(1)
    daemon.kill()
    with pytest.raises(UnavailableError, match="cannot be reached"):
        shard.offload(1)
    assert np.array_equal(shard.contents, expected)


def stored_versions(daemon: Daemon) -> dict[int, npt.NDArray[np.uint8]]:
    """The versions by sequence number that a new daemon would recover from the directories."""
    store = Store(replace(daemon.config, fault_points=()))
    store.check()
    found = {}
    for version in store.find(lambda _: True):
        manifest = version.manifest
        arena = Arena(manifest.slices[-1].arena_offset + manifest.slices[-1].nbytes)
        store.load(manifest.name, manifest.description, HostMemory(arena))
        found[manifest.seq] = np.frombuffer(arena.buffer, dtype=np.uint8).copy()
        arena.close()
    store.close()
    return found


@pytest.mark.parametrize("host_versions", [1, 8], ids=["spilling", "in memory"])
def test_a_daemon_killed_during_an_offload_leaves_no_partial_version(
    start_daemon: StartDaemon, make_shard: MakeShard, host_versions: int
) -> None:
    chance = random.Random(host_versions)
    elements = MIB
    state = 2 * 4 * elements
    daemon = start_daemon(host_bytes=host_versions * (state + MIB), nvme_bytes=8 * state)
    shard = make_shard(daemon, elements=elements)
    shard.fill(1)
    shard.offload(1)
    shard.fill(2)
    # Each offload after the first spills its predecessor, if necessary.
    typical_s = shard.offload(2, keep_seq=1).seconds
    seconds_of_kill = []
    with ThreadPoolExecutor(1) as pool:
        for seq in range(3, 3 + KILLS):
            expected = shard.fill(seq)
            seconds_of_kill.append(chance.uniform(0, 1.5 * typical_s))
            killer = threading.Timer(seconds_of_kill[-1], daemon.kill)
            offload = pool.submit(shard.offload, seq, keep_seq=seq - 1)
            killer.start()
            killer.join()

            found = stored_versions(daemon)
            assert seq - 1 in found, "the last complete version is lost"
            for found_seq, contents in found.items():
                assert np.array_equal(contents, shard.version(found_seq)), seconds_of_kill

            daemon.start()
            offload.result(DEADLINE_S)
            shard.load(seq)
            assert np.array_equal(shard.contents, expected), seconds_of_kill
    assert not list(Path(daemon.config.host_dir).glob("*.part"))
    usage = shard.agent.usage()["deployments"]["job/actor"]["versions"]
    assert len(usage) == 2


def _offload_for_ever(pipe: Connection, daemon: Daemon) -> None:
    """A worker process that offloads version after version until it is killed."""
    shard = Shard(daemon, elements=8 * MIB)
    shard.register()
    seq = pipe.recv()
    while True:
        seq += 1
        shard.fill(seq)
        shard.snapshot(seq, keep_seq=seq - 1)
        pipe.send(seq)


def test_a_worker_killed_during_an_offload_leaves_its_last_version(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = make_shard(daemon, registered=False, elements=8 * MIB)
    context = multiprocessing.get_context("forkserver")
    last = 0
    for _ in range(examples(3)):
        ours, theirs = context.Pipe()
        worker = context.Process(
            target=_offload_for_ever, args=(theirs, Daemon(daemon.config)), daemon=True
        )
        worker.start()
        ours.send(last)
        last = ours.recv()
        wait_until(ours.poll)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        while ours.poll():
            last = ours.recv()

        shard.register()
        for seq in (last, last + 1):
            try:
                shard.load(seq)
            except StateLostError:
                assert seq == last + 1
            else:
                assert np.array_equal(shard.contents, shard.version(seq))
        assert not list(Path(daemon.config.host_dir).glob("*.part"))
