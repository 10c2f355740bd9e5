"""NUMA policy of mappings; no effect on machines with one memory node."""

import ctypes
import logging
import os
import platform
from pathlib import Path

LOG = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED, _MPOL_INTERLEAVE = 1, 3
_LIBC = ctypes.CDLL(None, use_errno=True)


def memory_nodes(root: Path = NODES) -> tuple[int, ...]:
    """Numbers of this machine's memory nodes; empty if the system does not report them."""
    return tuple(sorted(int(path.name[4:]) for path in root.glob("node[0-9]*")))


def set_memory_policy(
    address: int, nbytes: int, *, node: int | None = None, nodes: tuple[int, ...] | None = None
) -> None:
    """Allocate the mapping's future pages on `node`, or interleaved over all nodes.

    This is a preference: the kernel skips a full node. `nodes` absent: this machine's nodes.
    """
    nodes = memory_nodes() if nodes is None else nodes
    number = _MBIND.get(platform.machine())
    if len(nodes) < 2 or number is None:
        return
    chosen = nodes if node is None else (node,)
    mask = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for one in chosen:
        mask[one // 64] |= 1 << one % 64
    policy = _MPOL_INTERLEAVE if node is None else _MPOL_PREFERRED
    # The kernel reads one bit fewer than the given count.
    bits = len(mask) * 64 + 1
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), policy, mask)
    if _LIBC.syscall(number, *arguments, ctypes.c_ulong(bits), 0) != 0:
        LOG.warning(
            "memory node %s could not be preferred: %s", node, os.strerror(ctypes.get_errno())
        )
