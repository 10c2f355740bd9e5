"""Pulls over TCP when the network or the other end misbehaves."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

from plexrl.errors import (
    AuthenticationError,
    ConnectionLostError,
    InvalidRequestError,
    PermissionDeniedError,
    StateLostError,
    UnavailableError,
    from_wire,
)
from plexrl.statemanager.daemon.tcp.requests import BASES_MAX
from plexrl.statemanager.layout.strided.copies import StridedCopies, concatenate
from plexrl.statemanager.protocol.tickets import Claims, TicketKey, TicketRole
from plexrl.statemanager.transfer.transport.copy_stream import encode_copies
from plexrl.statemanager.transfer.transport.handshake import greet_server
from plexrl.statemanager.transfer.transport.tcp.client import Tcp
from plexrl.wire.framing import recv_frame, send_frame
from tests.statemanager.conftest import NETWORK, Daemon, StartDaemon, wait_until
from tests.statemanager.weight_sync import SERVING_TCP, Rank, fsdp

Tamper = Callable[[bytes, int], bytes | None]
"""Given what the server sent and how much went before; None cuts the connection."""


class Proxy:
    """Between a client and a server; passes on what `tamper` makes of the server's bytes."""

    def __init__(self, address: str, tamper: Tamper) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._to, self._tamper = (host, int(port)), tamper
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                server = socket.create_connection(self._to)
                for call in ((self._back, server, client), (self._forth, client, server)):
                    threading.Thread(target=call[0], args=call[1:], daemon=True).start()

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                passed = self._tamper(data, seen)
                seen += len(data)
                if passed is None:
                    break
                client.sendall(passed)
        for end in (client, server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _forth(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)


@pytest.fixture
def node(start_daemon: StartDaemon) -> Daemon:
    return start_daemon(**SERVING_TCP)


@pytest.fixture
def trainer(node: Daemon) -> Iterator[Rank]:
    rank = Rank(node, "job/actor", 0, fsdp(0, 1))
    rank.publish(1)
    yield rank
    rank.close()


@pytest.fixture
def rollout(node: Daemon) -> Iterator[Rank]:
    rank = Rank(node, "job/rollout", 0, fsdp(0, 1), timeout_s=5.0)
    yield rank
    rank.close()


READER = "job/rollout"


def connected(node: Daemon, ticket: bytes | None = None) -> socket.socket:
    host, _, port = node.tcp.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    try:
        greet_server(connection, node.worker_ticket(READER) if ticket is None else ticket)
    except BaseException:
        connection.close()
        raise
    return connection


def test_a_ticket_of_another_key_is_told_nothing(node: Daemon) -> None:
    claims = Claims(role=TicketRole.AGENT)
    with pytest.raises((ConnectionLostError, ConnectionResetError)):
        connected(node, TicketKey(b"another" * 8).mint(claims))


@pytest.mark.usefixtures("trainer")
def test_a_worker_of_another_job_is_refused(node: Daemon) -> None:
    tcp = Tcp(NETWORK, lambda _: None, 10.0, node.worker_ticket("other/rollout"))
    with (
        contextlib.ExitStack() as held,
        pytest.raises(PermissionDeniedError, match="deployments of job 'other'"),
    ):
        tcp.open(held, node.tcp, "job/actor", 1, ())


def test_a_server_of_another_key_is_not_believed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(32) + bytes(32))
        with pytest.raises(AuthenticationError, match="another ticket key"):
            greet_server(ours, TicketKey(bytes(32)).mint(Claims(role=TicketRole.AGENT)))


@pytest.mark.usefixtures("trainer")
def test_a_stream_that_is_cut_is_taken_up_by_another_source_with_what_is_missing(
    node: Daemon, rollout: Rank
) -> None:
    def cut(data: bytes, seen: int) -> bytes | None:
        return data if seen + len(data) < rollout.nbytes // 2 else None

    proxy = Proxy(node.tcp, cut)
    report = rollout.pull([proxy.address, node.tcp], 1)
    assert rollout.holds(1)
    assert report.attempts <= 2
    proxy.close()


@pytest.mark.usefixtures("trainer")
def test_a_source_that_always_cuts_is_given_up_and_leaves_the_target_marked(
    node: Daemon, rollout: Rank
) -> None:
    proxy = Proxy(node.tcp, lambda data, seen: data if seen < 30_000 else None)
    with pytest.raises(UnavailableError, match="could not be pulled in 4 attempts"):
        rollout.pull([proxy.address], 1)
    with pytest.raises(
        StateLostError, match="failed midway, so its arena holds no complete version"
    ):
        rollout.client.publish(seq=9, token=1)
    rollout.pull([node.tcp], 1)
    rollout.client.publish(seq=9, token=1)
    proxy.close()


