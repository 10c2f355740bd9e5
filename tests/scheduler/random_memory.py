"""What deployments of a random history need on each GPU, and what their workers report of it."""

import random

from plexrl.errors import DeviceMemoryFullError
from plexrl.model.memory.device_memory import DeviceMemory, MemoryTerm
from plexrl.wire import messages as cmd
from plexrl.wire.messages.cluster_views import ErrorView
from plexrl.wire.operations import OperationKind
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

    def refusal(self, run: cmd.Run) -> ErrorView | None:
        """The error of a load whose rank 0 finds its GPU full, because of the processes of
        deployments or of one that is no worker; None: the load, or other run, fails otherwise."""
        chance = self._chance
        if run.kind is not OperationKind.LOAD or chance.random() < 0.4:
            return None
        found = [
            {
                "deployment": name,
                "rank": 0,
                "lent_bytes": 0,
                "process_bytes": chance.choice((0, 1 << 40)),
            }
            for name in sorted(self._cluster.wpgs)
        ]
        strangers = {"4242": 1 << 40} if chance.random() < 0.5 else {}
        error = DeviceMemoryFullError("full", rank=0, holders=found, strangers=strangers)
        return error.to_wire()

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
