"""Blocking requests to the daemon, with reconnects."""

import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from plexrl.errors import ConnectionLostError, PermissionDeniedError, UnavailableError, from_wire
from plexrl.statemanager.protocol.channel import Channel, Kind, close_all
from plexrl.statemanager.protocol.messages import Answer, Hello, Request

RECONNECT_S = 0.05

AnyT = TypeVar("AnyT")

_CREDENTIALS = struct.Struct("3i")

_REQUEST, _RESULT = Kind.REQUEST, Kind.RESULT
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


def retry_connect(path: str, timeout_s: float, attempt: Callable[[], AnyT]) -> AnyT:
    """Call `attempt` until it reaches the daemon at `path`; returns its result.

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


def connect(path: str, timeout_s: float, ticket: bytes, *, of_user: int | None = None) -> Channel:
    """Connect to the daemon at `path` as the ticket's holder; `timeout_s` bounds each wait.

    With `of_user` the ticket is sent only to a process of that user, since its receiver can use it.

    Raises:
        PermissionDeniedError: another user's process listens there.
        AuthenticationError: the daemon rejects the ticket.
        PlexRLError: the daemon refuses the connection for another reason.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        if of_user is not None:
            _check_owner(connection, path, of_user)
        channel = Channel(connection, send_timeout_s=timeout_s, receive_timeout_s=timeout_s)
        exchange(channel, Hello(ticket=ticket))
    except BaseException:
        connection.close()
        raise
    return channel


def peer_uid(connection: socket.socket) -> int:
    """User of the process at the other end of a Unix socket, as the kernel reports it."""
    return _credentials(connection)[1]


def peer_pid(connection: socket.socket) -> int:
    """As `peer_uid`, the process; 0: it is not visible here."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def _check_owner(connection: socket.socket, path: str, user: int) -> None:
    uid = peer_uid(connection)
    if uid != user:
        raise PermissionDeniedError(
            f"{path} is served by user {uid}, not by user {user}: name a StateManager's socket"
        )


def exchange(
    channel: Channel, request: Request, fds: Sequence[int] = ()
) -> tuple[Answer, list[int]]:
    """Send a request; returns its answer and descriptors, which the caller must close.

    Raises:
        PlexRLError: the daemon raised it.
        ConnectionLostError: the daemon closed.
    """
    try:  # noqa: SIM105  # `suppress` would cost a microsecond
        channel.send(_REQUEST, request, fds)
    except (BrokenPipeError, ConnectionResetError):
        # A daemon that refuses a connection sends its error and closes, perhaps before this send.
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
