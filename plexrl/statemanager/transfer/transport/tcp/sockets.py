"""Socket options of both ends."""

import socket
import struct

_TIMEVAL = struct.Struct("@ll")


def set_timeout(
    connection: socket.socket, receiving_s: float, *, sending_s: float | None = None
) -> None:
    """Bound each wait on a blocking socket, as `sendfile` needs; 0: no bound."""
    for option, seconds in (
        (socket.SO_RCVTIMEO, receiving_s),
        (socket.SO_SNDTIMEO, receiving_s if sending_s is None else sending_s),
    ):
        whole = int(seconds)
        value = _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, option, value)
