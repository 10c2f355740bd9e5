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

LOG = logging.getLogger(__name__)

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that the kernel gives to outgoing connections."""
LOWEST = 1024
TRIES = 100


def choose_ports(options: ClusterOptions, data_dir: Path) -> list[int]:
    """Choose a port for each router, fixed while the cluster runs: as the options say, else as at
    the last start, else any free port."""
    if options.port:
        ports = [options.port + index for index in range(options.routers)]
    else:
        with ExitStack() as probes:
            ports = _free_ports(options, _read(data_dir), probes)
    _write(data_dir, ports)
    return ports


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


def _read(data_dir: Path) -> list[int]:
    try:
        found = json.loads((data_dir / "ports.json").read_text())
        return [port for port in found if isinstance(port, int) and 0 < port < 65536]
    except (OSError, ValueError, TypeError):
        return []


def _write(data_dir: Path, ports: list[int]) -> None:
    if _read(data_dir)[: len(ports)] == ports:
        return
    part = data_dir / "ports.json.part"
    try:
        part.write_text(json.dumps(ports))
        part.rename(data_dir / "ports.json")
    except OSError as error:
        LOG.warning("the ports %s were not stored for the next start: %s", ports, error)
