"""Frames on a loop's own socket: whole, in order, and never waiting for a peer that is gone."""

import asyncio
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence

import pytest

from plexrl.errors import ConnectionLostError
from plexrl.wire.framing import recv_frame, send_frame
from plexrl.wire.links.frame_socket import FrameSocket

DEADLINE_S = 60.0


def with_pair(talk: Callable[[FrameSocket, socket.socket], Awaitable[None]]) -> None:
    """Run `talk` on a frame socket and the blocking one at its other end."""

    async def run() -> None:
        left, right = socket.socketpair()
        with right:
            ours = FrameSocket(left)
            async with asyncio.timeout(DEADLINE_S):
                await talk(ours, right)
            ours.close()

    asyncio.run(run())


@pytest.mark.parametrize("sizes", [(), (0,), (5,), (3, 0, 70_000), (9 << 20, 1, 2 << 20)])
def test_a_payload_in_parts_arrives_in_one_piece_and_comes_back(sizes: Sequence[int]) -> None:
    parts = [os.urandom(size) for size in sizes]
    whole = b"".join(parts)

    async def talk(ours: FrameSocket, theirs: socket.socket) -> None:
        def echo() -> None:
            header, payload = recv_frame(theirs)
            assert bytes(payload) == whole
            send_frame(theirs, header, payload)

        echoing = asyncio.create_task(asyncio.to_thread(echo))
        await ours.send({"a": 1}, parts)
        header, payload = await ours.receive()
        await echoing
        assert (header, bytes(payload)) == ({"a": 1}, whole)

    with_pair(talk)


def test_a_send_to_a_peer_that_takes_nothing_ends_when_the_socket_is_closed() -> None:
    async def talk(ours: FrameSocket, theirs: socket.socket) -> None:
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

    with_pair(talk)


def test_both_directions_end_with_the_peer() -> None:
    async def talk(ours: FrameSocket, theirs: socket.socket) -> None:
        threading.Thread(target=theirs.close).start()
        with pytest.raises(ConnectionLostError):
            await ours.receive()
        with pytest.raises(ConnectionLostError):
            await ours.send({}, [bytes(32 << 20)])

    with_pair(talk)
