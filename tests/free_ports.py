"""Ports for servers that are restarted on the same port."""

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A free port below those that the kernel gives to outgoing connections, which may take any of
    theirs between two starts of a server."""
    end = int(RANGE.read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(end // 2, end)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
