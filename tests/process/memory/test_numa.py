"""NUMA placement, on a fake folder of the system's with two memory nodes."""

import mmap
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.process.memory.numa import (
    cores_near,
    cores_of,
    distinct,
    listed,
    memory_nodes,
    node_of,
    set_memory_policy,
    work_near,
)
from plexrl.statemanager.bytes.mapped_memory import address_of
from plexrl.statemanager.device.cuda.device import CudaDevices
from tests.statemanager.emulated_cuda import EmulatedCuda


@pytest.fixture
def pci(tmp_path: Path) -> Path:
    """GPUs on two nodes, and one whose node is not known."""
    nodes = {"0000:aa:00.0": "1", "0000:ab:00.0": "0", "0000:ac:00.0": "0", "0000:ad:00.0": "-1"}
    for address, node in nodes.items():
        (tmp_path / "pci" / address).mkdir(parents=True)
        (tmp_path / "pci" / address / "numa_node").write_text(f"{node}\n")
    return tmp_path / "pci"


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """Node 0 with the first of this test's cores, node 1 with the others."""
    first, *others = sorted(os.sched_getaffinity(0))
    for number, cores in enumerate(([first], others)):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{','.join(map(str, cores))}\n")
    return tmp_path


def test_memory_nodes_are_read_from_the_system(nodes: Path) -> None:
    for name in ("node12", "has_cpu"):
        (nodes / name).mkdir()
    assert memory_nodes(nodes) == (0, 1, 12)
    assert memory_nodes(nodes / "absent") == ()


def test_the_memory_node_of_a_gpu_is_that_of_its_pci_device(pci: Path) -> None:
    gpus = CudaDevices(EmulatedCuda("numa", devices=3)).pci_addresses()
    assert [node_of(each, pci) for each in gpus] == [1, 0, 0]
    assert distinct(node_of(each, pci) for each in gpus) == (0, 1)
    unknown = [node_of(each, pci) for each in ("0000:ad:00.0", "0000:ff:00.0")]
    assert unknown == [None, None]
    assert distinct(unknown) == ()


def test_lists_of_cores_are_read() -> None:
    assert listed("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert listed("\n") == frozenset(), "a node without cores"


def test_cores_of_an_unknown_node_are_none(nodes: Path) -> None:
    (nodes / "node1" / "cpulist").write_text("some")
    assert cores_of(0, nodes) == {min(os.sched_getaffinity(0))}
    assert cores_of(1, nodes) == cores_of(7, nodes) == frozenset()


@given(allowed=st.sets(st.integers(0, 9), min_size=1), near=st.sets(st.integers(0, 9)))
def test_a_process_keeps_cores_that_it_may_use(allowed: set[int], near: set[int]) -> None:
    found = cores_near(allowed, near)
    assert found
    assert found <= allowed
    assert found <= near or not allowed & near


def placed(address: str, pci: Path, root: Path) -> tuple[set[int], str]:
    """Cores of a thread after `work_near`, and the policy of memory that the thread maps."""
    found: list[tuple[set[int], str]] = []

    def run() -> None:
        work_near(address, pci=pci, root=root)
        with mmap.mmap(-1, 1 << 20) as memory:
            memory[0] = 1
            start = f"{address_of(memory):08x} "
            maps = Path(f"/proc/self/task/{threading.get_native_id()}/numa_maps").read_text()
            policies = [line.split()[1] for line in maps.splitlines() if line.startswith(start)]
        found.append((os.sched_getaffinity(0), policies[0]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="the kernel shows no memory policies"
)
def test_a_thread_works_on_the_node_of_its_gpu(pci: Path, nodes: Path) -> None:
    before = os.sched_getaffinity(0)
    cores, policy = placed("0000:AB:00.0", pci, nodes)
    assert cores == cores_of(0, nodes)
    assert policy == "prefer:0"
    assert placed("0000:ad:00.0", pci, nodes) == (before, "default"), "its node is not known"
    (nodes / "node1" / "cpulist").unlink()
    (nodes / "node1").rmdir()
    assert placed("0000:ab:00.0", pci, nodes) == (before, "default"), "there is one node"
    assert os.sched_getaffinity(0) == before, "other threads stay where they were"


def test_a_preference_for_a_node_is_accepted_by_the_kernel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The test passes two nodes, because the machine may have only one."""
    with mmap.mmap(-1, 1 << 20) as memory:
        address = address_of(memory)
        set_memory_policy(address, 1 << 20, preferred=(0,), nodes=(0, 1))
        assert not caplog.records
        far = 1 << 9
        set_memory_policy(address, 1 << 20, preferred=(far,), nodes=(0, far))
    assert "could not be preferred" in caplog.text