def read_all(
    tcp: Tcp, node_address: str
) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], list[StridedCopies]]:
    """The trainer's version, in small pieces that make several batches."""
    with contextlib.ExitStack() as held:
        [source] = tcp.open(held, node_address, "job/actor", 1, ())
        nbytes = int(source.layout.byte_offsets.max()) + 4 * int(source.layout.shapes[-1].prod())
        starts = np.arange(0, nbytes, 64)
        ends = np.minimum(starts + 64, nbytes)
        ones, zeros = np.ones(len(starts), np.int64), np.zeros(len(starts), np.int64)
        copies = StridedCopies(
            src_offsets=starts,
            dst_offsets=starts,
            items=ends - starts,
            counts=ones,
            src_strides=zeros,
            dst_strides=zeros,
            casts=zeros - 1,
        )
        target = np.zeros(nbytes, np.uint8)
        arrived: list[StridedCopies] = []
        source.read(copies, target, lambda part, _: arrived.append(part))
        source.confirm()
    return target, arrived


def test_many_small_batches_bring_the_version(node: Daemon, trainer: Rank) -> None:
    tcp = Tcp(NETWORK, lambda _: None, 10.0, node.worker_ticket(READER))
    target, arrived = read_all(tcp, node.tcp)
    assert concatenate(arrived).nbytes == len(target)
    assert bytes(target) == bytes(trainer.arena.buffer[: len(target)])


def ask(connection: socket.socket, header: dict[str, object], payload: bytes = b"") -> object:
    """The result; raises what the server says."""
    send_frame(connection, header, payload)
    answer, _ = recv_frame(connection)
    if "error" in answer:
        raise from_wire(answer["error"])
    return answer["result"]


def run(place: int, items: int, count: int = 1, stride: int = 0, cast: int = -1) -> bytes:
    one = {
        "src_offsets": place,
        "items": items,
        "counts": count,
        "src_strides": stride,
        "casts": cast,
    }
    columns = {name: np.array([value], dtype=np.int64) for name, value in one.items()}
    zero = np.zeros(1, np.int64)
    return encode_copies(StridedCopies(**columns, dst_offsets=zero, dst_strides=zero))


@pytest.mark.usefixtures("trainer")
def test_nothing_but_the_version_is_read(node: Daemon) -> None:
    with connected(node) as connection:
        opened = ask(connection, {"type": "open", "source": "job/actor", "seq": 1})
        assert isinstance(opened, dict)
        [shard] = opened["shards"]
        read: dict[str, object] = {"type": "read", "shard": 0, "stamp": shard["stamp"]}
        end = shard["nbytes"]
        # Two of these come to 2**64 bytes.
        half = np.frombuffer(run(0, 1 << 15, count=1 << 48), dtype="<i8").reshape(-1, 1)
        wrapping = half.repeat(2, axis=1).tobytes()
        for payload in (
            run(0, end + 1),
            run(-1, 1),
            run(end, 1),
            run(0, 64, count=2, stride=end),
            run(0, 64, count=1 << 40, stride=1 << 40),
            run(0, -64),
            run(0, end, cast=1),
            run(0, 1, cast=10_000),
            # Wraps around to before the start, as the next one does to no bytes at all.
            run(2**63 - 1, 64),
            wrapping,
            # Far more than there is, over and over.
            run(0, 1 << 10, count=1 << 19),
            b"odd",
        ):
            with pytest.raises(InvalidRequestError):
                ask(connection, read, payload)
        with pytest.raises(StateLostError, match="no longer has the stamp"):
            ask(connection, {**read, "stamp": "other"}, run(0, 64))
        with pytest.raises(InvalidRequestError, match="shard 1 is not open"):
            ask(connection, {**read, "shard": 1}, run(0, 64))
        with pytest.raises(InvalidRequestError, match="malformed"):
            ask(connection, {"type": "remove"})
        assert ask(connection, {"type": "confirm"}) == {}


def test_a_version_that_is_read_outlives_its_successors_until_its_reader_goes(
    node: Daemon, trainer: Rank
) -> None:
    def host_bytes() -> int:
        with closing(node.agent()) as agent:
            return int(agent.usage()["host_bytes"])

    trainer.publish(2)
    with connected(node) as connection:
        before = host_bytes()
        ask(connection, {"type": "open", "source": "job/actor", "seq": 1})
        for version in (3, 4):
            # Nobody waits for the reader.
            trainer.publish(version)
        assert host_bytes() > before
    wait_until(lambda: host_bytes() == before)


@pytest.mark.usefixtures("trainer")
def test_a_reader_cannot_have_stamps_remembered_without_end(node: Daemon) -> None:
    with connected(node) as connection:
        opened = ask(connection, {"type": "open", "source": "job/actor", "seq": 1})
        assert isinstance(opened, dict)
        read: dict[str, object] = {"type": "read", "shard": 0, "delta": {}}
        read["stamp"] = opened["shards"][0]["stamp"]
        for number in range(BASES_MAX + 1):
            ask(connection, {**read, "base": str(number)}, run(0, 1))
        with pytest.raises(InvalidRequestError, match="too many bases"):
            ask(connection, {**read, "base": "one more"}, run(0, 1))
