"""What is offloaded is loaded bit for bit, and its memory is really given back in between."""

import multiprocessing
import os
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from plexrl.errors import (
    ConflictError,
    InvalidRequestError,
    PermissionDeniedError,
    StaleTokenError,
    StateLostError,
)
from plexrl.statemanager.layout.keys import StatePart
from tests.statemanager.conftest import (
    ALL_PARTS,
    MIB,
    Daemon,
    MakeShard,
    Shard,
    StartDaemon,
    run_together,
    wait_until,
)


def test_a_version_is_loaded_as_it_was_offloaded(daemon: Daemon, make_shard: MakeShard) -> None:
    shard = make_shard(daemon)
    expected = shard.fill(1)
    saved = shard.offload(1, meta={"step": 3})
    assert not shard.contents.any()
    loaded = shard.load(1)
    assert np.array_equal(shard.contents, expected)
    assert (loaded.parts, loaded.meta, loaded.tier) == (ALL_PARTS, {"step": 3}, "host")
    assert loaded.bytes_moved == saved.bytes_moved == expected.size


def _resident_while_told(pipe: Connection, daemon: Daemon) -> None:
    """A worker process: offloads and loads when told, reporting what it and its arena occupy."""
    shard = Shard(daemon, elements=8 * MIB)
    shard.register()
    shard.fill(1)
    actions = {"offload": lambda: shard.offload(1), "load": lambda: shard.load(1)}
    while True:
        fields = Path("/proc/self/statm").read_text().split()
        # Returned memory is the daemon's, even where it is still mapped.
        own = int(fields[1]) * os.sysconf("SC_PAGE_SIZE") - shard.arena.returned_bytes()
        pipe.send((own, shard.arena.resident_bytes()))
        told = pipe.recv()
        if told == "end":
            return
        actions[told]()


def test_offload_gives_the_workers_memory_back(daemon: Daemon, make_shard: MakeShard) -> None:
    observer = make_shard(daemon, registered=False)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(
        target=_resident_while_told, args=(theirs, Daemon(daemon.config)), daemon=True
    )
    worker.start()
    state = 64 * MIB
    rss_before, arena_before = ours.recv()
    host_before = observer.agent.usage()["host_bytes"]
    assert (arena_before, host_before) == (state, 0)

    ours.send("offload")
    rss_offloaded, arena_offloaded = ours.recv()
    usage = observer.agent.usage()
    assert arena_offloaded == 0
    assert rss_before - rss_offloaded > 0.95 * state
    assert state < usage["host_bytes"] < state + MIB
    assert usage["deployments"]["job/actor"]["arena_bytes"] == {"0": 0}
    assert (usage["device"]["lent_bytes"], usage["device"]["idle_bytes"]) == (0, state)

    ours.send("load")
    rss_loaded, arena_loaded = ours.recv()
    assert arena_loaded == state
    assert rss_loaded - rss_offloaded < 1.05 * state
    ours.send("end")
    worker.join()


