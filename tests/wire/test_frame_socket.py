"""Frames on a loop's own socket: whole, in order, and never waiting for a peer that is gone."""

import asyncio
import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plexrl.errors import ConnectionLostError, InvalidRequestError
from plexrl.wire.framing import (
    FILE_KEY,
    MappedFile,
    encode_head,
    recv_frame,
    recv_frame_or_file,
    send_frame,
)
from plexrl.wire.links.credentials import Role
from plexrl.wire.links.dial import BlockingSocket
from plexrl.wire.links.frame_socket import FrameSocket
from plexrl.wire.links.tls_socket import TlsSocket
from tests.certificates import TestAuthority

DEADLINE_S = 60.0


Pair = tuple[socket.socket, BlockingSocket]
"""A connected socket, plain or TLS, and the blocking one at its other end."""


@pytest.fixture(params=["plain", "tls"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    left, right = socket.socketpair()
    if request.param == "plain":
        with right:
            yield left, right
        return
    authority = TestAuthority(tmp_path)
    server = authority.credentials(Role.NODE, "n").server_context()
    client = authority.credentials(Role.ROUTER, "r").client_context()
    with ThreadPoolExecutor(1) as other_side:
        accepting = other_side.submit(TlsSocket, right, server, server_side=True)
        ours = client.wrap_socket(left)
        theirs = accepting.result(DEADLINE_S)
    yield ours, theirs
    theirs.close()


def talk_over(pair: Pair, talk: Callable[[FrameSocket, BlockingSocket], Awaitable[None]]) -> None:
    """Run `talk` on a frame socket and the blocking one at its other end."""

    async def run() -> None:
        ours = FrameSocket(pair[0])
        async with asyncio.timeout(DEADLINE_S):
            await talk(ours, pair[1])
        ours.close()

    asyncio.run(run())


@pytest.mark.parametrize("sizes", [(), (0,), (5,), (3, 0, 70_000), (9 << 20, 1, 2 << 20)])
def test_a_payload_in_parts_arrives_in_one_piece_and_comes_back(
    pair: Pair, sizes: Sequence[int]
) -> None:
    parts = [os.urandom(size) for size in sizes]
    whole = b"".join(parts)

    async def talk(ours: FrameSocket, theirs: BlockingSocket) -> None:
        def echo() -> None:
            header, payload = recv_frame(theirs)
            assert bytes(payload) == whole
            send_frame(theirs, header, payload)

        echoing = asyncio.create_task(asyncio.to_thread(echo))
        await ours.send({"a": 1}, parts)
        header, payload = await ours.receive()
        await echoing
        assert (header, bytes(payload)) == ({"a": 1}, whole)

    talk_over(pair, talk)


def test_a_send_to_a_peer_that_takes_nothing_ends_when_the_socket_is_closed(pair: Pair) -> None:
    async def talk(ours: FrameSocket, theirs: BlockingSocket) -> None:
        del theirs
        sending = asyncio.create_task(ours.send({}, [bytes(64 << 20)]))
        # It cannot end by itself: that is far more than the kernel takes.
        await asyncio.wait({sending}, timeout=0.2)
        assert not sending.done()
        ours.close()
        with pytest.raises(ConnectionLostError):
            await sending
        with pytest.raises(ConnectionLostError):
            await ours.send({})

    talk_over(pair, talk)


def test_both_directions_end_with_the_peer(pair: Pair) -> None:
    async def talk(ours: FrameSocket, theirs: BlockingSocket) -> None:
        def leave() -> None:
            theirs.shutdown(socket.SHUT_RDWR)
            theirs.close()

        threading.Thread(target=leave).start()
        with pytest.raises(ConnectionLostError):
            await ours.receive()
        with pytest.raises(ConnectionLostError):
            await ours.send({}, [bytes(32 << 20)])

    talk_over(pair, talk)


def mapped(path: Path, body: bytes) -> memoryview:
    """A new file of these bytes, as the blob store maps it."""
    path.write_bytes(body)
    with path.open("rb") as file:
        return memoryview(MappedFile.of(file.fileno()))


def test_a_payload_that_is_a_whole_file_arrives_also_when_the_file_is_gone(
    pair: Pair, tmp_path: Path
) -> None:
    path, body = tmp_path / "payload", os.urandom(9 << 20)
    payload = mapped(path, body)
    path.unlink()

    async def talk(ours: FrameSocket, theirs: BlockingSocket) -> None:
        # A part of a file, and a file beside other bytes, are sent as bytes.
        cases = ([payload], [payload[1:]], [b"x", payload], [payload])

        def receive() -> list[bytes]:
            return [bytes(recv_frame_or_file(theirs)[1]) for _ in cases]

        receiving = asyncio.create_task(asyncio.to_thread(receive))
        for case in cases:
            await ours.send({"a": 1}, case)
        assert await receiving == [b"".join(case) for case in cases]

    talk_over(pair, talk)


def test_only_a_unix_socket_passes_a_file_and_its_receiver_may_write_the_payload(
    pair: Pair, tmp_path: Path
) -> None:
    body = os.urandom(1 << 16)
    payload = mapped(tmp_path / "payload", body)

    async def talk(ours: FrameSocket, theirs: BlockingSocket) -> None:
        await ours.send({}, [payload])
        header, got = recv_frame_or_file(theirs)
        assert (FILE_KEY in header) == isinstance(theirs, socket.socket)
        got[:4] = b"abcd"
        assert bytes(got[4:]) == body[4:]
        assert bytes(payload) == (tmp_path / "payload").read_bytes() == body

    talk_over(pair, talk)


def test_a_file_is_passed_once_the_peer_reads_again(tmp_path: Path) -> None:
    body = os.urandom(3 << 20)
    payload = mapped(tmp_path / "payload", body)

    async def talk(ours: FrameSocket, theirs: BlockingSocket) -> None:
        sent = 0
        # Single bytes fill what is left by a larger piece.
        for size in (1 << 20, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    sent += left.send(bytes(size))
        sending = asyncio.create_task(ours.send({}, [payload]))
        await asyncio.sleep(0)
        assert not sending.done()

        def read() -> bytes:
            unread = sent
            while unread:
                unread -= len(theirs.recv(unread)) if isinstance(theirs, socket.socket) else 0
            return bytes(recv_frame_or_file(theirs)[1])

        assert await asyncio.to_thread(read) == body
        await sending

    left, right = socket.socketpair()
    with right:
        talk_over((left, right), talk)


@pytest.mark.parametrize("files", [0, 2])
def test_a_frame_must_bring_the_file_that_it_announces(tmp_path: Path, files: int) -> None:
    mapped(tmp_path / "payload", b"payload")
    left, right = socket.socketpair()
    with left, right, (tmp_path / "payload").open("rb") as file:
        head = encode_head({FILE_KEY: 7}, 0)
        socket.send_fds(left, [head], [file.fileno()] * files)
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(InvalidRequestError, match="announces a file of 7 bytes"):
            recv_frame_or_file(right)
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_connection_whose_descriptors_were_lost_ends(tmp_path: Path) -> None:
    mapped(tmp_path / "payload", b"payload")
    left, right = socket.socketpair()
    with left, right, (tmp_path / "payload").open("rb") as file:
        socket.send_fds(left, [encode_head({FILE_KEY: 7}, 0)], [file.fileno()] * 9)
        held = open_files(tmp_path / "payload")
        with pytest.raises(ConnectionLostError, match="too many files open"):
            recv_frame_or_file(right)
        assert open_files(tmp_path / "payload") == held


def test_a_process_that_starts_meanwhile_does_not_inherit_a_received_file(tmp_path: Path) -> None:
    payload = mapped(tmp_path / "payload", b"payload")
    left, right = socket.socketpair()
    with left, right, ThreadPoolExecutor(1) as pool, (tmp_path / "payload").open("rb") as file:
        head = encode_head({FILE_KEY: len(payload)}, 0)
        held = open_files(tmp_path / "payload")
        socket.send_fds(left, [head[:1]], [file.fileno()])
        receiving = pool.submit(recv_frame_or_file, right)
        while open_files(tmp_path / "payload") == held:
            assert not receiving.done()
        child = subprocess.run(
            ["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True
        )
        left.sendall(head[1:])
        assert bytes(receiving.result()[1]) == b"payload"
        assert str(tmp_path / "payload") not in child.stdout


def open_files(path: Path) -> int:
    """How many of this process's descriptors are of a file."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += each.readlink() == path
    return found
