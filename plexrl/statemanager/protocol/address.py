"""Addresses of StateManagers, for clients on the same machine and on others.

    /run/plexrl/state.sock                        on this machine
    tls://gpu3@10.0.0.3:7411                      from anywhere, by mutual TLS with node `gpu3`
    tcp://10.0.0.3:7411                           from anywhere, on a network declared trusted
    nixl://10.0.0.3:7411                          likewise; published versions by RDMA
    tls://gpu3@10.0.0.3:7411#PLACE:/run/plexrl/state.sock
                                                  both: the path wherever it names the same socket

PLACE identifies the directory of the socket: the kernel's boot, and the directory's file system and
inode. Two containers or network namespaces of one machine can have different directories at the
same path, and one directory can be visible in several of them. The scheduler passes addresses on
without parsing them.
"""

from functools import cache
from pathlib import Path

TCP_SCHEME = "tcp://"
TLS_SCHEME = "tls://"
NIXL_SCHEME = "nixl://"
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


def is_remote(address: str) -> bool:
    """Whether an address from `nearest` leads over the network; otherwise it is a path."""
    return "://" in address


def _place(path: str) -> str:
    """Identity of the directory of a socket; the socket's own inode changes with each start."""
    found = Path(path).parent.stat()
    return f"{_boot_id()}-{found.st_dev:x}-{found.st_ino:x}"


@cache
def _boot_id() -> str:
    """Differs between machines, and between two boots of one machine."""
    return _BOOT_ID.read_text().strip()
