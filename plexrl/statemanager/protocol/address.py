"""Addresses of StateManagers, for clients on the same machine and on others.

    /run/plexrl/state.sock                        on this machine
    tcp://10.0.0.3:7411                           from anywhere
    tcp://10.0.0.3:7411#PLACE:/run/plexrl/state.sock
                                                  both: the path wherever it names the same socket

PLACE identifies the directory of the socket: the kernel's boot, and the directory's file system and
inode. Two containers or network namespaces of one machine can have different directories at the
same path, and one directory can be visible in several of them. The scheduler passes addresses on
without parsing them.
"""

from functools import cache
from pathlib import Path

TCP_SCHEME = "tcp://"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def announced(path: str, remote: str) -> str:
    """The address of a daemon that listens at `path`, and at `remote` (an address) for other
    nodes; empty: for none. Its socket's directory exists."""
    return f"{remote}#{_place(path)}:{path}" if remote else path


def nearest(address: str) -> str:
    """The path if it names the daemon's socket here, else the remote address."""
    remote, _, local = address.partition("#")
    place, _, path = local.partition(":")
    return path if path and Path(path).is_socket() and place == _place(path) else remote


def host_and_port(address: str) -> str | None:
    """The `host:port` of an address from `nearest`; None for a path."""
    return address.removeprefix(TCP_SCHEME) if address.startswith(TCP_SCHEME) else None


def _place(path: str) -> str:
    """Identity of the directory of a socket; the socket's own inode changes with each start."""
    found = Path(path).parent.stat()
    return f"{_boot_id()}-{found.st_dev:x}-{found.st_ino:x}"


@cache
def _boot_id() -> str:
    """Differs between machines, and between two boots of one machine."""
    return _BOOT_ID.read_text().strip()
