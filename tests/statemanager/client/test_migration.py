"""A version goes from one daemon to another: whole, verified, and as often as it is asked."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from plexrl.errors import (
    CorruptStateError,
    InvalidRequestError,
    PermissionDeniedError,
    PlexRLError,
    StateLostError,
    StateTierFullError,
    UnavailableError,
)
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.client.migration import migrate
from plexrl.statemanager.client.reports import MoveReport
from plexrl.statemanager.layout.versions import NO_DIGEST, Extent, VersionKind
from plexrl.statemanager.protocol.channel import Channel, close_all
from plexrl.statemanager.protocol.connection import connect, exchange
from plexrl.statemanager.protocol.messages import Adopt, OpenState, StoredShard
from plexrl.statemanager.protocol.tickets import TicketRole
from tests.statemanager.conftest import (
    DEADLINE_S,
    MIB,
    Daemon,
    MakeShard,
    StartDaemon,
    wait_until,
)

STATE = MIB // 2
"""Bytes of a shard as `make_shard` makes it."""
ROOM = STATE + MIB // 4
"""Bound of a tier that takes one such shard."""
NAME = "job/actor"


def offloaded(
    daemon: Daemon, make_shard: MakeShard, *, ranks: int = 1, seq: int = 1, **fields: int
) -> list[npt.NDArray[np.uint8]]:
    """Have a deployment's version in the daemon, its workers gone; returns what it holds."""
    contents = []
    for rank in range(ranks):
        shard = make_shard(daemon, rank=rank, world_size=ranks, **fields)
        # The arena may be a little larger than what lies in it.
        contents.append(shard.fill(100 * seq + rank)[: sum(s.nbytes for s in shard.slices)])
        shard.offload(seq, meta={"step": seq})
        shard.client.close()
    return contents


def move(source: Daemon, target: Daemon, *, seq: int = 1, **fields: object) -> MoveReport:
    return migrate(
        [source.config.listen],
        target.config.listen,
        deployment=NAME,
        seq=seq,
        ticket=target.ticket(role=TicketRole.AGENT),
        **{"timeout_s": DEADLINE_S, **fields},  # type: ignore[arg-type]  # of any parameter
    )


