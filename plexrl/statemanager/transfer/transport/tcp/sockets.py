"""Timeouts of both ends, for plain sockets and for TLS."""

import socket
import struct

from plexrl.wire.links.dial import BlockingSocket
from plexrl.wire.links.tls_socket import TlsSocket

_TIMEVAL = struct.Struct("@ll")


def bound_waits(connection: BlockingSocket, timeout_s: float) -> None:
    """Bound each wait to send or to receive; 0: no bound."""
    if isinstance(connection, TlsSocket):
        connection.settimeout(timeout_s or None)
        return
    # The socket is blocking, as `sendfile` needs; the kernel applies the timeouts.
    connection.settimeout(None)
    whole = int(timeout_s)
    value = _TIMEVAL.pack(whole, int((timeout_s - whole) * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, value)
