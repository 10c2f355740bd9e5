"""NUMA policy of mappings; no effect on machines with one memory node."""

import ctypes
import logging
import os
import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

LOG = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED, _MPOL_INTERLEAVE = 1, 3
_LIBC = ctypes.CDLL(None, use_errno=True)


def memory_nodes(root: Path = NODES) -> tuple[int, ...]:
    """Numbers of this machine's memory nodes; empty if the system does not report them."""
    return tuple(sorted(int(path.name[4:]) for path in root.glob("node[0-9]*")))


def nodes_near(pci_addresses: Iterable[str], root: Path = PCI) -> tuple[int, ...]:
    """Memory nodes to which these PCI devices are attached; empty if the system does not report
    them.

    Args:
        pci_addresses: such as `0000:18:00.0`.
        root: the system's folder of PCI devices.
    """
    found = set[int]()
    for address in pci_addresses:
        # The number is -1 on machines with one node, and in virtual machines that hide it.
        with suppress(OSError, ValueError):
            found.add(int((root / address.lower() / "numa_node").read_text()))
    return tuple(sorted(found - {-1}))


def set_memory_policy(
    address: int,
    nbytes: int,
    *,
    preferred: Sequence[int] = (),
    nodes: tuple[int, ...] | None = None,
) -> None:
    """Allocate the mapping's future pages on some memory nodes, interleaved if they are several.

    This is a preference: the kernel skips a full node.

    Args:
        address: start of the mapping.
        nbytes: its size.
        preferred: the nodes; none: all.
        nodes: those of the machine; absent: the system's.
    """
    nodes = memory_nodes() if nodes is None else nodes
    number = _MBIND.get(platform.machine())
    if len(nodes) < 2 or number is None:
        return
    chosen = preferred or nodes
    mask = (ctypes.c_ulong * (max(*nodes, *chosen) // 64 + 1))()
    for one in chosen:
        mask[one // 64] |= 1 << one % 64
    policy = _MPOL_PREFERRED if len(chosen) == 1 else _MPOL_INTERLEAVE
    # The kernel reads one bit fewer than the given count.
    bits = len(mask) * 64 + 1
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), policy, mask)
    if _LIBC.syscall(number, *arguments, ctypes.c_ulong(bits), 0) != 0:
        LOG.warning(
            "memory nodes %s could not be preferred: %s",
            ", ".join(map(str, chosen)),
            os.strerror(ctypes.get_errno()),
        )
