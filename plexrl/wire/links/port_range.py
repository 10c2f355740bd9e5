"""A range of ports for processes that listen one after the other, such as a node's workers."""

import errno
import socket

from plexrl.wire.links.address import TlsAddress, parse_address


class PortRange:
    """The free ports of a range. A port is taken again as late as possible, because clients may
    still have the address of the process that listened there before."""

    def __init__(self, host: str, ports: range) -> None:
        self._host = host
        self._ports = ports
        self._taken: set[int] = set()
        self._next = 0

    def take(self) -> int:
        """Take a port at which no process of this machine listens now.

        Raises:
            OSError: there is none.
        """
        for step in range(len(self._ports)):
            at = (self._next + step) % len(self._ports)
            port = self._ports[at]
            if port not in self._taken and self._is_free(port):
                self._next = at + 1
                self._taken.add(port)
                return port
        raise OSError(
            errno.EADDRINUSE,
            f"all ports {self._ports.start} to {self._ports.stop - 1} are taken: widen `ports` in "
            "the configuration of the node's agent",
        )

    def give_back(self, address: str) -> None:
        """The process at that address has ended."""
        found = parse_address(address)
        if isinstance(found, TlsAddress):
            self._taken.discard(found.port)

    def _is_free(self, port: int) -> bool:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            socket.create_server((self._host, port), family=family).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        return True
