"""Size of the host tier of a machine with GPUs, where states wait that have no GPU."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from plexrl.cluster.config.options import GIB
from plexrl.process.folders.folders import SHARED_MEMORY
from plexrl.process.memory.usable import ROOT, usable_bytes

SHARE: Final = 0.5
"""Part of the memory for the host tier. The rest is for workers: optimizers in host memory, pinned
buffers, data sets."""
HOST_BYTES_USUAL: Final = 2 * GIB
"""The size without GPUs, and with a part of one (MIG): other parts may be other nodes of the
machine."""
HOST_BYTES_MIN: Final = 64 << 20
"""A smaller memory file system is refused. Docker gives a container this much."""


def default_host_bytes(uuids: Sequence[str], root: Path = ROOT) -> int:
    """`HOST_BYTES_USUAL`, with whole GPUs half of the memory that processes of this control group
    may use if that is more, and at most the memory file system.

    Args:
        uuids: names of the node's GPUs.
        root: the system's root folder.
    """
    size = HOST_BYTES_USUAL
    if uuids and not any(uuid.startswith("MIG-") for uuid in uuids):
        size = max(size, int(usable_bytes(root) * SHARE))
    there = file_system_bytes(root / SHARED_MEMORY.relative_to("/"))
    return size if there is None else min(size, there)


def file_system_bytes(folder: Path) -> int | None:
    """Size of the file system of a folder; None: there is no such folder."""
    if not folder.is_dir():
        return None
    found = os.statvfs(folder)
    return found.f_frsize * found.f_blocks
