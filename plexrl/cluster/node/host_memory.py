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
HOST_BYTES_MIN: Final = 2 * GIB
"""Also the size without GPUs, and with a part of one (MIG): other parts may be other nodes of the
machine. A memory file system that is smaller is refused later, with what to do."""


def default_host_bytes(uuids: Sequence[str], root: Path = ROOT) -> int:
    """With whole GPUs half of the memory that processes of this control group may use, at most the
    memory file system, and at least `HOST_BYTES_MIN`.

    Args:
        uuids: names of the node's GPUs.
        root: the system's root folder.
    """
    if not uuids or any(uuid.startswith("MIG-") for uuid in uuids):
        return HOST_BYTES_MIN
    shared = os.statvfs(root / SHARED_MEMORY.relative_to("/"))
    size = int(usable_bytes(root) * SHARE)
    return max(HOST_BYTES_MIN, min(size, shared.f_frsize * shared.f_blocks))
