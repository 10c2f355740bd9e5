"""A cluster on simulated hosts: of one machine, or a head and nodes that join it."""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.hosts.fault_schedule import RANK, SUPERVISOR
from tests.hosts.host import HOME, Host, HostProcess
from tests.hosts.network import Network
from tests.hosts.processes import ranks
from tests.rclone import rclone
from tests.s3_server import BUCKET, KEY, SECRET

START_S = 120.0
WRITTEN_S = 120.0
"""Time in which a checkpoint is complete after its request was answered."""
GPU_MEMORY_GIB = "0.125"
HOST_MEMORY_GIB = "0.25"
STORE_PORT = 9000
STORE = "/srv/store"
CONFIG = f"{HOME}/cluster.toml"
JOIN_PORT = 8471
RESTART_S = 2.0
"""Time after which a service manager starts a service again that has ended."""


class SoloCluster:
    """A cluster whose parts all run on one host."""

    data_dir = Path(HOME, ".plexrl")
    node_data_dir = data_dir

    def __init__(self, host: Host, gpus: int) -> None:
        self.head = self.client = host
        self._supervisor = host.start(
            *("plexrl", "up", "--json", "--virtual-gpus", str(gpus), "--policy", "pack"),
            *("--gpu-memory", GPU_MEMORY_GIB, "--host-memory", HOST_MEMORY_GIB),
        )
        endpoint = json.loads(self._supervisor.wait_for('"url"', START_S))
        self.environment = {
            "PLEXRL_URL": str(endpoint["url"]),
            "PLEXRL_API_KEY": self.head.path(Path(endpoint["key_file"])).read_text(),
        }

    def ask(self, *words: str) -> Any:
        """The answer of a `plexrl` command, run on the head."""
        return json.loads(self.head.run("plexrl", *words, "--json", env=self.environment).stdout)

    def create_tenant(self, name: str) -> dict[str, str]:
        """A new tenant; returns the environment of its controllers."""
        key = self.ask("tenants", "create", name, "--show-key")["api_key"]
        return {**self.environment, "PLEXRL_API_KEY": str(key)}

    def checkpoint(self, path: str, file: str = "model.safetensors") -> bytes:
        """A file of a checkpoint, whose path a controller was told."""
        return self.head.path(Path(path) / file).read_bytes()

    def keep_running(self) -> None:
        """Called often while jobs run."""

    def end(self) -> None:
        """End the cluster in order."""
        self._supervisor.end()


