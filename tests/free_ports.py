"""Ports for servers that are restarted on the same port."""

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(count: int = 1) -> int:
    """The first of *count* free ports in a row, below those that the kernel gives to outgoing
    connections, which may take any of theirs between two starts of a server."""
    end = int(RANGE.read_text().split()[0])
    while True:
        first = random.SystemRandom().randrange(end // 2, end - count)
        if all(map(_is_free, range(first, first + count))):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
