"""A cluster on simulated hosts: of one machine, or a head and nodes that join it."""

import json
from pathlib import Path
from typing import Any

from tests.hosts.host import Host

START_S = 120.0
GPU_MEMORY_GIB = "0.125"
HOST_MEMORY_GIB = "0.25"


class SoloCluster:
    """A cluster whose parts all run on one host."""

    def __init__(self, host: Host, gpus: int) -> None:
        self.head = host
        self._supervisor = host.start(
            *("plexrl", "up", "--json", "--gpus-per-node", str(gpus)),
            *("--gpu-memory", GPU_MEMORY_GIB, "--host-memory", HOST_MEMORY_GIB),
        )
        endpoint = json.loads(self._supervisor.wait_for('"url"', START_S))
        self.environment = {
            "PLEXRL_URL": str(endpoint["url"]),
            "PLEXRL_API_KEY": str(endpoint["api_key"]),
        }

    def ask(self, *words: str) -> Any:
        """The answer of a `plexrl` command, run on the head."""
        return json.loads(self.head.run("plexrl", *words, "--json", env=self.environment).stdout)

    def create_tenant(self, name: str) -> dict[str, str]:
        """A new tenant; returns the environment of its controllers."""
        key = self.ask("tenants", "create", name)["api_key"]
        return {**self.environment, "PLEXRL_API_KEY": str(key)}

    def checkpoint(self, path: str, file: str = "model.safetensors") -> bytes:
        """A file of a checkpoint, whose path a controller was told."""
        return self.head.path(Path(path) / file).read_bytes()

    def end(self) -> None:
        """End the cluster in order."""
        self._supervisor.end()