class HostCluster(SoloCluster):
    """A head without GPUs, nodes on other hosts that joined it over TLS, and an object store on the
    head, which is the only place that all hosts reach."""

    node_data_dir = Path(HOME, ".plexrl-node")
    start_s = START_S
    """Time in which `plexrl up` is up."""

    def __init__(
        self,
        network: Network,
        gpus: int,
        client: str = "",
        config: str = "",
        *,
        store: str = "",
    ) -> None:
        """The first host of the network is the head; each other host is a node. Controllers run on
        `client`, which is no node, or else on the head. `config`: the head's `cluster.toml`.
        `store`: the host of the object store, or else the head."""
        self.network = network
        self.head, *nodes = network
        self.client = network[client or self.head.name]
        self.nodes = [node for node in nodes if node is not self.client]
        self._gpus = gpus
        self._store_host = network[store or self.head.name]
        self._store: HostProcess | None = None
        self._supervisors: dict[str, HostProcess] = {}
        self._ended: dict[tuple[str, str], float] = {}
        """When a service of a host was seen to have ended."""
        self.head.on_disk(CONFIG).write_text(config)
        self._store_host.run("mkdir", "-p", f"{STORE}/{BUCKET}")
        for host in network:
            host.flush_disk()
        self.start_store()
        self.environment: dict[str, str] = {}
        self.start_head()
        started = self.supervisor(self.head).wait_for('"url"', self.start_s)
        self._take_endpoint(json.loads(started))
        self.start_nodes()

    def start_nodes(self) -> None:
        """Let all other hosts join."""
        token = self.ask("node", "token", "--show-key", "--uses", str(len(self.nodes)))["token"]
        for node in self.nodes:
            self.start_node(node, token)
        for node in self.nodes:
            self.supervisor(node).wait_for('"node"', START_S)

    def start_store(self) -> None:
        """Start the S3 server."""
        command = [str(rclone()), "serve", "s3", "--config", os.devnull]
        command += ["--addr", f"{self._store_host.address}:{STORE_PORT}", "--log-level", "ERROR"]
        secret = {"RCLONE_AUTH_KEY": f'"{KEY},{SECRET}"'}
        self._store = self._store_host.start(*command, STORE, env=secret)

    def start_head(self) -> None:
        """Start the head's supervisor, for the first time or again."""
        command = [
            "plexrl",
            "up",
            "--config",
            CONFIG,
            "--json",
            "--tls",
            "--host",
            "0.0.0.0",
            "--nodes",
            "0",
            "--policy",
            "pack",
        ]
        command += ["--advertise", self.head.name, "--data-url", f"s3://{BUCKET}/data"]
        command += ["--checkpoint-url", f"s3://{BUCKET}/checkpoints"]
        process = self.head.start(*command, env=store_environment(self._store_host))
        self._supervisors[self.head.name] = process

    def _take_endpoint(self, endpoint: Mapping[str, Any]) -> None:
        self.environment = {
            "PLEXRL_URL": str(endpoint["public_url"]),
            "PLEXRL_API_KEY": self.head.path(Path(endpoint["key_file"])).read_text(),
            "PLEXRL_CA_FILE": str(endpoint["ca"]),
        }
        if self.client is not self.head:
            # As the operator hands it to researchers.
            authority = Path(endpoint["ca"])
            self.client.path(authority.parent).mkdir(parents=True)
            self.client.path(authority).write_bytes(self.head.path(authority).read_bytes())

    def start_node(self, node: Host, token: str = "") -> None:
        """Let a host join with a token, or start its supervisor again without one."""
        command = ["plexrl", "node", "join", f"tls://{self.head.name}:{JOIN_PORT}", "--json"]
        command += ["--virtual-gpus", str(self._gpus), "--fabric", "trusted"]
        command += ["--gpu-memory", GPU_MEMORY_GIB]
        command += ["--host-memory", HOST_MEMORY_GIB]
        environment = {**store_environment(self._store_host)}
        if token:
            environment["PLEXRL_JOIN_TOKEN"] = token
        self._supervisors[node.name] = node.start(*command, env=environment)

    def supervisor(self, host: Host) -> HostProcess:
        """The process that an operator started on a host."""
        return self._supervisors[host.name]

    def keep_running(self) -> None:
        """Start every service that has ended again after a while, as a service manager does."""
        for host in (self.head, *self.nodes):
            for name, (process, start) in self.services(host).items():
                if not host.has_power or process.poll() is None:
                    self._ended.pop((host.name, name), None)
                    continue
                ended_at = self._ended.setdefault((host.name, name), time.monotonic())
                if time.monotonic() - ended_at >= RESTART_S:
                    del self._ended[host.name, name]
                    start()

    def services(self, host: Host) -> dict[str, tuple[HostProcess, Callable[[], None]]]:
        """What a host's service manager runs: each service, and what starts it again."""
        if host is not self.head:
            return {"supervisor": (self.supervisor(host), lambda: self.start_node(host))}
        services: dict[str, tuple[HostProcess, Callable[[], None]]] = {
            "supervisor": (self.supervisor(host), self.start_head)
        }
        if self._store_host is host:
            assert self._store is not None
            services["store"] = (self._store, self.start_store)
        return services

    def processes_of(self, host: Host, part: str) -> list[psutil.Process]:
        """The processes of a part that run on a host, in order."""
        if part == RANK:
            return ranks(host)
        if part == SUPERVISOR:
            supervisor = self.supervisor(host)
            if supervisor.poll() is not None:
                return []
            with suppress(psutil.NoSuchProcess, AssertionError):
                return [psutil.Process(supervisor.pid)]
            return []
        return sorted(host.processes(f"-m {part} "), key=lambda each: each.pid)

    def checkpoint(self, path: str, file: str = "model.safetensors") -> bytes:
        prefix = f"s3://{BUCKET}/"
        assert path.startswith(prefix), f"{path} is on one host only"
        folder = self._store_host.path(Path(STORE, BUCKET, path.removeprefix(prefix)))
        # The manifest is written last. Other files are in a folder of the attempt to write them.
        manifest = folder / "checkpoint.json"
        deadline = time.monotonic() + WRITTEN_S
        while not manifest.is_file():
            assert time.monotonic() < deadline, f"{path} is not written in {WRITTEN_S:g} s"
            time.sleep(0.1)
        (found,) = folder.glob(f"*/{file}")
        return found.read_bytes()

    def end(self) -> None:
        for name, supervisor in reversed(self._supervisors.items()):
            if self.network[name].has_power:
                supervisor.end()


def store_environment(store: Host) -> Mapping[str, str]:
    """The environment of processes that use the object store on this host."""
    return {
        "AWS_ENDPOINT_URL": f"http://{store.address}:{STORE_PORT}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }
