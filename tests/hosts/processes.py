"""Processes of a cluster on a host that their command lines do not tell apart."""

from contextlib import suppress

import psutil

from tests.hosts.host import Host

SERVICE = "multiprocessing.forkserver"


def ranks(host: Host) -> list[psutil.Process]:
    """The worker processes of a host: what its agents' fork servers have forked."""
    servers = host.processes(SERVICE)
    found = []
    for server in servers:
        with suppress(psutil.NoSuchProcess):
            found += [each for each in server.children() if SERVICE in " ".join(each.cmdline())]
    return sorted(found, key=lambda each: each.pid)
