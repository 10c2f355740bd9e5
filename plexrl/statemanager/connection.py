"""Blocking requests of a client, over as many connections as it takes to reach the daemon."""

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from plexrl.errors import ConnectionLostError, UnavailableError
from plexrl.statemanager.protocol import Answer, Request, recv_answer, send_request

RECONNECT_S = 0.05

AnyT = TypeVar("AnyT")


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


def connect(path: str, timeout_s: float) -> socket.socket:
    """A connection to the daemon at `path`; `timeout_s` bounds each wait on it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def exchange(
    connection: socket.socket, request: Request, fds: Sequence[int] = ()
) -> tuple[Answer, list[int]]:
    """The answer to a request, and its descriptors, which the caller must close."""
    # A daemon that refuses a connection says why and closes it, maybe before anything is sent.
    with suppress(BrokenPipeError, ConnectionResetError):
        send_request(connection, request, fds)
    return recv_answer(connection)
