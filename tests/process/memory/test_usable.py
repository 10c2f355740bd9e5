"""Memory that is left, from the system's and the control groups' figures."""

from pathlib import Path

import pytest

from plexrl.process.memory.usable import available_bytes, usable_bytes

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 12 GiB, of which 9 are available; this process is in a group of a group."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 12582912 kB\nMemAvailable: 9437184 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/pod/box\n")
    return tmp_path


def group(root: Path, folder: str, **files: str) -> None:
    path = root / "sys" / "fs" / "cgroup" / folder
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_groups_the_machine_counts(root: Path) -> None:
    assert (usable_bytes(root), available_bytes(root)) == (12 * GIB, 9 * GIB)


def test_the_group_with_the_least_left_counts_without_its_cached_files(root: Path) -> None:
    stat = f"anon 1\ninactive_file {GIB}"
    group(root, "pod/box", memory__max=str(8 * GIB), memory__current=str(2 * GIB))
    group(root, "pod", memory__max=str(10 * GIB), memory__current=str(6 * GIB), memory__stat=stat)
    assert (usable_bytes(root), available_bytes(root)) == (8 * GIB, 5 * GIB)


def test_a_group_without_a_bound_does_not_count(root: Path) -> None:
    group(root, "pod", memory__max="max", memory__current=str(11 * GIB))
    assert available_bytes(root) == 9 * GIB


def test_groups_of_version_1_count(root: Path) -> None:
    (root / "proc" / "self" / "cgroup").write_text("3:cpu:/a\n2:memory,hugetlb:/b\n")
    figures = {"limit_in_bytes": 4 * GIB, "usage_in_bytes": 5 * GIB}
    group(root, "memory/b", **{f"memory__{name}": str(size) for name, size in figures.items()})
    group(root, "memory/b", memory__stat=f"inactive_file 1\ntotal_inactive_file {2 * GIB}")
    assert (usable_bytes(root), available_bytes(root)) == (4 * GIB, GIB)


def test_a_group_beyond_its_bound_has_nothing_left(root: Path) -> None:
    group(root, "pod", memory__max=str(GIB), memory__current=str(2 * GIB))
    assert available_bytes(root) == 0


def test_this_machine_has_some_left() -> None:
    assert 0 < available_bytes() <= usable_bytes()
