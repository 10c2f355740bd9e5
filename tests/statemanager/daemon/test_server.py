"""The daemon's socket: admission, limits, and answers to malformed requests."""

import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from plexrl.errors import (
    InvalidRequestError,
    OverloadedError,
    PermissionDeniedError,
    from_wire,
)
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.daemon.server import check_peer
from plexrl.statemanager.device.backend import DeviceKind
from plexrl.statemanager.protocol.channel import Channel, Kind
from plexrl.statemanager.protocol.connection import connect, exchange
from plexrl.statemanager.protocol.messages import Confirm, Register, Save
from plexrl.wire.messages import SaveRequest
from tests.statemanager.conftest import (
    ALL_PARTS,
    DEADLINE_S,
    Daemon,
    MakeShard,
    StartDaemon,
    wait_until,
)

HEAD = struct.Struct("<IHBx")


@pytest.fixture
def connection(daemon: Daemon) -> Iterator[Channel]:
    """A worker's raw connection, for arbitrary bytes."""
    ticket = daemon.worker_ticket("job/actor")
    with connect(daemon.config.listen, DEADLINE_S, ticket) as connection:
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
def test_a_malformed_request_is_refused_and_the_connection_stays(
    connection: Channel, request_plain: object
) -> None:
    for _ in range(2):
        connection.send(Kind.REQUEST, request_plain)
        kind, body, _ = connection.receive()
        assert kind == Kind.ERROR
        error = from_wire(msgspec.msgpack.decode(body))
        assert isinstance(error, InvalidRequestError)
        assert "malformed" in error.message


@pytest.mark.parametrize(
    "stream",
    [
        HEAD.pack(1 << 31, 0, Kind.REQUEST),
        HEAD.pack(1, 1025, Kind.REQUEST),
        HEAD.pack(1, 1, Kind.REQUEST) + b"\xc0" + b"\0",
        HEAD.pack(0, 0, Kind.RESULT),
        HEAD.pack(1, 0, 7) + b"\xc0",
        2 * (HEAD.pack(1, 0, Kind.REQUEST) + b"\xc0"),
        b"\xff" * 1000,
    ],
    ids=[
        *("huge body", "too many descriptors", "a descriptor that is none", "an answer"),
        *("unknown kind", "two at once", "noise"),
    ],
)
def test_an_oversized_frame_ends_only_its_connection(
    daemon: Daemon, make_shard: MakeShard, stream: bytes
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(DEADLINE_S)
        peer.connect(daemon.config.listen)
        peer.sendall(stream)
        with suppress(ConnectionResetError):
            assert peer.recv(1) == b""
    make_shard(daemon).offload(1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"segment_bytes": (1 << 18,)}, "do not hold an arena of"),
        ({"segment_bytes": (1 << 30,)}, "0 descriptors came for 1 segments"),
        ({"keeps_memory": True}, "registered no arena on that device before"),
        ({"kind": DeviceKind.CUDA}, "this node's StateManager allocates cpu memory"),
    ],
)
def test_a_registration_without_its_memory_is_refused(
    connection: Channel,
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
    with pytest.raises(InvalidRequestError, match=message):
        exchange(connection, structs.replace(request, **fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arena_offset": 1 << 40}, "of an arena of"),
        ({"arena_offset": -64}, "not a multiple of 64"),
        ({"arena_offset": 4}, "not a multiple of 64"),
        ({"offset": (1,)}, "out of its tensor"),
        ({"shape": (-1,)}, "out of its tensor"),
        ({"shape": (1, 1)}, "of different ranks"),
        ({"dtype": "F99"}, "unknown dtype"),
    ],
)
def test_an_invalid_slice_is_refused(
    daemon: Daemon, make_shard: MakeShard, change: dict[str, object], message: str
) -> None:
    shard = make_shard(daemon, registered=False)
    wrong = replace(shard.slices[0], **change)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidRequestError, match=message):
        shard.client.register(shard.arena, [wrong], group="g", token=1)


def test_a_refused_registration_leaks_no_descriptor(daemon: Daemon, make_shard: MakeShard) -> None:
    shard = make_shard(daemon, registered=False)
    observer = make_shard(daemon, registered=False)
    observer.agent.usage()
    before = daemon.descriptors()
    wrong = replace(shard.slices[0], arena_offset=4)
    for _ in range(5):
        with pytest.raises(InvalidRequestError):
            shard.client.register(shard.arena, [wrong], group="g", token=1)
    wait_until(lambda: daemon.descriptors() == before)


@pytest.mark.parametrize("meta", ["", "{", "[" * 100_000, '"\\ud800"', str(1 << 64)])
def test_metadata_that_a_load_cannot_return_is_refused(
    daemon: Daemon, make_shard: MakeShard, meta: str
) -> None:
    shard = make_shard(daemon)
    request = Save(
        order=SaveRequest(seq=1, token=1), parts=tuple(ALL_PARTS), meta_json=meta, same_as=None
    )
    with pytest.raises(InvalidRequestError, match="metadata is not valid JSON"):
        shard.client._link.call(request)
    assert not daemon.host_files()


def test_a_connection_beyond_the_maximum_is_refused(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(connections_max=3)
    served = [make_shard(daemon, rank=rank, world_size=4) for rank in range(3)]
    late = make_shard(daemon, rank=3, world_size=4, registered=False)
    with pytest.raises(OverloadedError, match="serves 3 connections, its maximum"):
        late.client.request(Confirm())
    served[0].client.close()

    def is_served() -> bool:
        try:
            late.client.request(Confirm())
        except OverloadedError:
            return False
        return True

    wait_until(is_served)
    served[1].offload(1)


def test_the_daemon_survives_a_lack_of_descriptors(daemon: Daemon, make_shard: MakeShard) -> None:
    shard = make_shard(daemon, registered=False)
    shard.client.request(Confirm())
    usual = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (4, usual[1]))
    early = make_shard(daemon, rank=1, world_size=2, registered=False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(daemon.config.listen)
        time.sleep(0.3)
        shard.client.request(Confirm())
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, usual)
    early.client.request(Confirm())


def test_another_users_process_is_refused() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        check_peer(ours, frozenset({os.getuid()}))
        with pytest.raises(PermissionDeniedError, match=f"does not serve user {os.getuid()}"):
            check_peer(ours, frozenset({os.getuid() + 1}))


def test_a_client_that_is_not_a_worker_cannot_move_state(daemon: Daemon) -> None:
    client = daemon.agent()
    assert client.usage()["node"] == daemon.config.node
    with pytest.raises(PermissionDeniedError):
        client.publish(seq=1, token=1)
    client.close()


@pytest.mark.parametrize("field", ["host_bytes", "nvme_bytes", "published_versions"])
def test_a_capacity_below_one_is_refused(field: str) -> None:
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
