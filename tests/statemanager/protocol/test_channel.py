"""Messages arrive whole with their descriptors, or the connection ends and nothing is left open."""

import array
import gc
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plexrl.errors import (
    ConnectionLostError,
    InvalidRequestError,
    PayloadTooLargeError,
    PlexRLError,
)
from plexrl.statemanager.protocol.channel import (
    BODY_BYTES_MAX,
    BUFFER_BYTES,
    DESCRIPTORS_AT_ONCE,
    DESCRIPTORS_MAX,
    Channel,
    Kind,
    close_all,
)
from tests.statemanager.conftest import DEADLINE_S

HEAD = struct.Struct("<IHBx")
NIL = b"\xc0"


def open_descriptors() -> int:
    gc.collect()  # What earlier tests left of theirs is not counted.
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    """A collection before each count would look through all modules of a long run."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    """A raw end, and the channel at the other."""
    raw, other = socket.socketpair()
    raw.settimeout(DEADLINE_S)
    with raw, Channel(other, receive_timeout_s=DEADLINE_S) as channel:
        yield raw, channel


@pytest.mark.parametrize("count", [0, 1, DESCRIPTORS_AT_ONCE, DESCRIPTORS_AT_ONCE + 1, 600])
@pytest.mark.parametrize("nbytes", [0, 100, BUFFER_BYTES, 5 * BUFFER_BYTES + 3])
def test_messages_arrive_as_they_were_sent(nbytes: int, count: int) -> None:
    left, right = (Channel(end, receive_timeout_s=DEADLINE_S) for end in socket.socketpair())
    with left, right, Path(__file__).open("rb") as file:
        inode = os.fstat(file.fileno()).st_ino
        before = open_descriptors()
        for _ in range(2):
            body = os.urandom(nbytes)
            sending = threading.Thread(
                target=left.send, args=(Kind.RESULT, body, [file.fileno()] * count)
            )
            sending.start()
            kind, received, fds = right.receive()
            sending.join()
            assert kind == Kind.RESULT
            assert msgspec.msgpack.decode(received) == body
            assert [os.fstat(fd).st_ino for fd in fds] == [inode] * count
            assert not any(os.get_inheritable(fd) for fd in fds)
            close_all(fds)
        assert open_descriptors() == before


def test_what_is_beyond_a_bound_is_not_sent(ends: tuple[socket.socket, Channel]) -> None:
    raw, channel = ends
    for body, fds in ((b"\0" * (BODY_BYTES_MAX + 1), ()), (None, (0,) * (DESCRIPTORS_MAX + 1))):
        with pytest.raises(PayloadTooLargeError):
            channel.send(Kind.RESULT, body, fds)
    with pytest.raises(InvalidRequestError, match="cannot be encoded"):
        channel.send(Kind.RESULT, 1 << 64)
    channel.send(Kind.RESULT, None)
    assert raw.recv(100) == HEAD.pack(1, 0, Kind.RESULT) + NIL


def receive_all(channel: Channel) -> None:
    while True:
        close_all(channel.receive()[2])


@given(st.binary(max_size=200), st.integers(0, 3))
@example(HEAD.pack(BODY_BYTES_MAX + 1, 0, 0), 0)
@example(HEAD.pack(1, DESCRIPTORS_MAX + 1, 0) + NIL, 1)
@example(HEAD.pack(1, 2, 0) + NIL, 1)
@example(HEAD.pack(1, 0, 0) + NIL, 1)
@example(HEAD.pack(1, 1, 0) + NIL + b"\0", 3)
@example(HEAD.pack(BODY_BYTES_MAX, 0, 0) + NIL, 2)
def test_any_stream_is_messages_or_a_typed_error(stream: bytes, count: int) -> None:
    raw, other = socket.socketpair()
    with raw, Channel(other) as channel:
        before = open_descriptors()
        if stream:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * count))]
            raw.sendmsg([stream], ancillary if count else [])
        raw.shutdown(socket.SHUT_WR)
        with pytest.raises(PlexRLError):
            receive_all(channel)
        assert open_descriptors() == before


def test_a_message_in_crumbs_arrives_whole(ends: tuple[socket.socket, Channel]) -> None:
    raw, channel = ends
    body = msgspec.msgpack.encode("crumbs")
    message = HEAD.pack(len(body), 1, Kind.REQUEST) + body

    def drip() -> None:
        socket.send_fds(raw, [message[:1]], [0])
        for index in range(1, len(message)):
            raw.sendall(message[index : index + 1])

    dripping = threading.Thread(target=drip)
    dripping.start()
    kind, received, fds = channel.receive()
    dripping.join()
    assert (kind, msgspec.msgpack.decode(received), len(fds)) == (Kind.REQUEST, "crumbs", 1)
    close_all(fds)


def test_a_peer_that_says_nothing_is_not_waited_for_longer_than_allowed() -> None:
    raw, other = socket.socketpair()
    with raw, Channel(other, receive_timeout_s=0.01) as channel, pytest.raises(BlockingIOError):
        channel.receive()


def test_the_end_of_the_peer_is_told(ends: tuple[socket.socket, Channel]) -> None:
    raw, channel = ends
    raw.close()
    with pytest.raises(ConnectionLostError, match="closed"):
        channel.receive()


def test_descriptors_where_none_are_expected_are_closed() -> None:
    left, right = (Channel(end, receive_timeout_s=DEADLINE_S) for end in socket.socketpair())
    with left, right, Path(__file__).open("rb") as file:
        left.send(Kind.RESULT, "plain")
        kind, body, fds = right.receive_plain()
        assert (kind, msgspec.msgpack.decode(body), fds) == (Kind.RESULT, "plain", [])
        before = open_descriptors()
        left.send(Kind.RESULT, "more", [file.fileno()])
        left.close()
        with pytest.raises(ConnectionLostError):
            right.receive_plain()
        assert open_descriptors() == before - 1
