"""On which memory node the pages of a mapping come to lie. Nothing to choose where there is one."""

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
    """Numbers of this machine's memory nodes; empty where the system does not say."""
    return tuple(sorted(int(path.name[4:]) for path in root.glob("node[0-9]*")))


def place_pages(
    address: int, nbytes: int, *, node: int | None = None, nodes: tuple[int, ...] | None = None
) -> None:
    """Have pages that are not there yet come from `node`, or from all nodes in turn.

    A preference: a node that is full is passed over. `nodes` absent: this machine's.
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
    # The kernel reads one bit fewer than it is told.
    bits = len(mask) * 64 + 1
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), policy, mask)
    if _LIBC.syscall(number, *arguments, ctypes.c_ulong(bits), 0) != 0:
        LOG.warning("memory node %s was not preferred: %s", node, os.strerror(ctypes.get_errno()))
