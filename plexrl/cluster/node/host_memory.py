"""Size of the host tier of a machine with GPUs, where states wait that have no GPU."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from plexrl.cluster.config.options import GIB
from plexrl.process.folders.folders import SHARED_MEMORY

SHARE: Final = 0.5
"""Part of the memory for the host tier. The rest is for workers: optimizers in host memory, pinned
buffers, data sets."""
HOST_BYTES_MIN: Final = 2 * GIB
"""Also the size without GPUs, and with a part of one (MIG): other parts may be other nodes of the
machine. A memory file system that is smaller is refused later, with what to do."""


def default_host_bytes(uuids: Sequence[str], root: Path = Path("/")) -> int:
    """With whole GPUs half of the memory that processes of this control group may use, at most the
    memory file system, and at least `HOST_BYTES_MIN`.

    Args:
        uuids: names of the node's GPUs.
        root: the system's root folder.
    """
    if not uuids or any(uuid.startswith("MIG-") for uuid in uuids):
        return HOST_BYTES_MIN
    shared = os.statvfs(root / SHARED_MEMORY.relative_to("/"))
    usable = min([_total_bytes(root), *_bounds(root)])
    return max(HOST_BYTES_MIN, min(int(usable * SHARE), shared.f_frsize * shared.f_blocks))


def _total_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, size = line.partition(":")
        if name == "MemTotal":
            return int(size.split()[0]) << 10
    return 0


def _bounds(root: Path) -> list[int]:
    """Bounds of the control groups of this process, of both versions."""
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        folder = top / path.strip("/")
        # In a container the path may be the host's, and the container's group is the top.
        for each in (folder, *folder.parents):
            text = (each / file).read_text().strip() if (each / file).is_file() else ""
            if text.isdecimal():
                found.append(int(text))
            if each == top:
                break
    return found
