"""The default size of the host tier, from the machine's memory and its control groups."""

from pathlib import Path

import pytest

from plexrl.cluster.node.host_memory import HOST_BYTES_USUAL, default_host_bytes

GIB = 1 << 30
GPUS = ("GPU-a", "GPU-b")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 12 GiB, whose memory file system is larger than half of it."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "shm").symlink_to("/")
    (tmp_path / "proc" / "meminfo").write_text("MemFree: 1 kB\nMemTotal: 12582912 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/pod/box\n")
    return tmp_path


def bound(root: Path, folder: str, file: str, text: str) -> None:
    path = root / "sys" / "fs" / "cgroup" / folder
    path.mkdir(parents=True, exist_ok=True)
    (path / file).write_text(f"{text}\n")


def test_half_of_the_machine_without_control_groups(root: Path) -> None:
    assert default_host_bytes(GPUS, root) == 6 * GIB


def test_the_least_bound_of_the_groups_above_counts(root: Path) -> None:
    bound(root, "pod/box", "memory.max", "max")
    bound(root, "pod", "memory.max", str(10 * GIB))
    assert default_host_bytes(GPUS, root) == 5 * GIB
    bound(root, "", "memory.max", str(8 * GIB))
    assert default_host_bytes(GPUS, root) == 4 * GIB


def test_groups_of_version_1_count_too(root: Path) -> None:
    (root / "proc" / "self" / "cgroup").write_text("3:cpu:/a\n2:memory,hugetlb:/b\n")
    bound(root, "memory/b", "memory.limit_in_bytes", str(8 * GIB))
    assert default_host_bytes(GPUS, root) == 4 * GIB


def test_a_small_machine_has_the_least_size(root: Path) -> None:
    bound(root, "pod", "memory.max", str(GIB))
    assert default_host_bytes(GPUS, root) == HOST_BYTES_USUAL


@pytest.mark.parametrize("uuids", [(), ("MIG-a",)])
def test_nodes_that_share_a_machine_do_not_take_half_of_it_each(
    root: Path, uuids: tuple[str, ...]
) -> None:
    assert default_host_bytes(uuids, root) == HOST_BYTES_USUAL
