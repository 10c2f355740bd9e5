"""Frames on a loop's own socket: whole, in order, and never waiting for a peer that is gone."""

import asyncio
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plexrl.errors import ConnectionLostError
from plexrl.wire.framing import recv_frame, send_frame
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
