"""Connections to a TLS listener that begin a handshake and say no more."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from plexrl.wire.links.address import TlsAddress

CLIENT_HELLO_HEAD = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
"""The first bytes of a ClientHello of 512 bytes."""


@contextmanager
def half_open(address: TlsAddress, count: int) -> Iterator[list[socket.socket]]:
    """As many such connections at once."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with ExitStack() as opened:
        found = []
        for _ in range(count):
            raw = opened.enter_context(socket.create_connection((address.host, address.port)))
            raw.sendall(CLIENT_HELLO_HEAD)
            found.append(raw)
        yield found


def is_ended(raw: socket.socket) -> bool:
    """Wait for the server's end of a connection; the runner's time limit is the deadline."""
    try:
        return raw.recv(1) == b""
    except ConnectionResetError:
        return True