def test_a_spilled_version_is_loaded_from_nvme(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(host_bytes=MIB)
    first = make_shard(daemon, deployment="a/actor")
    second = make_shard(daemon, deployment="b/actor", group="h")
    expected = first.fill(1)
    assert first.offload(1).tier == "host"
    second.fill(2)
    assert second.offload(2).tier == "host"
    assert [path.name for path in daemon.host_files()] == ["b%2Factor.0.state.2.2.version"]
    assert first.load(1).tier == "nvme"
    assert np.array_equal(first.contents, expected)
    assert second.load(2).tier == "host"


def test_a_version_too_large_for_the_host_tier_goes_to_nvme(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(host_bytes=1)
    shard = make_shard(daemon)
    expected = shard.fill(1)
    assert shard.offload(1).tier == "nvme"
    assert shard.load(1).tier == "nvme"
    assert np.array_equal(shard.contents, expected)


def test_ranks_offload_and_load_at_once(start_daemon: StartDaemon, make_shard: MakeShard) -> None:
    # Room for five of eight shards in the host tier, so that they make way for each other.
    daemon = start_daemon(host_bytes=5 * (MIB // 2) + 8 * 4096)
    shards = [make_shard(daemon, rank=rank, world_size=8) for rank in range(8)]
    for seq in range(1, 6):
        expected = [shard.fill(100 * seq + rank) for rank, shard in enumerate(shards)]
        run_together(*(partial(s.offload, seq, keep_seq=seq - 1) for s in shards))
        run_together(*(partial(s.load, seq) for s in shards))
        for shard, contents in zip(shards, expected, strict=True):
            assert np.array_equal(shard.contents, contents)
    usage = shards[0].agent.usage()
    assert usage["host_bytes"] <= usage["host_bytes_max"]
    assert len(usage["deployments"]["job/actor"]["versions"]) == 16


def test_a_snapshot_leaves_the_arena_and_can_be_gone_back_to(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = make_shard(daemon)
    expected = shard.fill(1)
    shard.snapshot(1)
    assert np.array_equal(shard.contents, expected)
    shard.fill(2)
    shard.load(1)
    assert np.array_equal(shard.contents, expected)


def test_only_the_named_parts_travel(daemon: Daemon, make_shard: MakeShard) -> None:
    shard = make_shard(daemon)
    expected = shard.fill(1)
    parts = frozenset({StatePart.OPTIMIZER})
    half = expected.size // 2
    assert shard.offload(1, parts=parts).bytes_moved == half
    loaded = shard.load(1)
    assert loaded.parts == parts
    assert not shard.contents[:half].any()
    assert np.array_equal(shard.contents[half:], expected[half:])


def test_old_versions_are_dropped_but_the_one_to_keep(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = make_shard(daemon)
    for seq in (1, 2, 3):
        shard.fill(seq)
        shard.snapshot(seq, keep_seq=1)
    versions = shard.agent.usage()["deployments"]["job/actor"]["versions"]
    assert [version["seq"] for version in versions] == [1, 3]
    with pytest.raises(StateLostError, match="version 2 of 'job/actor' is not on this node"):
        shard.load(2)
    shard.load(1)
    assert np.array_equal(shard.contents, shard.version(1))


def test_an_unchanged_arena_is_offloaded_without_a_copy(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = make_shard(daemon)
    expected = shard.fill(1)
    shard.snapshot(1)
    assert shard.offload(1).bytes_moved == 0
    shard.load(1)
    assert shard.offload(1).bytes_moved == 0
    shard.load(1)
    assert np.array_equal(shard.contents, expected)


def test_a_version_of_a_former_process_is_replaced(daemon: Daemon, make_shard: MakeShard) -> None:
    """A process that did not load it cannot know that its state is the same bit for bit."""
    former = make_shard(daemon)
    former.fill(1)
    former.snapshot(5)
    former.close()
    shard = make_shard(daemon)
    expected = shard.fill(2)
    assert shard.offload(5).bytes_moved == expected.size
    shard.load(5)
    assert np.array_equal(shard.contents, expected)
    assert len(daemon.host_files()) == 1


def test_a_changed_set_of_parts_is_not_taken_for_unchanged(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = make_shard(daemon)
    expected = shard.fill(1)
    shard.snapshot(1, parts=frozenset({StatePart.PARAMETER}))
    assert shard.offload(1).bytes_moved == expected.size
    shard.load(1)
    assert np.array_equal(shard.contents, expected)


def test_a_stale_token_moves_nothing(daemon: Daemon, make_shard: MakeShard) -> None:
    former = make_shard(daemon, deployment="a/actor", token=1)
    holder = make_shard(daemon, deployment="b/actor", token=2)
    expected = former.fill(1)
    for move in (
        lambda: former.offload(1),
        lambda: former.load(1),
        lambda: former.client.publish(seq=1, token=1),
        former.register,
    ):
        with pytest.raises(StaleTokenError, match="2 has been granted since"):
            move()
    assert np.array_equal(former.contents, expected)
    holder.offload(1)
    # The daemon notices a little later that the former holder's first connection has ended.
    wait_until(lambda: list(holder.agent.usage()["deployments"]) == ["b/actor"])


def test_tokens_of_one_group_say_nothing_about_another(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    make_shard(daemon, deployment="a/actor", group="g", token=9)
    other = make_shard(daemon, deployment="b/actor", group="h", token=1)
    other.offload(1)


def test_a_refused_registration_leaves_the_client_usable(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    make_shard(daemon, deployment="b/actor", token=7)
    late = make_shard(daemon, token=6, registered=False)
    with pytest.raises(StaleTokenError):
        late.register()
    with pytest.raises(PermissionDeniedError, match="register an arena"):
        late.load(1)
    late.token = 8
    late.register()
    late.offload(1)


def test_a_process_whose_rank_was_taken_over_is_refused(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    former = make_shard(daemon)
    successor = make_shard(daemon)
    expected = successor.fill(2)
    successor.offload(1)
    with pytest.raises(ConflictError, match="registered by another process"):
        former.offload(1)
    successor.load(1)
    assert np.array_equal(successor.contents, expected)


def test_a_version_does_not_go_into_an_arena_of_another_model(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = make_shard(daemon, elements=1024)
    shard.offload(1)
    smaller = make_shard(daemon, elements=512)
    with pytest.raises(InvalidRequestError, match="shape"):
        smaller.load(1)


def test_the_dropped_arena_of_a_dead_worker_is_forgotten(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = make_shard(daemon)
    shard.offload(1)
    observer = make_shard(daemon, registered=False)
    shard.client.close()
    wait_until(lambda: observer.agent.usage()["deployments"]["job/actor"]["arena_bytes"] == {})
    assert observer.agent.usage()["deployments"]["job/actor"]["versions"]


def test_release_leaves_no_version_no_arena_and_no_descriptor(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(host_bytes=MIB)
    observer = make_shard(daemon, registered=False)
    observer.agent.usage()
    descriptors = daemon.descriptors()
    shards = []
    for rank in range(3):
        shard = make_shard(daemon, rank=rank, world_size=3)
        shards.append(shard)
        shard.offload(1)
        shard.load(1)
        shard.client.publish(seq=1, token=1)
        shard.client.pull(
            sources=[daemon.config.listen], source="job/actor", seq=1, wants=shard.slices[:1]
        )
    assert daemon.nvme_files()
    observer.agent.release("job/actor")
    # A pull's hold on what it reads ends with its connection, which the daemon sees a moment later.
    wait_until(lambda: observer.agent.usage()["host_bytes"] == 0)
    usage = observer.agent.usage()
    assert (usage["nvme_bytes"], usage["deployments"]) == (0, {})
    assert not daemon.host_files()
    assert not daemon.nvme_files()
    with pytest.raises(ConflictError, match="released"):
        shard.offload(2)
    for shard in shards:
        shard.close()
    wait_until(lambda: daemon.descriptors() == descriptors)


def test_a_token_beyond_any_grant_does_not_shut_others_out(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = make_shard(daemon)
    shard.offload(1)
    shard.token = 1 << 60
    with pytest.raises(InvalidRequestError, match="the scheduler granted"):
        shard.load(1)
    shard.token = 2
    shard.load(1)
