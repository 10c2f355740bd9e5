"""Addresses of StateManagers: where one is reached from its own machine, and from others.

    /run/plexrl/state.sock                       on this machine
    tcp://host:port                              from anywhere
    tcp://host:port#boot:/run/plexrl/state.sock  both: by the path on the machine of that boot

Whoever hands addresses on (the scheduler) need not understand them.
"""

from functools import cache
from pathlib import Path

TCP_SCHEME = "tcp://"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def announced(path: str, serve_tcp: str) -> str:
    """The address of a daemon that listens at `path`, and for other nodes at `serve_tcp`
    (`host:port`; empty: for none)."""
    return f"{TCP_SCHEME}{serve_tcp}#{_boot_id()}:{path}" if serve_tcp else path


def nearest(address: str) -> str:
    """The path where the daemon is on this machine and its socket can be seen (a container may not
    see it), else the address from elsewhere."""
    remote, _, local = address.partition("#")
    boot, _, path = local.partition(":")
    return path if path and boot == _boot_id() and Path(path).is_socket() else remote


def host_and_port(address: str) -> str | None:
    """Of an address that `nearest` gave; None: it is a path."""
    return address.removeprefix(TCP_SCHEME) if address.startswith(TCP_SCHEME) else None


@cache
def _boot_id() -> str:
    """Differs between machines, and between two boots of one."""
    return _BOOT_ID.read_text().strip()
