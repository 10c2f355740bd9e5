"""A Ray cluster on simulated hosts, and PlexRL on it."""

import json
from collections.abc import Mapping

from tests.hosts.cluster import (
    GPU_MEMORY_GIB,
    HOST_MEMORY_GIB,
    START_S,
    HostCluster,
    store_environment,
)
from tests.hosts.host import Host, HostProcess
from tests.hosts.network import Network
from tests.s3_server import BUCKET

PORT = 6379
STORE_BYTES = 80 << 20
"""The least that Ray accepts; PlexRL stores nothing there."""
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
SUPERVISOR = (
    *("plexrl", "up", "--json", "--tls", "--host", "0.0.0.0", "--fabric", "trusted"),
    *("--gpu-memory", GPU_MEMORY_GIB, "--host-memory", HOST_MEMORY_GIB),
    *("--data-url", f"s3://{BUCKET}/data", "--checkpoint-url", f"s3://{BUCKET}/checkpoints"),
)


class RayHosts(HostCluster):
    """Ray's head on the first host, and Ray nodes on the others, which have GPUs as far as Ray
    knows. `plexrl up --ray` runs on the first host."""

    def __init__(self, network: Network, gpus: int, nodes: tuple[str, ...]) -> None:
        """`nodes`: the hosts that are part of the Ray cluster from the start."""
        self._first = nodes
        self._rays: dict[str, HostProcess] = {}
        self.network = network
        super().__init__(network, gpus)

    def start_head(self) -> None:
        head = self.head
        self._rays[head.name] = start_ray(
            head,
            *("--head", "--port", str(PORT), "--num-gpus", "0", "--include-dashboard", "false"),
            env=store_environment(head),
        )
        for name in self._first:
            self.start_node(self.network[name])
        self._start_supervisor()

    def start_nodes(self) -> None:
        """Nothing: PlexRL finds the Ray nodes by itself."""

    def start_node(self, node: Host, token: str = "") -> None:
        """Start a host's Ray node."""
        assert not token, "Ray nodes get their tokens from the head"
        self._rays[node.name] = start_ray(
            node,
            *("--address", f"{self.head.address}:{PORT}", "--node-name", node.name),
            *("--num-gpus", str(self._gpus)),
            env=store_environment(self.head),
        )

    def lose(self, node: Host) -> None:
        """The host of a node is gone for good."""
        del self._rays[node.name]
        node.lose()

    def end(self) -> None:
        self._supervisors[self.head.name].end()

    def _start_supervisor(self) -> None:
        process = self.head.start(
            *(*SUPERVISOR, "--ray", f"{self.head.address}:{PORT}"),
            *("--advertise", self.head.name, "--node-replace-s", "0"),
            env={**store_environment(self.head), **RAY},
        )
        self._supervisors[self.head.name] = process
        self._take_endpoint(json.loads(process.wait_for('"url"', 2 * START_S)))


def start_ray(host: Host, *words: str, env: Mapping[str, str] | None = None) -> HostProcess:
    """Start a Ray node, at the host's address."""
    process = host.start(
        *("ray", "start", "--block", "--disable-usage-stats", "--num-cpus", "1"),
        *("--node-ip-address", host.address, "--object-store-memory", str(STORE_BYTES)),
        *words,
        env={**RAY, **(env or {})},
    )
    process.wait_for("Ray runtime started", START_S)
    return process
