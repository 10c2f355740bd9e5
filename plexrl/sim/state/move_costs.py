"""What moving a job's state takes, by the kind of node: the StateManager's cost model. Pure.

A move is `fixed_s + bytes / rate` (as `plexrl.scheduler.state.estimates.MoveLaw` fits it to
measured moves). All GPUs of a node move at once, each over its own link to host memory; its NVMe
and its network they share. What lies on NVMe is read block by block while earlier blocks go on to
the GPUs, so the slower of the two paths counts. All nodes of a job move at once: the one with the
most of its state is the last. Moves of other jobs on the same node at the same moment are not
reckoned with.

Where `NodeType`'s rates are from:

- 50e9 bytes/s between a GPU and pinned host memory: PCIe 5 x16 of an H200 does 52 to 55 (published
  with DeepSpeed's DeepNVMe); the StateManager's own target is 90 % of that.
- 20e9 of NVMe: eight Gen 5 drives read 48 and write 26 (ditto), a store like ours gets about 20
  from such a node (ServerlessLLM); one rate serves both ways, and is the lower one.
- 50e9 of the network: a NIC of 400 Gbit/s, one per node, though such nodes have several.
- 0.5 s fixed: from the first rank's request to the last rank's answer. A warm switch costs well
  under 0.1 s outside its copies; the rest is for communicators that go idle and come back (10 GB a
  rank held by NCCL is freed in milliseconds, a process group destroyed in 0.9 s).

So a switch with both states in host memory takes, on the GPUs that were published, 1.5 s for 7B
(106 GB on 8 GPUs), 1.1 s for 30B (427 GB on 256) and 1.3 s for 235B (3.3 TB on 384). PlexRL reports
19.0 s to load the optimizer states of 30B in a colocated setup, without pinned memory and a process
of its own to keep them: give `switch_s` to reckon with such systems.
"""

from collections.abc import Iterable

from plexrl.errors import InvalidRequestError
from plexrl.scheduler.dispatch.switch_cost import HOST, NVME
from plexrl.sim.workload.scenario import NodeType, Pool


class MoveCosts:
    """Seconds of moves."""

    def __init__(self, pools: Iterable[Pool], switch_s: float | None = None) -> None:
        """`switch_s`: what a switch takes whatever moves, half of it each way; but state from NVMe
        takes no less than its bytes do. Absent: by the rates alone.

        Raises:
            InvalidRequestError: two node types share a name, or `switch_s` is below 0.
        """
        if switch_s is not None and switch_s < 0.0:
            raise InvalidRequestError(f"a switch takes at least 0 s, not {switch_s:g}")
        self._types: dict[str, NodeType] = {}
        for pool in pools:
            known = self._types.setdefault(pool.node_type.name, pool.node_type)
            if known != pool.node_type:
                raise InvalidRequestError(
                    f"two node types are called {known.name!r} and differ: give each its own name"
                )
        self._half_s = None if switch_s is None else switch_s / 2.0

    def load_s(self, node_type: str, state_bytes: int, gpus: int, tier: str = HOST) -> float:
        """To bring the state of so many GPUs onto them, from `tier` (`host` or `nvme`)."""
        return self._move_s(self._types[node_type], state_bytes, gpus, tier)

    def offload_s(self, node_type: str, state_bytes: int, gpus: int, tier: str = HOST) -> float:
        """To bring it off them, to `tier`."""
        return self._move_s(self._types[node_type], state_bytes, gpus, tier)

    def migrate_s(self, node_type: str, state_bytes: int, gpus: int) -> float:
        """For new nodes to fetch the state into their host memory from those that have it."""
        kind = self._types[node_type]
        return kind.move_fixed_s + node_bytes(kind, state_bytes, gpus) / kind.network_bytes_per_s

    def nvme_s(self, node_type: str, nbytes: int) -> float:
        """To bring so many bytes of one node from its host memory to its NVMe, or back."""
        return nbytes / self._types[node_type].nvme_bytes_per_s

    def _move_s(self, kind: NodeType, state_bytes: int, gpus: int, tier: str) -> float:
        copy_s = state_bytes / gpus / kind.host_bytes_per_s
        half_s = self._half_s if self._half_s is not None else kind.move_fixed_s + copy_s
        if tier != NVME:
            return half_s
        nvme_s = node_bytes(kind, state_bytes, gpus) / kind.nvme_bytes_per_s
        return max(half_s, kind.move_fixed_s + nvme_s)


def node_bytes(kind: NodeType, state_bytes: int, gpus: int) -> float:
    """Of the state of so many GPUs, what lies on the node that has the most of them."""
    return state_bytes / gpus * min(gpus, kind.gpus)
