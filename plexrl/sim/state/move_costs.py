"""The cost model of state moves, by node type. Pure.

A move takes `fixed_s + bytes / rate`, the form that the scheduler also fits to measured moves. All
GPUs of a node move at the same time, each over its own link to host memory; they share the node's
NVMe and network. A load from NVMe is pipelined in blocks, so the slower of the two links counts.
All nodes of a job move at the same time; the node with the largest part finishes last. The model
ignores contention with moves of other jobs on the same node.

Sources of `NodeType`'s rates:

- 50e9 bytes/s between a GPU and pinned host memory: an H200 on PCIe 5 x16 reaches 52 to 55
  (published with DeepSpeed's DeepNVMe); the StateManager's target is 90 % of that.
- 20e9 bytes/s of NVMe: eight Gen 5 drives read 48 and write 26 (same source), and ServerlessLLM's
  store reaches about 20 on such a node. The lower rate serves both directions.
- 50e9 bytes/s of network: one NIC of 400 Gbit/s per node, though such nodes have several.
- A load copies during the offload before it as much as finds free GPU memory; its fixed part
  follows the offload.
- 0.5 s fixed: from the first rank's request to the last rank's answer. A warm switch needs well
  under 0.1 s outside its copies; the rest is for suspending and resuming communicators (NCCL frees
  10 GB a rank in milliseconds and destroys a process group in 0.9 s).

A switch with both states in host memory then takes, on the published GPUs, 1.5 s for 7B (106 GB on
8 GPUs), 1.1 s for 30B (427 GB on 256) and 1.3 s for 235B (3.3 TB on 384). PlexRL reports 19.0 s to
load the optimizer states of 30B in a colocated setup without pinned memory; use `switch_s` to model
such systems.
"""

from collections.abc import Iterable

from plexrl.errors import InvalidRequestError
from plexrl.scheduler.rules.switch_cost import HOST, NVME
from plexrl.sim.workload.scenario import NodeType, Pool


class MoveCosts:
    """Durations of moves in seconds."""

    def __init__(self, pools: Iterable[Pool], switch_s: float | None = None) -> None:
        """`switch_s`: duration of a switch, half for the offload and half for the load, whatever
        the size and wherever the state lies: moves to and from NVMe take no time beside it. Absent:
        by the rates.

        Raises:
            InvalidRequestError: two different node types share a name, or `switch_s` is below 0.
        """
        if switch_s is not None and switch_s < 0.0:
            raise InvalidRequestError(f"a switch takes at least 0 s, not {switch_s:g}")
        self._types: dict[str, NodeType] = {}
        for pool in pools:
            known = self._types.setdefault(pool.node_type.name, pool.node_type)
            if known != pool.node_type:
                raise InvalidRequestError(
                    f"two different node types are named {known.name!r}: give each its own name"
                )
        self._half_s = None if switch_s is None else switch_s / 2.0

    def load_s(self, node_type: str, state_bytes: int, gpus: int, tier: str = HOST) -> float:
        """Duration of a load of the state of `gpus` GPUs from `tier` (`host` or `nvme`)."""
        return self._move_s(self._types[node_type], state_bytes, gpus, tier)

    def offload_s(self, node_type: str, state_bytes: int, gpus: int, tier: str = HOST) -> float:
        """Duration of an offload to `tier`."""
        return self._move_s(self._types[node_type], state_bytes, gpus, tier)

    def prefetched_part(self, node_type: str, leaving_bytes: float, coming_bytes: float) -> float:
        """Part of a load that finds free GPU memory during the offload before it, by the bytes of
        both states per GPU. 0 if a switch has a fixed duration, which then includes this."""
        if self._half_s is not None or coming_bytes <= 0.0:
            return 0.0
        free_bytes = self._types[node_type].gpu_memory_bytes - leaving_bytes
        return min(max(0.0, free_bytes / coming_bytes), 1.0)

    def fixed_s(self, node_type: str) -> float:
        """Seconds of each move that do not depend on its bytes."""
        return self._types[node_type].move_fixed_s

    def migrate_s(self, node_type: str, state_bytes: int, gpus: int) -> float:
        """Duration of a migration into the host memory of new nodes."""
        kind = self._types[node_type]
        return kind.move_fixed_s + node_bytes(kind, state_bytes, gpus) / kind.network_bytes_per_s

    def nvme_s(self, node_type: str, nbytes: int) -> float:
        """Duration of a copy between a node's host memory and its NVMe."""
        if self._half_s is not None:
            return 0.0
        return nbytes / self._types[node_type].nvme_bytes_per_s

    def _move_s(self, kind: NodeType, state_bytes: int, gpus: int, tier: str) -> float:
        if self._half_s is not None:
            return self._half_s
        copy_s = state_bytes / gpus / kind.host_bytes_per_s
        if tier == NVME:
            copy_s = max(copy_s, node_bytes(kind, state_bytes, gpus) / kind.nvme_bytes_per_s)
        return kind.move_fixed_s + copy_s


def node_bytes(kind: NodeType, state_bytes: int, gpus: int) -> float:
    """Bytes of the state on the node that has the most of the job's GPUs."""
    return state_bytes / gpus * min(gpus, kind.gpus)
