"""What deployments of a random history need on each GPU, and what their workers report of it."""

import random

from plexrl.model.memory.device_memory import DeviceMemory, MemoryTerm
from tests.scheduler.fake_cluster import FakeCluster


class RandomMemory:
    """Draws from a source of its own: histories of virtual GPUs are what they are without it."""

    def __init__(self, seed: int, cluster: FakeCluster) -> None:
        self._chance = random.Random(f"memory of {seed}")
        self._cluster = cluster
        self.gpu_kind = self._chance.choice(("", "NVIDIA T"))
        """Of all nodes' GPUs."""

    def deploy(self, name: str, kind: str, workers: int, **fields: object) -> None:
        """As `FakeCluster.deploy`, with a need of memory."""
        self._cluster.deploy(name, kind, workers, memory=self._draw(), **fields)

    def _draw(self) -> DeviceMemory | None:
        """What a new deployment needs on GPUs of 1 GiB; some would not fit beside others."""
        chance = self._chance
        self._cluster.peak_bytes = chance.choice((0, 1 << 20, 1 << 28))
        if not self.gpu_kind or chance.random() < 0.2:
            return None
        sizes = {"weights": 1 << 28, "activations": chance.choice((1 << 20, 1 << 28, 3 << 28))}
        kept = MemoryTerm(name="context", nbytes=chance.choice((0, 1 << 26)), stays=True)
        terms = [MemoryTerm(name=name, nbytes=size) for name, size in sizes.items()]
        return DeviceMemory(terms=(*terms, kept))
