"""Who may speak to the daemon, how much, and what it answers to nonsense."""

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
from msgspec import structs

from plexrl.errors import (
    ConnectionLostError,
    InvalidRequestError,
    OverloadedError,
    PermissionDeniedError,
)
from plexrl.statemanager.arena import Arena
from plexrl.statemanager.client import StateManagerClient
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.device.backend import DeviceKind
from plexrl.statemanager.protocol import Register, recv_answer, send_request
from plexrl.statemanager.server import check_peer
from plexrl.wire.framing import send_frame
from tests.statemanager.conftest import Daemon, MakeShard, StartDaemon, wait_until


@pytest.fixture
def connection(daemon: Daemon) -> Iterator[socket.socket]:
    """A bare connection to the daemon."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(20.0)
        connection.connect(daemon.config.listen)
        yield connection


@pytest.mark.parametrize(
    "request_plain",
    [
        {"type": "Erase"},
        {"type": "Load", "seq": "one", "token": 1},
        {"type": "Load", "token": 1},
        {},
        "load",
        None,
    ],
)
def test_a_malformed_request_is_refused_and_the_connection_goes_on(
    connection: socket.socket, request_plain: object
) -> None:
    for _ in range(2):
        send_frame(connection, {"request": request_plain, "fds": 0})
        with pytest.raises(InvalidRequestError, match="malformed"):
            recv_answer(connection)


@pytest.mark.parametrize(
    "stream",
    [
        struct.pack("<IQ", 1 << 31, 0),
        struct.pack("<IQ", 1, 1 << 20),
        struct.pack("<IQ", 4, 0) + b"\xc1\xc1\xc1\xc1",
        struct.pack("<IQ", 8, 0) + b"\x81\xa3fds\xcd\xff\xff",
    ],
    ids=["huge header", "a payload", "no msgpack", "too many descriptors"],
)
def test_a_stream_out_of_bounds_ends_its_connection_only(
    daemon: Daemon, make_shard: MakeShard, connection: socket.socket, stream: bytes
) -> None:
    connection.sendall(stream)
    with pytest.raises((ConnectionLostError, ConnectionResetError)):
        recv_answer(connection)
    make_shard(daemon).offload(1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"segment_bytes": (1 << 18,)}, "do not hold an arena of"),
        ({"segment_bytes": (1 << 30,)}, "0 segments came; 1 are named"),
        ({"keeps_memory": True}, "registered no arena on that device before"),
        ({"kind": DeviceKind.CUDA}, "this node's StateManager lends cpu memory"),
    ],
)
def test_a_registration_of_memory_that_is_not_there_is_refused(
    connection: socket.socket,
    daemon: Daemon,
    make_shard: MakeShard,
    fields: dict[str, object],
    message: str,
) -> None:
    shard = make_shard(daemon, registered=False)
    request = Register(
        deployment="job/actor",
        rank=0,
        world_size=1,
        group="g",
        token=1,
        slices=shard.slices,
        arena_bytes=shard.arena.nbytes,
        kind=DeviceKind.CPU,
        device=0,
    )
    send_request(connection, structs.replace(request, **fields))
    with pytest.raises(InvalidRequestError, match=message):
        recv_answer(connection)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arena_offset": 1 << 40}, "of an arena of"),
        ({"arena_offset": -64}, "not a multiple of 64"),
        ({"arena_offset": 4}, "not a multiple of 64"),
        ({"offset": (1,)}, "out of its tensor"),
        ({"shape": (-1,)}, "out of its tensor"),
        ({"shape": (1, 1)}, "numbers of dimensions"),
        ({"dtype": "F99"}, "unknown dtype"),
    ],
)
def test_a_slice_that_cannot_be_is_refused(
    daemon: Daemon, make_shard: MakeShard, change: dict[str, object], message: str
) -> None:
    shard = make_shard(daemon, registered=False)
    wrong = replace(shard.slices[0], **change)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidRequestError, match=message):
        shard.client.register(shard.arena, [wrong], group="g", token=1)


def test_a_refused_registration_leaks_no_descriptor(daemon: Daemon, make_shard: MakeShard) -> None:
    shard = make_shard(daemon, registered=False)
    observer = make_shard(daemon, registered=False)
    observer.client.usage()
    before = daemon.descriptors()
    wrong = replace(shard.slices[0], arena_offset=4)
    for _ in range(5):
        with pytest.raises(InvalidRequestError):
            shard.client.register(shard.arena, [wrong], group="g", token=1)
    wait_until(lambda: daemon.descriptors() == before)


def test_a_connection_beyond_the_bound_is_told_so(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(connections_max=3)
    served = [make_shard(daemon, rank=rank, world_size=4) for rank in range(3)]
    late = make_shard(daemon, rank=3, world_size=4, registered=False)
    with pytest.raises(OverloadedError, match="serves 3 connections already"):
        late.client.usage()
    served[0].client.close()

    def is_served() -> bool:
        try:
            late.client.usage()
        except OverloadedError:
            return False
        return True

    wait_until(is_served)
    served[1].offload(1)


def test_another_users_process_is_refused() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        check_peer(ours, frozenset({os.getuid()}))
        with pytest.raises(PermissionDeniedError, match=f"user {os.getuid()} is not"):
            check_peer(ours, frozenset({os.getuid() + 1}))


def test_a_client_that_is_not_a_worker_may_ask_but_not_move(daemon: Daemon) -> None:
    client = StateManagerClient(
        daemon.config.listen, deployment="", rank=0, world_size=1, timeout_s=20.0
    )
    assert client.usage()["node"] == daemon.config.node
    with pytest.raises(PermissionDeniedError):
        client.publish(seq=1, token=1)
    client.close()


@pytest.mark.parametrize("field", ["host_bytes", "nvme_bytes", "published_versions"])
def test_a_bound_below_one_is_refused(field: str) -> None:
    fields = {"host_bytes": 1, "nvme_bytes": 1, field: 0}
    with pytest.raises(InvalidRequestError, match=field):
        StateManagerConfig(
            node="n",
            listen="/tmp/s",
            host_dir="/dev/shm/s",
            nvme_dir="/tmp/n",
            **fields,  # type: ignore[arg-type]  # integers all
        )


def test_an_arena_needs_no_daemon_until_it_is_registered() -> None:
    arena = Arena(5000)
    assert arena.nbytes == 8192
    arena.buffer[0] = 7
    view = arena.buffer[:1]
    arena.detach()
    assert view[0] == 0
    arena.close()
    arena.close()
    assert view[0] == 0, "a view keeps the addresses"