def check_loads(
    daemon: Daemon,
    make_shard: MakeShard,
    expected: list[npt.NDArray[np.uint8]],
    *,
    seq: int = 1,
    tier: str | None = None,
) -> None:
    for rank, contents in enumerate(expected):
        shard = make_shard(daemon, rank=rank, world_size=len(expected), elements=contents.size // 8)
        report = shard.load(seq)
        assert report.meta == {"step": seq}
        assert tier in (None, report.tier)
        assert np.array_equal(shard.contents[: contents.size], contents)


def opened(daemon: Daemon, request: OpenState) -> tuple[Channel, list[StoredShard], list[int]]:
    """What the daemon answers, and the connection that keeps it in place."""
    connection = connect(daemon.config.listen, DEADLINE_S, daemon.ticket(role=TicketRole.AGENT))
    try:
        answer, fds = exchange(connection, request)
    except PlexRLError:
        connection.close()
        raise
    return connection, msgspec.convert(answer["shards"], list[StoredShard]), fds


def observer(daemon: Daemon) -> closing[StateManagerClient]:
    return closing(daemon.agent())


def ranks_held(daemon: Daemon, seq: int = 1) -> dict[int, str]:
    """Tier of every rank's version."""
    with observer(daemon) as client:
        versions = client.usage()["deployments"].get(NAME, {"versions": []})["versions"]
    return {v["rank"]: v["tier"] for v in versions if v["seq"] == seq and v["kind"] == "state"}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("source_host_bytes", [1, 64 * MIB], ids=["from nvme", "from host"])
@pytest.mark.parametrize("target_host_bytes", [1, 64 * MIB], ids=["to nvme", "to host"])
@pytest.mark.parametrize("elements", [64 * 1024, 1024 * 1024 + 16], ids=["small", "odd"])
def test_a_version_loads_bit_for_bit_where_it_was_moved_to(
    start_daemon: StartDaemon,
    make_shard: MakeShard,
    ranks: int,
    source_host_bytes: int,
    target_host_bytes: int,
    elements: int,
) -> None:
    source = start_daemon(host_bytes=source_host_bytes)
    target = start_daemon(host_bytes=target_host_bytes)
    expected = offloaded(source, make_shard, ranks=ranks, elements=elements)
    report = move(source, target)
    tier = "nvme" if target_host_bytes == 1 else "host"
    assert (report.bytes_moved, report.tier) == (ranks * elements * 8, tier)
    check_loads(target, make_shard, expected, tier=tier)
    # The source gives up nothing before it is told to.
    check_loads(source, make_shard, expected)


def test_a_version_that_is_there_is_not_moved_again(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(), start_daemon()
    expected = offloaded(source, make_shard, ranks=2)
    assert move(source, target).bytes_moved == 2 * STATE
    assert move(source, target).bytes_moved == 0
    with observer(source) as client:
        client.release(NAME)
    assert move(source, target).bytes_moved == 0
    source.kill()
    assert move(source, target, timeout_s=2.0).bytes_moved == 0
    check_loads(target, make_shard, expected)


def test_a_power_cut_after_a_move_loses_nothing(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(), start_daemon()
    expected = offloaded(source, make_shard, ranks=2)
    move(source, target)
    with observer(source) as client:
        client.release(NAME)
    target.kill()
    for path in target.host_files():
        path.unlink()
    target.start()
    check_loads(target, make_shard, expected, tier="nvme")


def test_a_move_needs_no_space_on_nvme(start_daemon: StartDaemon, make_shard: MakeShard) -> None:
    source, target = start_daemon(), start_daemon(nvme_bytes=1)
    expected = offloaded(source, make_shard, ranks=2)
    assert move(source, target).bytes_moved == 2 * STATE
    check_loads(target, make_shard, expected, tier="host")


def test_a_version_goes_there_and_back_and_its_later_one_too(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    first, second = start_daemon(), start_daemon(host_bytes=1)
    offloaded(first, make_shard, seq=1)
    move(first, second)
    later = offloaded(second, make_shard, seq=2)
    assert move(second, first, seq=2).bytes_moved == STATE
    check_loads(first, make_shard, later, seq=2)


def test_a_version_of_another_history_is_replaced(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(), start_daemon()
    shard = make_shard(target)
    shard.fill(9)
    shard.offload(1)
    expected = offloaded(source, make_shard)
    assert move(source, target).bytes_moved == STATE
    check_loads(target, make_shard, expected)


def test_a_left_over_version_of_more_ranks_at_the_target_demands_none(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(), start_daemon()
    make_shard(target, rank=2, world_size=4).offload(1)
    expected = offloaded(source, make_shard, ranks=2)
    assert move(source, target).bytes_moved == 2 * STATE
    check_loads(target, make_shard, expected)


def test_ranks_are_collected_from_several_nodes(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    sources, target = [start_daemon(), start_daemon()], start_daemon()
    expected = []
    for rank, daemon in enumerate(sources):
        shard = make_shard(daemon, rank=rank, world_size=2)
        expected.append(shard.fill(rank))
        shard.offload(1, meta={"step": 1})
    with pytest.raises(StateLostError, match="rank 1 is on no StateManager"):
        move(sources[0], target)
    assert ranks_held(target) == {}
    paths = [daemon.config.listen for daemon in sources]
    migrate(
        paths,
        target.config.listen,
        deployment=NAME,
        seq=1,
        ticket=target.ticket(role=TicketRole.AGENT),
    )
    check_loads(target, make_shard, expected)


def test_only_the_ranks_that_are_asked_for_move(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(), start_daemon()
    offloaded(source, make_shard, ranks=2)
    assert move(source, target, ranks=(1,)).bytes_moved == STATE
    assert ranks_held(target) == {1: "host"}


def test_a_migration_cut_between_ranks_goes_on_where_it_ended(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(), start_daemon()
    expected = offloaded(source, make_shard, ranks=2)
    move(source, target, ranks=(0,))
    target.kill()
    with pytest.raises(UnavailableError, match="cannot be reached"):
        move(source, target, timeout_s=0.2)
    target.start()
    assert move(source, target).bytes_moved == STATE
    check_loads(target, make_shard, expected)


@pytest.mark.parametrize("target_host_bytes", [1, 256 * MIB], ids=["to nvme", "to host"])
def test_a_target_killed_amid_a_migration_is_left_with_whole_versions_only(
    start_daemon: StartDaemon, make_shard: MakeShard, target_host_bytes: int
) -> None:
    source, target = start_daemon(), start_daemon(host_bytes=target_host_bytes)
    elements, ranks = 2 * MIB, 4
    expected = offloaded(source, make_shard, ranks=ranks, elements=elements)
    for files in range(1, ranks):
        with ThreadPoolExecutor(1) as pool:
            moving = pool.submit(move, source, target)
            wait_until(partial(_has_come_to, target, files))
            target.kill()
            target.start()
            # The client finds the new daemon and asks for the same rank again.
            assert moving.result(timeout=DEADLINE_S).bytes_moved <= ranks * elements * 8
        with observer(target) as client:
            client.release(NAME)
    move(source, target)
    check_loads(target, make_shard, expected)
    assert not [
        path for path in (*target.host_files(), *target.nvme_files()) if ".part" in path.name
    ]


def _has_come_to(daemon: Daemon, versions: int) -> bool:
    files = (*daemon.host_files(), *daemon.nvme_files())
    return len([path for path in files if path.suffix == ".version"]) >= versions


@pytest.mark.parametrize("target_host_bytes", [1, 64 * MIB], ids=["to nvme", "to host"])
def test_a_damaged_version_is_refused_and_nothing_of_it_stays(
    start_daemon: StartDaemon, make_shard: MakeShard, target_host_bytes: int
) -> None:
    source, target = start_daemon(host_bytes=1), start_daemon(host_bytes=target_host_bytes)
    offloaded(source, make_shard)
    [path] = source.nvme_objects()
    contents = bytearray(path.read_bytes())
    contents[4096 + STATE // 2] ^= 1
    path.write_bytes(contents)
    with pytest.raises(CorruptStateError, match="arrived damaged") as caught:
        move(source, target)
    assert caught.value.details == {"deployment": NAME, "rank": 0, "seq": 1}
    _check_empty(target)


def test_a_version_cut_short_is_refused(start_daemon: StartDaemon, make_shard: MakeShard) -> None:
    source, target = start_daemon(host_bytes=1), start_daemon()
    offloaded(source, make_shard)
    [path] = source.nvme_objects()
    path.write_bytes(path.read_bytes()[: 4096 + STATE // 2])
    with pytest.raises(CorruptStateError, match="its data ends"):
        move(source, target)
    _check_empty(target)


def test_a_version_saved_to_memory_is_verified_too(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(), start_daemon()
    offloaded(source, make_shard)
    connection, [shard], fds = opened(source, OpenState(deployment=NAME, seq=1))
    assert shard.manifest.digest != NO_DIGEST
    with connection, observer(target) as client:
        with open_segment(source, fds[shard.regions[0].fd]) as file:
            file.seek(shard.regions[0].offset)
            file.write(b"\xff" * 64)
        with pytest.raises(CorruptStateError, match="arrived damaged"):
            client.adopt(shard, fds)
        close_all(fds)
    _check_empty(target)


def test_a_target_without_room_refuses_and_keeps_what_it_has(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(), start_daemon(host_bytes=ROOM, nvme_bytes=ROOM)
    expected = offloaded(source, make_shard, ranks=2)
    other = make_shard(target, deployment="b/actor")
    kept = other.fill(7)
    other.offload(1)
    with pytest.raises(StateTierFullError, match="end a job or raise host_bytes"):
        move(source, target)
    # The first rank has come, for which the other deployment's version was spilled.
    assert ranks_held(target) == {0: "host"}
    other.load(1)
    assert np.array_equal(other.contents, kept)
    other.agent.release("b/actor")
    assert move(source, target).bytes_moved == STATE
    check_loads(target, make_shard, expected)


def test_a_file_system_without_room_refuses(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(), start_daemon()
    target.limit_files(STATE // 2)
    expected = offloaded(source, make_shard)
    with pytest.raises(StateTierFullError, match=r"file system is full|has no space"):
        move(source, target)
    _check_empty(target)
    check_loads(source, make_shard, expected)


def test_an_unknown_version_is_lost(start_daemon: StartDaemon, make_shard: MakeShard) -> None:
    source, target = start_daemon(), start_daemon()
    offloaded(source, make_shard)
    with pytest.raises(StateLostError, match="version 2 of 'job/actor' is on no StateManager"):
        move(source, target, seq=2)
    with pytest.raises(StateLostError, match="version 2 of 'job/actor' is not on this node"):
        opened(source, OpenState(deployment=NAME, seq=2))
    with pytest.raises(StateLostError, match="rank 5"):
        move(source, target, ranks=(0, 5))
    _check_empty(target)


def test_a_published_version_is_not_taken_for_state(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(), start_daemon()
    make_shard(source).client.publish(seq=1, token=1)
    with pytest.raises(StateLostError):
        move(source, target)


def test_a_source_that_is_gone_is_said_to_be_unreachable_not_empty(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(), start_daemon()
    offloaded(source, make_shard)
    source.kill()
    with pytest.raises(UnavailableError, match="cannot be reached"):
        move(source, target, timeout_s=0.2)
    source.start()
    assert move(source, target).bytes_moved == STATE


def test_a_version_dropped_while_it_is_open_arrives_all_the_same(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(), start_daemon()
    expected = offloaded(source, make_shard, ranks=2)
    connection, shards, fds = opened(source, OpenState(deployment=NAME, seq=1))
    with connection, observer(source) as at_source, observer(target) as client:
        at_source.release(NAME)
        for shard in shards:
            assert client.adopt(shard, fds).bytes_moved == STATE
        close_all(fds)
        assert at_source.usage()["host_bytes"] >= 2 * STATE
        connection.close()
        wait_until(lambda: at_source.usage()["host_bytes"] == 0)
    check_loads(target, make_shard, expected)


def test_a_worker_may_neither_open_nor_adopt(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(), start_daemon()
    offloaded(source, make_shard)
    worker = make_shard(target)
    connection, [shard], fds = opened(source, OpenState(deployment=NAME, seq=1))
    with connection:
        with pytest.raises(PermissionDeniedError, match="is for the node agent"):
            worker.client.adopt(shard, fds)
        with pytest.raises(PermissionDeniedError, match="is for the node agent"):
            worker.client.request(OpenState(deployment=NAME, seq=1))
        close_all(fds)
    assert ranks_held(target) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"kind": VersionKind.PUBLISHED},
        {"rank": 1},
        {"rank": -1},
        {"stamp": ""},
        {"nbytes": 1 << 50},
        {"nbytes": -1},
        {"extents": ()},
        {"extents": (Extent(arena_offset=0, file_offset=1 << 40, nbytes=STATE),)},
        {"slices": ()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_manifest_that_cannot_be_is_refused(
    start_daemon: StartDaemon, make_shard: MakeShard, change: dict[str, object]
) -> None:
    source, target = start_daemon(), start_daemon()
    offloaded(source, make_shard)
    connection, [shard], fds = opened(source, OpenState(deployment=NAME, seq=1))
    wrong = replace(shard.manifest, **change)  # type: ignore[arg-type]  # wrong on purpose
    with connection, observer(target) as client:
        with pytest.raises(InvalidRequestError):
            client.adopt(replace(shard, manifest=wrong), fds)
        for offset in (-4096, 1):
            elsewhere = replace(shard.regions[0], offset=offset)
            with pytest.raises(InvalidRequestError, match="at the invalid offset"):
                client.adopt(replace(shard, regions=(elsewhere,)), fds)
        with pytest.raises(CorruptStateError, match="its data ends"):
            client.adopt(replace(shard, regions=()), fds)
        with pytest.raises(InvalidRequestError, match="regions refer to descriptors beyond"):
            client.request(Adopt(manifest=shard.manifest, regions=shard.regions))
        close_all(fds)
    _check_empty(target)


def test_an_adopted_version_survives_its_daemon(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(), start_daemon()
    expected = offloaded(source, make_shard)
    move(source, target)
    target.terminate()
    target.start()
    check_loads(target, make_shard, expected, tier="nvme")


def test_no_descriptor_is_left_open(start_daemon: StartDaemon, make_shard: MakeShard) -> None:
    source, target = start_daemon(), start_daemon()
    # Before any client: that of a client that has left is closed only when the daemon sees it.
    before = source.descriptors(), target.descriptors()
    offloaded(source, make_shard)
    gc.collect()  # What earlier tests left of theirs is not counted.
    here = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        move(source, target)
        with observer(target) as client:
            client.release(NAME)
    assert len(list(Path("/proc/self/fd").iterdir())) == here
    wait_until(lambda: (source.descriptors(), target.descriptors()) == before)


def open_segment(daemon: Daemon, fd: int) -> BinaryIO:
    """The file of the host tier behind a descriptor, to write to."""
    wanted = os.fstat(fd).st_ino
    found = Path(daemon.config.host_dir).glob("*.segment")
    return next(path for path in found if path.stat().st_ino == wanted).open("r+b")


def _check_empty(daemon: Daemon) -> None:
    with observer(daemon) as client:
        usage = client.usage()
    assert (usage["host_bytes"], usage["nvme_bytes"]) == (0, 0)
    assert not daemon.host_files()
    assert not daemon.nvme_files()
    assert not daemon.nvme_objects()
