"""A load finds what was copied to its device during the offload before it."""

import random
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from plexrl.errors import DeviceMemoryFullError, StaleTokenError, StateTierFullError
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

KIB = 1 << 10
STATE = 1792 * KIB
"""Three segments: 1 MiB, 512 KiB and 256 KiB."""
FIRST = MIB
"""What fits beside another state; more is prefetched if that one has left before."""
DEVICE = STATE + 3 * MIB // 2


def lent_bytes(shard: Shard) -> int:
    return int(shard.agent.usage()["device"]["lent_bytes"])


def two_jobs(daemon: Daemon, make_shard: MakeShard, **fields: int) -> list[Shard]:
    """Both have stored version 1; the first is on the device."""
    made: list[Shard] = []
    for name in ("one/actor", "two/actor"):
        shard = make_shard(daemon, deployment=name, elements=STATE // 8, **fields)
        shard.fill(1)
        shard.offload(1)
        made.append(shard)
    made[0].load(1)
    return made


def switch(leaving: Shard, coming: Shard, seq: int, coming_seq: int) -> None:
    """Offload with a successor, and wait for the prefetch, which may end after the offload."""
    leaving.fill(seq)
    leaving.offload(seq, successor=(coming.deployment, coming_seq))
    wait_until(lambda: lent_bytes(leaving) > 0)


def test_a_load_moves_only_what_was_not_copied_before(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    one, two = two_jobs(start_daemon(device_bytes=DEVICE), make_shard)
    switch(one, two, 2, 1)
    prefetched = lent_bytes(one)
    assert prefetched >= FIRST
    loaded = two.load(1)
    assert (loaded.prefetched_bytes, loaded.bytes_moved) == (prefetched, STATE)
    assert loaded.prefetch_s > 0
    assert np.array_equal(two.contents, two.version(1))
    assert lent_bytes(one) == STATE
    switch(two, one, 3, 2)
    assert one.load(2).prefetched_bytes >= FIRST
    assert np.array_equal(one.contents, one.version(2))


def test_a_state_that_fits_beside_the_other_is_there_before_its_load(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    one, two = two_jobs(start_daemon(device_bytes=4 * STATE), make_shard)
    switch(one, two, 2, 1)
    loaded = two.load(1)
    assert loaded.prefetched_bytes == STATE
    assert np.array_equal(two.contents, two.version(1))


def test_a_node_without_a_bound_takes_only_memory_that_it_keeps(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    jobs = two_jobs(daemon, make_shard)
    for turn in range(20):
        leaving, coming = jobs[turn % 2], jobs[1 - turn % 2]
        leaving.offload(turn + 2, keep_seq=turn + 2, successor=(coming.deployment, turn + 1))
        coming.load(turn + 1)
        assert daemon.segment_bytes() == STATE


def test_only_a_member_of_the_group_is_prefetched(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    node = start_daemon(device_bytes=DEVICE)
    one, two = two_jobs(node, make_shard)
    other = make_shard(node, deployment="three/actor", elements=64 * KIB, group="other")
    other.offload(1)
    one.offload(2, successor=(other.deployment, 1))
    two.load(1)
    two.offload(2, successor=("nobody/actor", 1))
    assert lent_bytes(one) == 0


def test_another_version_than_expected_is_loaded_whole(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    one, two = two_jobs(start_daemon(device_bytes=DEVICE), make_shard)
    one.offload(2)
    two.load(1)
    two.fill(2)
    two.offload(2, keep_seq=1)
    one.load(2)
    switch(one, two, 3, 1)
    loaded = two.load(2)
    assert loaded.prefetched_bytes == 0
    assert np.array_equal(two.contents, two.version(2))


def test_a_load_of_another_member_ends_the_prefetch(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    one, two = two_jobs(start_daemon(device_bytes=2 * DEVICE), make_shard)
    switch(one, two, 2, 1)
    one.load(2)
    assert lent_bytes(one) == STATE
    assert np.array_equal(one.contents, one.version(2))
    one.offload(3)
    assert two.load(1).prefetched_bytes == 0


def test_another_group_that_lacks_memory_gets_what_was_prefetched(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    node = start_daemon(device_bytes=DEVICE)
    one, two = two_jobs(node, make_shard)
    switch(one, two, 2, 1)
    large = make_shard(
        node, deployment="three/actor", elements=(DEVICE - MIB // 2) // 8, group="other"
    )
    assert lent_bytes(one) == DEVICE - MIB // 2
    with pytest.raises(DeviceMemoryFullError):
        two.load(1)
    large.offload(1)
    assert two.load(1).prefetched_bytes == 0
    assert np.array_equal(two.contents, two.version(1))


def test_a_load_that_lacks_memory_keeps_nothing_of_what_was_prefetched(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    """What is said to be free is free, also for others."""
    node = start_daemon(device_bytes=DEVICE)
    one, two = two_jobs(node, make_shard)
    switch(one, two, 2, 1)
    prefetched = lent_bytes(one)
    rest = make_shard(
        node, deployment="three/actor", elements=(DEVICE - prefetched) // 8, group="other"
    )
    assert lent_bytes(one) == DEVICE
    with pytest.raises(DeviceMemoryFullError):
        two.load(1)
    assert lent_bytes(one) == DEVICE - prefetched
    rest.offload(1)
    assert two.load(1).prefetched_bytes == 0


def test_what_was_prefetched_counts_as_memory_for_its_load(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    node = start_daemon(device_bytes=DEVICE)
    one, two = two_jobs(node, make_shard)
    switch(one, two, 2, 1)
    make_shard(node, deployment="three/actor", elements=(DEVICE - STATE) // 8, group="other")
    assert two.load(1).prefetched_bytes >= FIRST
    assert lent_bytes(one) == DEVICE
    assert np.array_equal(two.contents, two.version(1))


def test_a_stale_worker_ends_no_prefetch(start_daemon: StartDaemon, make_shard: MakeShard) -> None:
    one, two = two_jobs(start_daemon(device_bytes=DEVICE), make_shard)
    switch(one, two, 2, 1)
    two.token = 2
    with pytest.raises(StaleTokenError):
        two.client.load(seq=1, token=0)
    assert two.load(1).prefetched_bytes >= FIRST
    with pytest.raises(StaleTokenError):
        one.load(2)


def test_a_worker_that_is_replaced_leaves_no_memory(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    node = start_daemon(device_bytes=DEVICE)
    one, two = two_jobs(node, make_shard)
    switch(one, two, 2, 1)
    two.client.close()
    wait_until(lambda: lent_bytes(one) == 0)
    one.load(2)
    assert np.array_equal(one.contents, one.version(2))


def test_an_offload_that_finds_no_space_prefetches_nothing(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    node = start_daemon(
        device_bytes=4 * STATE, host_bytes=2 * STATE + KIB * 512, nvme_bytes=STATE // 2
    )
    one, two = two_jobs(node, make_shard)
    one.fill(7)
    with pytest.raises(StateTierFullError):
        one.offload(2, keep_seq=1, successor=(two.deployment, 1))
    assert lent_bytes(one) == STATE
    assert np.array_equal(one.contents, one.version(7)), "it stays on the device"


def test_an_offload_that_fails_frees_what_was_prefetched(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    node = start_daemon(device_bytes=4 * STATE)
    one = make_shard(node, deployment="one/actor", elements=STATE // 8)
    two = make_shard(node, deployment="two/actor", elements=STATE // 8)
    two.fill(1)
    two.offload(1)
    for seq in (1, 2):
        # The second leaves the place of the first free.
        one.snapshot(seq, keep_seq=seq)
    one.fill(7)
    node.limit_files(0)
    with pytest.raises(StateTierFullError):
        # Its bytes are copied; then its header cannot be written.
        one.offload(3, keep_seq=2, successor=(two.deployment, 1))
    node.limit_files_no_more()
    assert lent_bytes(one) == STATE
    assert np.array_equal(one.contents, one.version(7))
    switch(one, two, 3, 1)
    assert two.load(1).prefetched_bytes == STATE


@pytest.mark.parametrize("point", ["put.reserved", "put.copied", "put.dropped", "load.half"])
def test_a_daemon_killed_in_a_switch_loses_neither_state(
    start_daemon: StartDaemon, make_shard: MakeShard, point: str
) -> None:
    node = start_daemon(device_bytes=DEVICE)
    one, two = two_jobs(node, make_shard)
    config = node.config
    node.kill()
    node.config = node.with_config(fault_points=(point,))
    node.start()
    # Both are registered again, so that there is something to prefetch.
    two.client.register(two.arena, two.slices, group=two.group, token=1)
    one.fill(2)
    with ThreadPoolExecutor(1) as pool:
        leaves = pool.submit(one.offload, 2, keep_seq=1, successor=(two.deployment, 1))
        comes = pool.submit(two.load, 1)
        wait_until(lambda: not node.is_alive())
        node.wait()
        node.config = config
        node.start()
        leaves.result(DEADLINE_S)
        comes.result(DEADLINE_S)
    assert np.array_equal(two.contents, two.version(1))
    two.offload(3, keep_seq=1)
    one.load(2)
    assert np.array_equal(one.contents, one.version(2))


class Switches:
    """Two jobs in turns on one device, and what each of their states must be."""

    def __init__(self, node: Daemon, make_shard: MakeShard) -> None:
        self.node, self.make_shard = node, make_shard
        self.jobs = two_jobs(node, make_shard, timeout_s=int(DEADLINE_S))
        self.seqs = [1, 1]
        self.seq = 1
        self.prefetched = 0

    def run(self, turn: int, *, replaced: bool = False) -> None:
        """One switch; the state that comes must be the one that left, bit for bit. `replaced`: by
        another worker, after the offload."""
        self.seq += 1
        leaving, coming = self.jobs[turn % 2], self.jobs[1 - turn % 2]
        former, self.seqs[turn % 2] = self.seqs[turn % 2], self.seq
        leaving.fill(self.seq)
        seq = self.seqs[1 - turn % 2]
        leaving.offload(self.seq, keep_seq=former, successor=(coming.deployment, seq))
        if replaced:
            coming.client.close()
            coming = self.make_shard(self.node, deployment=coming.deployment, elements=STATE // 8)
            self.jobs[1 - turn % 2] = coming
        self.prefetched += coming.load(seq).prefetched_bytes > 0
        assert np.array_equal(coming.contents, coming.version(seq))


def test_states_survive_any_history_of_switches_and_kills(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    node = start_daemon(device_bytes=DEVICE)
    switches, chance = Switches(node, make_shard), random.Random(20)
    kills = examples(3)
    with ThreadPoolExecutor(1) as pool:
        for turn in range(examples(400)):
            kills_now = chance.random() < kills / examples(400)
            running = pool.submit(switches.run, turn, replaced=chance.random() < 0.02)
            if kills_now:
                pause_s = chance.random() * 0.01
                wait([running], timeout=pause_s)
                node.kill()
                node.start()
            running.result(DEADLINE_S)
    assert switches.prefetched > 0
    for job in switches.jobs:
        job.client.close()
    wait_until(lambda: lent_bytes(switches.jobs[0]) == 0)
