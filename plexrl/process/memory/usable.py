"""Memory that processes of this control group may use, and what is left of it."""

from pathlib import Path
from typing import Final

ROOT: Final = Path("/")


def usable_bytes(root: Path = ROOT) -> int:
    """The machine's memory, or the least bound of the control groups of this process.

    Args:
        root: the system's root folder.
    """
    return min([_of_meminfo(root, "MemTotal"), *[bound for bound, _ in _groups(root)]])


def available_bytes(root: Path = ROOT) -> int:
    """Bytes of memory that can be allocated without evicting anything but cached files.

    Args:
        root: the system's root folder.
    """
    left = [bound - used for bound, used in _groups(root)]
    return max(0, min([_of_meminfo(root, "MemAvailable"), *left]))


def _of_meminfo(root: Path, wanted: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, size = line.partition(":")
        if name == wanted:
            return int(size.split()[0]) << 10
    return 0


def _groups(root: Path) -> list[tuple[int, int]]:
    """(bound, bytes in use but for cached files) of the control groups of this process that have a
    bound, of both versions."""
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        bound = "memory.limit_in_bytes" if controllers else "memory.max"
        used = "memory.usage_in_bytes" if controllers else "memory.current"
        cached = "total_inactive_file" if controllers else "inactive_file"
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        folder = top / path.strip("/")
        # In a container the path may be the host's, and the container's group is the top.
        for each in (folder, *folder.parents):
            if (number := _number(each / bound)) is not None:
                in_use = (_number(each / used) or 0) - _statistic(each / "memory.stat", cached)
                found.append((number, max(0, in_use)))
            if each == top:
                break
    return found


def _number(file: Path) -> int | None:
    """A number in a file; None: no file, or another text such as `max`."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None


def _statistic(file: Path, wanted: str) -> int:
    for line in file.read_text().splitlines() if file.is_file() else ():
        name, _, value = line.partition(" ")
        if name == wanted:
            return int(value)
    return 0
