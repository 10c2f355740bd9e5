"""State in host memory: allocated, taken over by versions, read from them, and never lost."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from plexrl.errors import (
    ConflictError,
    InvalidRequestError,
    QuotaExceededError,
    StaleTokenError,
    StateTierFullError,
)
from plexrl.statemanager.protocol.host_requests import BorrowHost
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.tiers.host.ofd_locks import has_holder, has_writer
from tests.statemanager.conftest import (
    DEADLINE_S,
    MIB,
    Daemon,
    MakeShard,
    StartDaemon,
    wait_until,
)
from tests.statemanager.host_shards import ELEMENTS, HostShard, start_training

KILLS = 12
NBYTES = ELEMENTS * 4

MakeHostShard = Callable[..., HostShard]


@pytest.fixture
def make_host_shard() -> Iterator[MakeHostShard]:
    made: list[HostShard] = []

    def make(daemon: Daemon, **fields: object) -> HostShard:
        made.append(HostShard(daemon, **fields))  # type: ignore[arg-type]
        made[-1].register()
        return made[-1]

    yield make
    for shard in made:
        shard.close()


def used_bytes(daemon: Daemon) -> int:
    agent = daemon.agent()
    found = agent.usage()["host_bytes"]
    agent.close()
    assert isinstance(found, int)
    return found


def last_said(hears: Connection) -> int:
    """By a process that has ended; 0: nothing more."""
    said = 0
    while True:
        try:
            said = hears.recv()
        except EOFError:
            return said


def check(daemon: Daemon) -> None:
    """The accounts of an ended daemon match its files."""
    store = Store(replace(daemon.config, fault_points=()))
    store.check()
    store.close()


def test_moves_leave_host_memory_where_it_is(
    daemon: Daemon, make_host_shard: MakeHostShard
) -> None:
    shard = make_host_shard(daemon)
    shard.step()
    assert shard.offload(1) == NBYTES
    assert not shard.moment.any()
    shard.register()
    assert shard.load(1) == NBYTES
    assert shard.is_after(1)
    shard.step()
    shard.step()
    assert shard.is_after(3)
    # Only the parameter is copied, and the worker continues.
    assert shard.snapshot(3, keep_seq=1) == NBYTES
    shard.step()
    assert shard.is_after(4)
    shard.load(3)
    assert shard.is_after(3)
    shard.load(1)
    assert shard.is_after(1)


def test_steady_switching_uses_two_files(daemon: Daemon, make_host_shard: MakeHostShard) -> None:
    shard = make_host_shard(daemon)
    for seq in range(1, 6):
        shard.step()
        shard.offload(seq)
        shard.register()
        shard.load(seq)
    assert shard.is_after(5)
    files = list(Path(daemon.config.host_dir).glob("*.lent"))
    assert len(files) == 2, "the version's file and the previous one, which is reused"


def test_a_version_that_was_spilled_is_loaded_as_a_copy(
    start_daemon: StartDaemon, make_host_shard: MakeHostShard, make_shard: MakeShard
) -> None:
    daemon = start_daemon(host_bytes=6 * NBYTES)
    shard = make_host_shard(daemon)
    shard.step()
    shard.offload(1)
    other = make_shard(daemon, deployment="other/actor", elements=ELEMENTS * 5 // 2 - 4096)
    other.fill(1)
    other.offload(1)
    shard.register()
    assert shard.load(1) == 2 * NBYTES
    assert shard.is_after(1)
    shard.step()
    assert shard.is_after(2)


def test_memory_with_a_writer_cannot_become_a_version(
    daemon: Daemon, make_host_shard: MakeHostShard
) -> None:
    shard = make_host_shard(daemon)
    shard.snapshot(1)
    shard.step()
    kept = shard.client._link.borrow()
    with pytest.raises(ConflictError, match="mapped for writing"):
        shard.snapshot(2)
    os.close(kept.writer)
    os.close(kept.reader)
    shard.snapshot(2)
    shard.load(2)
    assert shard.is_after(1)


def test_a_worker_that_truncates_its_memory_harms_only_itself(
    daemon: Daemon, make_host_shard: MakeHostShard
) -> None:
    shard = make_host_shard(daemon)
    shard.snapshot(1)
    shard.step()
    kept = shard.client._link.borrow()
    os.ftruncate(kept.writer, 0)
    os.close(kept.writer)
    os.close(kept.reader)
    with pytest.raises(Exception, match="was truncated"):
        shard.snapshot(2)
    shard.load(1)
    assert shard.is_after(0)
    assert daemon.is_alive()


def test_allocated_memory_counts_in_the_tier_and_the_quota(
    start_daemon: StartDaemon, make_host_shard: MakeHostShard
) -> None:
    daemon = start_daemon(host_bytes=8 * NBYTES, tenant_bytes_max=7 * NBYTES // 2)
    shard = make_host_shard(daemon, tenant="t")
    shard.snapshot(1)
    before = used_bytes(daemon)
    shard.step()
    assert used_bytes(daemon) == before + NBYTES
    second = make_host_shard(daemon, deployment="second/actor", tenant="t")
    with pytest.raises(QuotaExceededError):
        second.snapshot(1)
    stranger = make_host_shard(daemon, deployment="third/actor", tenant="u")
    stranger.snapshot(1)


def test_a_full_tier_refuses_an_allocation_and_loses_nothing(
    start_daemon: StartDaemon, make_host_shard: MakeHostShard
) -> None:
    daemon = start_daemon(host_bytes=3 * NBYTES // 2 + NBYTES, nvme_bytes=MIB // 1024)
    shard = make_host_shard(daemon)
    shard.snapshot(1)
    with pytest.raises(StateTierFullError):
        shard.step()
    assert shard.is_after(0)


def test_a_stale_token_cannot_allocate(daemon: Daemon, make_host_shard: MakeHostShard) -> None:
    shard = make_host_shard(daemon, token=1)
    shard.snapshot(1)
    make_host_shard(daemon, deployment="other/actor", token=2)
    with pytest.raises(StaleTokenError):
        shard.step()
    assert shard.is_after(0)


def test_a_rank_without_host_bytes_cannot_allocate(daemon: Daemon, make_shard: MakeShard) -> None:
    shard = make_shard(daemon)
    with pytest.raises(InvalidRequestError):
        shard.client.request(BorrowHost(token=1))


def test_another_deployment_sees_no_old_data(
    daemon: Daemon, make_host_shard: MakeHostShard
) -> None:
    shard = make_host_shard(daemon)
    for seq in (1, 2, 3):
        shard.step()
        shard.offload(seq)
        shard.register()
        shard.load(seq)
    shard.close()
    agent = daemon.agent()
    agent.release("job/actor")
    agent.close()
    other = make_host_shard(daemon, deployment="other/actor")
    lent = other.client._link.borrow()
    assert not any(os.pread(lent.reader, NBYTES, 0))
    os.close(lent.reader)
    os.close(lent.writer)


def test_holders_are_detected_by_descriptors_and_mappings(
    daemon: Daemon, make_host_shard: MakeHostShard
) -> None:
    shard = make_host_shard(daemon)
    shard.snapshot(1)
    (file,) = Path(daemon.config.host_dir).glob("*.lent")
    fd = os.open(file, os.O_RDONLY)
    assert has_holder(fd)
    assert not has_writer(fd)
    shard.close()
    assert not has_holder(fd)
    os.close(fd)


def test_the_daemon_killed_between_steps_and_moves_loses_nothing(
    daemon: Daemon, make_host_shard: MakeHostShard
) -> None:
    shard = make_host_shard(daemon)
    shard.step()
    shard.snapshot(1)
    daemon.kill()
    daemon.start()
    # The worker reads the version's memory without a daemon; then a copy is allocated.
    shard.step()
    assert shard.is_after(2)
    daemon.kill()
    daemon.start()
    # A new daemon takes an allocation of the previous one over.
    shard.step()
    assert shard.offload(3, keep_seq=1) == NBYTES
    daemon.kill()
    daemon.start()
    shard.register()
    shard.load(3)
    assert shard.is_after(3)
    shard.load(1)
    assert shard.is_after(1)
    daemon.kill()
    check(daemon)


@pytest.mark.parametrize("offloads", [False, True], ids=["snapshot", "offload"])
@pytest.mark.parametrize(
    "point", ["put.claimed", "put.reserved", "put.copied", "put.header", "put.named", "put.dropped"]
)
def test_a_daemon_killed_at_every_point_of_the_hand_over(
    start_daemon: StartDaemon, make_host_shard: MakeHostShard, point: str, *, offloads: bool
) -> None:
    daemon = start_daemon(fault_points=(f"{point}:2",))
    shard = make_host_shard(daemon)
    shard.step()
    shard.snapshot(1)
    shard.step()
    with ThreadPoolExecutor(1) as pool:
        move = pool.submit(shard.offload if offloads else shard.snapshot, 2, 1)
        wait_until(lambda: not daemon.is_alive())
        daemon.wait()
        daemon.config = daemon.with_config(fault_points=())
        daemon.start()
        move.result(timeout=DEADLINE_S)
    if offloads:
        shard.register()
        shard.load(2)
    assert shard.is_after(2)
    shard.step()
    shard.snapshot(3, keep_seq=2)
    shard.load(2)
    assert shard.is_after(2)
    shard.load(3)
    assert shard.is_after(3)
    shard.close()
    daemon.kill()
    check(daemon)


def test_a_worker_killed_at_any_moment_leaves_whole_versions_and_no_memory(
    daemon: Daemon, make_host_shard: MakeHostShard
) -> None:
    chance = random.Random(7)
    elements = 4 * ELEMENTS
    whole = 0
    for _ in range(KILLS):
        process, hears = start_training(daemon, elements, whole)
        whole = hears.recv()
        pause = threading.Event()
        pause.wait(chance.uniform(0, 0.03))
        process.kill()
        process.join()
        whole = max(whole, last_said(hears))
        shard = make_host_shard(daemon, elements=elements, token=1)
        agent = daemon.agent()
        versions = agent.usage()["deployments"]["job/actor"]["versions"]
        agent.close()
        stored = sorted(version["seq"] for version in versions)
        # A version may be complete although its worker died before the reply.
        assert whole in stored
        for seq in stored:
            shard.load(seq)
            assert shard.is_after(seq)
        whole = stored[-1]
        shard.close()
    lent = 2 * elements * 4 + MIB
    wait_until(lambda: used_bytes(daemon) <= 2 * lent)
    daemon.kill()
    check(daemon)


def test_a_daemon_killed_at_any_moment_of_training_loses_nothing(
    daemon: Daemon, make_host_shard: MakeHostShard
) -> None:
    chance = random.Random(8)
    process, hears = start_training(daemon, 4 * ELEMENTS, 0)
    whole = hears.recv()
    for _ in range(KILLS):
        pause = threading.Event()
        pause.wait(chance.uniform(0, 0.05))
        daemon.kill()
        daemon.start()
        whole = hears.recv()
    process.kill()
    process.join()
    whole = max(whole, last_said(hears))
    shard = make_host_shard(daemon, elements=4 * ELEMENTS)
    shard.load(whole)
    assert shard.is_after(whole)
    shard.close()
    daemon.kill()
    check(daemon)


def test_a_stored_version_never_changes(daemon: Daemon, make_host_shard: MakeHostShard) -> None:
    shard = make_host_shard(daemon)
    for seq in range(1, 4):
        shard.step()
        shard.snapshot(seq, keep_seq=seq - 1)
    moments = np.copy(shard.moment)
    shard.step()
    shard.load(3)
    assert np.array_equal(shard.moment, moments)
