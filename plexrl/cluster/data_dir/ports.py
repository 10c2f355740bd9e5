"""The routers' ports: chosen at the first start, stored in the data directory, and reused.

Controllers find the cluster by its URL, so a cluster that is restarted on the same data directory
must have the same URL.
"""

import json
import logging
import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from plexrl.cluster.config.options import ClusterOptions
from plexrl.process.folders.durable_files import write_durably

LOG = logging.getLogger(__name__)

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that the kernel gives to outgoing connections."""
LOWEST = 1024
NAME = "ports.json"
NETWORK_FILE = "network-ports.json"
TRIES = 100


def choose_ports(options: ClusterOptions, data_dir: Path) -> list[int]:
    """Choose a port for each router, fixed while the cluster runs: as the options say, else as at
    the last start, else any free port."""
    if options.port:
        ports = [options.port + index for index in range(options.routers)]
    else:
        with ExitStack() as probes:
            ports = _free_ports(options, _read(data_dir / NAME), probes)
    _write(data_dir / NAME, ports)
    return ports


def choose_network_ports(
    host: str, join_port: int, scheduler_port: int, data_dir: Path
) -> tuple[int, int]:
    """Ports of the join service and the scheduler for other machines, fixed while the cluster runs.
    0 stands for the port of the last start, or a free one."""
    path = data_dir / NETWORK_FILE
    former = _read(path)
    chosen = []
    with ExitStack() as probes:
        for index, wanted in enumerate((join_port, scheduler_port)):
            if wanted:
                chosen.append(wanted)
            elif index < len(former):
                # Taken or not: nodes know no other.
                chosen.append(former[index])
            else:
                chosen.append(_bind_lasting(host, probes))
    _write(path, chosen)
    return chosen[0], chosen[1]


def _free_ports(options: ClusterOptions, former: list[int], probes: ExitStack) -> list[int]:
    ports: list[int] = []
    for index in range(options.routers):
        wanted = former[index] if index < len(former) else 0
        try:
            if wanted:
                ports.append(_bind(options.host, wanted, probes))
            else:
                ports.append(_bind_lasting(options.host, probes))
        except OSError as error:
            ports.append(_bind_lasting(options.host, probes))
            LOG.warning(
                "port %d, which a router had at the last start, is in use (%s): the router takes "
                "port %d. Give running controllers the new URL, or end the program that uses the "
                "port and restart the cluster.",
                wanted,
                error.strerror,
                ports[-1],
            )
    return ports


def _bind_lasting(host: str, probes: ExitStack) -> int:
    """A free port below those of outgoing connections: one of them could take the router's port
    between two starts."""
    try:
        end = int(OUTGOING.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = LOWEST
    first = max(LOWEST, end // 2)
    for _ in range(TRIES if first < end else 0):
        with suppress(OSError):
            return _bind(host, random.SystemRandom().randrange(first, end), probes)
    return _bind(host, 0, probes)


def _bind(host: str, port: int, probes: ExitStack) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = probes.enter_context(socket.socket(family, socket.SOCK_STREAM))
    # As in the router: lingering connections of a former router do not block the port.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind((host, port))
    return int(probe.getsockname()[1])


def _read(path: Path) -> list[int]:
    try:
        found = json.loads(path.read_text())
        return [port for port in found if isinstance(port, int) and 0 < port < 65536]
    except (OSError, ValueError, TypeError):
        return []


def _write(path: Path, ports: list[int]) -> None:
    if _read(path)[: len(ports)] == ports:
        return
    try:
        write_durably(path, json.dumps(ports).encode())
    except OSError as error:
        LOG.warning("the ports %s were not stored for the next start: %s", ports, error)
