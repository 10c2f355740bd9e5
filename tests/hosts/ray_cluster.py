"""A Ray cluster on simulated hosts, and PlexRL on it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from tests.hosts.cluster import (
    GPU_MEMORY_GIB,
    HOST_MEMORY_GIB,
    START_S,
    HostCluster,
    store_environment,
)
from tests.hosts.fault_schedule import RANK
from tests.hosts.host import HOME, Host, HostProcess
from tests.hosts.network import Network
from tests.s3_server import BUCKET

PORT = 6379
RAYLET = "raylet"
GCS = "gcs_server"
"""Ray's process on each node, and its process on the head."""
RAY_STARTED = "Ray runtime started"
STORE_BYTES = 80 << 20
"""The least that Ray accepts; PlexRL stores nothing there."""
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
UP = (
    *("plexrl", "up", "--json", "--tls", "--host", "0.0.0.0", "--fabric", "trusted"),
    *("--gpu-memory", GPU_MEMORY_GIB, "--host-memory", HOST_MEMORY_GIB, "--policy", "pack"),
    *("--data-url", f"s3://{BUCKET}/data", "--checkpoint-url", f"s3://{BUCKET}/checkpoints"),
)
COMMANDS = {RANK: "ray::RayWorkerActor", RAYLET: "raylet/raylet ", GCS: "gcs/gcs_server "}
"""Command lines of parts that are processes of Ray."""


class RayHosts(HostCluster):
    """Ray's head on the first host, and Ray nodes on the others, which have GPUs as far as Ray
    knows. `plexrl up --ray` runs on the first host."""

    node_data_dir = Path(HOME, ".plexrl-ray", "*")
    start_s = 2 * START_S

    def __init__(
        self,
        network: Network,
        gpus: int,
        nodes: tuple[str, ...],
        client: str = "",
        options: tuple[str, ...] = ("--node-replace-s", "0"),
    ) -> None:
        """`nodes`: the hosts that are part of the Ray cluster from the start. `options`: of
        `plexrl up`."""
        self._first = nodes
        self._options = options
        self._rays: dict[str, HostProcess] = {}
        super().__init__(network, gpus, client)

    def start_nodes(self) -> None:
        """Nothing: PlexRL finds the Ray nodes by itself."""

    def start_head(self) -> None:
        self._start_ray_head()
        for name in self._first:
            self.start_node(self.network[name])
        for ray in self._rays.values():
            ray.wait_for(RAY_STARTED, START_S)
        self._start_supervisor()

    def start_node(self, node: Host, token: str = "") -> None:
        """Start a host's Ray node."""
        assert not token, "Ray nodes get their tokens from the head"
        self._rays[node.name] = start_ray(
            node,
            *("--address", f"{self.head.address}:{PORT}", "--node-name", node.name),
            *("--num-gpus", str(self._gpus)),
            env=store_environment(self.head),
        )

    def services(self, host: Host) -> dict[str, tuple[HostProcess, Callable[[], None]]]:
        if host.name not in self._rays:
            return {}
        if host is not self.head:
            return {"ray": (self._rays[host.name], lambda: self.start_node(host))}
        found = super().services(host)
        found["ray"] = (self._rays[host.name], self._start_ray_head)
        found["supervisor"] = (self.supervisor(host), self._start_supervisor)
        return found

    def processes_of(self, host: Host, part: str) -> list[psutil.Process]:
        if part in COMMANDS:
            return sorted(host.processes(COMMANDS[part]), key=lambda each: each.pid)
        return super().processes_of(host, part)

    def lose(self, node: Host) -> None:
        """The host of a node is gone for good."""
        self.nodes.remove(node)
        node.lose()

    def end(self) -> None:
        self._supervisors[self.head.name].end()

    def _start_ray_head(self) -> None:
        self._rays[self.head.name] = start_ray(
            self.head,
            *("--head", "--port", str(PORT), "--num-gpus", "0", "--include-dashboard", "false"),
            env=store_environment(self.head),
        )

    def _start_supervisor(self) -> None:
        self._supervisors[self.head.name] = self.head.start(
            *(*UP, "--ray", f"{self.head.address}:{PORT}", "--advertise", self.head.name),
            *self._options,
            env={**store_environment(self.head), **RAY},
        )


def start_ray(host: Host, *words: str, env: Mapping[str, str] | None = None) -> HostProcess:
    """Start a Ray node, at the host's address; it prints `RAY_STARTED` when it has."""
    return host.start(
        *("ray", "start", "--block", "--disable-usage-stats", "--num-cpus", "1"),
        *("--node-ip-address", host.address, "--object-store-memory", str(STORE_BYTES)),
        *words,
        env={**RAY, **(env or {})},
    )
