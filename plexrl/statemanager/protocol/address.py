"""Addresses of StateManagers, for clients on the same machine and on others.

    /run/plexrl/state.sock                       on this machine
    tcp://host:port                              from anywhere
    tcp://host:port#boot:/run/plexrl/state.sock  both: the path on the machine with that boot id

The scheduler passes addresses on without parsing them.
"""

from functools import cache
from pathlib import Path

TCP_SCHEME = "tcp://"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def announced(path: str, serve_tcp: str) -> str:
    """The address of a daemon that listens at `path`, and at `serve_tcp` (`host:port`) for other
    nodes; empty: for none."""
    return f"{TCP_SCHEME}{serve_tcp}#{_boot_id()}:{path}" if serve_tcp else path


def nearest(address: str) -> str:
    """The path if the daemon is on this machine and its socket is visible (in a container it may
    not be), else the TCP address."""
    remote, _, local = address.partition("#")
    boot, _, path = local.partition(":")
    return path if path and boot == _boot_id() and Path(path).is_socket() else remote


def host_and_port(address: str) -> str | None:
    """The `host:port` of an address from `nearest`; None for a path."""
    return address.removeprefix(TCP_SCHEME) if address.startswith(TCP_SCHEME) else None


@cache
def _boot_id() -> str:
    """Differs between machines, and between two boots of one machine."""
    return _BOOT_ID.read_text().strip()
