"""The process group of a WPG's ranks: where they meet, and which network they use.

Ranks of one machine meet at a file and talk over the loopback interface, so that no other machine
reaches them. Ranks of several machines meet at a TCPStore on rank 0's node and talk over the
interface of the announced host. Neither the store nor the collectives are encrypted or
authenticated: nodes of a trusted fabric only take part.
"""

import ipaddress
import os
import socket
from typing import TYPE_CHECKING

from plexrl.errors import InvalidRequestError
from plexrl.worker.interface.config import WorkerConfig

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
LOOPBACK = "lo"


def join_process_group(config: WorkerConfig, collectives: str = "gloo") -> None:
    """Meet the other ranks of this incarnation; returns when all are there. `collectives` are the
    backends of the group, in torch's spelling."""
    import torch.distributed as dist

    for variable in INTERFACE_VARIABLES:
        # The libraries read it themselves: sub-groups get their interface in no other way.
        os.putenv(variable, config.interface)
    store = _tcp_store(config) if config.meeting_point else _file_store(config)
    dist.init_process_group(
        collectives, store=store, rank=config.rank, world_size=config.world_size
    )


def _file_store(config: WorkerConfig) -> "Store":
    import torch.distributed as dist

    return dist.FileStore(config.rendezvous, config.world_size)  # type: ignore[attr-defined]


def _tcp_store(config: WorkerConfig) -> "Store":
    """The ranks' store. Its keys name the incarnation, so that a process of an earlier one that
    finds this port meets nobody."""
    import torch.distributed as dist

    host, _, port = config.meeting_point.rpartition(":")
    host = host.strip("[]")
    listening = None
    if config.rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, int(port)), family=family, backlog=1024)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        config.world_size,
        config.rank == 0,
        wait_for_workers=False,
        master_listen_fd=None if listening is None else listening.detach(),
    )
    prefix = f"{config.deployment}/{config.incarnation}"
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def interface_of(host: str) -> str:
    """Name of this machine's network interface with the address `host`.

    Raises:
        InvalidRequestError: no interface has it.
    """
    import psutil

    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidRequestError(f"host {host!r} has no address: {error}") from error
    wanted = {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found}
    if any(address.is_loopback for address in wanted):
        return LOOPBACK
    own: list[str] = []
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            text = address.address.partition("%")[0]
            own.append(text)
            if ipaddress.ip_address(text) in wanted:
                return str(interface)
    raise InvalidRequestError(
        f"host {host!r} is no address of this machine, so its workers cannot listen there: set it "
        f"to one of {', '.join(sorted(own))}"
    )
