"""NUMA nodes: which of them devices are attached to, and where memory and threads are placed. No
effect on machines with one memory node."""

import ctypes
import logging
import os
import platform
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

LOG = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")

_MBIND = {"x86_64": 237, "aarch64": 235}
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED, _MPOL_INTERLEAVE = 1, 3
_LIBC = ctypes.CDLL(None, use_errno=True)


def memory_nodes(root: Path = NODES) -> tuple[int, ...]:
    """Numbers of this machine's memory nodes; empty if the system does not report them.

    Args:
        root: the system's folder of memory nodes.
    """
    return tuple(sorted(int(path.name[4:]) for path in root.glob("node[0-9]*")))


def node_of(pci_address: str, root: Path = PCI) -> int | None:
    """Memory node to which a PCI device is attached; None if the system does not report it.

    Args:
        pci_address: such as `0000:18:00.0`.
        root: the system's folder of PCI devices.
    """
    try:
        node = int((root / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    # It is -1 on machines with one node, and in virtual machines that hide it.
    return node if node >= 0 else None


def distinct(nodes: Iterable[int | None]) -> tuple[int, ...]:
    """The nodes that are known, each once."""
    return tuple(sorted({node for node in nodes if node is not None}))


def cores_of(node: int, root: Path = NODES) -> frozenset[int]:
    """Cores of a memory node; empty if the system does not report them.

    Args:
        node: its number.
        root: the system's folder of memory nodes.
    """
    try:
        return listed((root / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def listed(text: str) -> frozenset[int]:
    """The numbers in a list of the system's, such as `0-3,8`.

    Raises:
        ValueError: the text is no such list.
    """
    found = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if part:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def cores_near(allowed: Set[int], near: Set[int]) -> Set[int]:
    """Cores of a process that uses a device: those of the device's node that the process may use.
    If there are none, because the operator chose others, all that it may use.

    Args:
        allowed: cores that the process may use.
        near: cores of the device's node.
    """
    return allowed & near or allowed


def work_near(pci_address: str, *, pci: Path = PCI, root: Path = NODES) -> None:
    """Run this thread, and those that it starts, on cores of the device's memory node, and allocate
    their memory there. Does nothing if the node is unknown, or the machine has one only.

    Args:
        pci_address: such as `0000:18:00.0`.
        pci: the system's folder of PCI devices.
        root: the system's folder of memory nodes.
    """
    node, nodes = node_of(pci_address, pci), memory_nodes(root)
    if node is None or len(nodes) < 2:
        return
    allowed = os.sched_getaffinity(0)
    cores = cores_near(allowed, cores_of(node, root))
    if cores != allowed:
        os.sched_setaffinity(0, cores)
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is not None:
        _call(number, (_MPOL_PREFERRED, *_mask((node,), nodes)), (node,))


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
    chosen = tuple(preferred) or nodes
    policy = _MPOL_PREFERRED if len(chosen) == 1 else _MPOL_INTERLEAVE
    mapping = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes))
    _call(number, (*mapping, policy, *_mask(chosen, nodes), 0), chosen)


def _mask(
    chosen: tuple[int, ...], nodes: tuple[int, ...]
) -> tuple[ctypes.Array[ctypes.c_ulong], ctypes.c_ulong]:
    """A set of nodes for the kernel, and its size."""
    mask = (ctypes.c_ulong * (max(*nodes, *chosen) // 64 + 1))()
    for one in chosen:
        mask[one // 64] |= 1 << one % 64
    # The kernel reads one bit fewer than the given count.
    return mask, ctypes.c_ulong(len(mask) * 64 + 1)


def _call(number: int, arguments: tuple[object, ...], chosen: tuple[int, ...]) -> None:
    if _LIBC.syscall(number, *arguments) != 0:
        LOG.warning(
            "memory nodes %s could not be preferred: %s",
            ", ".join(map(str, chosen)),
            os.strerror(ctypes.get_errno()),
        )
