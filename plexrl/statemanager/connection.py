"""Blocking requests of a client, over as many connections as it takes to reach the daemon."""

import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from plexrl.errors import ConnectionLostError, UnavailableError, from_wire
from plexrl.statemanager.channel import Channel, Kind, close_all
from plexrl.statemanager.protocol import Answer, Hello, Request

RECONNECT_S = 0.05

AnyT = TypeVar("AnyT")

_REQUEST, _RESULT = Kind.REQUEST, Kind.RESULT
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


def until_reached(path: str, timeout_s: float, attempt: Callable[[], AnyT]) -> AnyT:
    """What `attempt` returns, made again for as long as it meets no daemon at `path`.

    Raises:
        UnavailableError: the daemon did not come back in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return attempt()
        except (ConnectionLostError, OSError) as error:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the StateManager at {path} cannot be reached ({error}): see its log",
                    statemanager=path,
                ) from error
            time.sleep(RECONNECT_S)


def connect(path: str, timeout_s: float, ticket: bytes) -> Channel:
    """A connection to the daemon at `path`, as the ticket's holder; `timeout_s` bounds each wait.

    Raises:
        AuthenticationError: the daemon does not take the ticket.
        PlexRLError: what else it refused the connection for.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        channel = Channel(connection, send_timeout_s=timeout_s, receive_timeout_s=timeout_s)
        exchange(channel, Hello(ticket=ticket))
    except BaseException:
        connection.close()
        raise
    return channel


def exchange(
    channel: Channel, request: Request, fds: Sequence[int] = ()
) -> tuple[Answer, list[int]]:
    """The answer to a request, and its descriptors, which the caller must close.

    Raises:
        PlexRLError: what the daemon raised.
        ConnectionLostError: the daemon closed.
    """
    try:  # noqa: SIM105  # `suppress` would take its microsecond
        channel.send(_REQUEST, request, fds)
    except (BrokenPipeError, ConnectionResetError):
        # A daemon that refuses a connection says why and closes it, maybe before anything is sent.
        pass
    kind, body, received = (
        channel.receive_plain() if request.is_answered_plainly else channel.receive()
    )
    try:
        answer = _decode_answer(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        close_all(received)
        raise ConnectionLostError(f"the StateManager's answer is malformed: {error}") from error
    if kind == _RESULT:
        return answer, received
    close_all(received)
    raise from_wire(answer)
