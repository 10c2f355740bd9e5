"""What several ranks of a node hold leaves one GPU only, if digests show that it is the same."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.replicas import OWN_BYTES, Replica
from plexrl.statemanager.daemon.handlers.moves import DIGESTED_BYTES_MIN
from plexrl.statemanager.layout.keys import StatePart
from plexrl.statemanager.protocol.messages import ListReplicated
from plexrl.wire.operations import OperationKind
from tests.statemanager.conftest import run_together, wait_until
from tests.statemanager.device.test_emulated_workers import Daemon
from tests.statemanager.emulated_cuda import EmulatedCuda
from tests.statemanager.emulated_gpu import EmulatedArena, EmulatedGpu

COMMON_BYTES = DIGESTED_BYTES_MIN + 4098


class CountingCuda(EmulatedCuda):
    """Counts what is copied to host memory."""

    def __init__(self, name: str) -> None:
        super().__init__(name, device_bytes=4 * COMMON_BYTES)
        self.copied: list[int] = []

    def copy_to_host(self, host: int, address: int, nbytes: int, stream: int) -> None:
        super().copy_to_host(host, address, nbytes, stream)
        self.copied.append(nbytes)


class Node(Daemon):
    """A StateManager whose GPU has room for two replicas."""

    def another_driver(self) -> CountingCuda:
        driver = CountingCuda(self.name)
        driver.enter(0)
        return driver

    def start(self) -> None:
        self.config = replace(self.config, host_bytes=4 * COMMON_BYTES)
        super().start()

    def shared(self) -> tuple[int, int]:
        """Sections that were stored once for two ranks, and bytes of them that stayed on the
        device."""
        found = self._store.replicas
        return found.shared, found.uncopied_bytes

    def copied_bytes(self) -> int:
        """Bytes copied to host memory since the last call."""
        driver = self.driver
        assert isinstance(driver, CountingCuda)
        found = sum(driver.copied)
        driver.copied.clear()
        return found


class FullArena(EmulatedArena):
    """An arena on a device that has no memory left for anything else."""

    is_full = False

    @property
    def buffer(self) -> memoryview:
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().buffer


class FullGpu(EmulatedGpu):
    """Makes such arenas."""

    def make_arena(self, nbytes: int) -> EmulatedArena:
        return FullArena(self.driver, nbytes, uuid=self.uuid)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="plexrl-", dir="/dev/shm") as host_dir:
        made = Node(tmp_path, Path(host_dir))
        yield made
        made.stop()


@pytest.fixture
def ranks(node: Node) -> Iterator[list[Replica]]:
    """Two ranks with the same weights on the GPU."""
    made = [
        Replica(node.config, FullGpu(node.another_driver()), rank, COMMON_BYTES)
        for rank in range(2)
    ]
    for each in made:
        each.move(OperationKind.LOAD, 0)
        each.fill(1)
    yield made
    for each in made:
        each.close()


def both(ranks: list[Replica], kind: OperationKind, seq: int) -> None:
    run_together(*(partial(each.move, kind, seq) for each in ranks))


def test_equal_weights_are_copied_out_once_and_loaded_by_both(
    node: Node, ranks: list[Replica]
) -> None:
    wanted = [(each.common.clone(), each.own.clone()) for each in ranks]
    both(ranks, OperationKind.SNAPSHOT, 1)
    assert node.copied_bytes() == COMMON_BYTES + 2 * OWN_BYTES
    both(ranks, OperationKind.PUBLISH, 1)
    assert node.copied_bytes() == COMMON_BYTES
    assert node.shared() == (2, 2 * COMMON_BYTES)
    for each in ranks:
        each.own.add_(1)
    both(ranks, OperationKind.OFFLOAD, 2)
    assert node.copied_bytes() == COMMON_BYTES + 2 * OWN_BYTES
    both(ranks, OperationKind.LOAD, 2)
    for each, (common, own) in zip(ranks, wanted, strict=True):
        assert torch.equal(each.common, common)
        assert torch.equal(each.own, own + 1)
    both(ranks, OperationKind.OFFLOAD, 2)
    assert node.copied_bytes() == 0, "nothing has changed"


def test_weights_that_differ_by_a_bit_are_copied_out_by_each(
    node: Node, ranks: list[Replica]
) -> None:
    ranks[1].common[COMMON_BYTES // 2] ^= 128
    wanted = [each.common.clone() for each in ranks]
    both(ranks, OperationKind.OFFLOAD, 1)
    assert node.copied_bytes() == 2 * (COMMON_BYTES + OWN_BYTES), "none was copied to be compared"
    both(ranks, OperationKind.LOAD, 1)
    for each, common in zip(ranks, wanted, strict=True):
        assert torch.equal(each.common, common)


def test_without_memory_for_a_digest_copies_are_compared(node: Node, ranks: list[Replica]) -> None:
    arena = ranks[1].backend.arena
    assert isinstance(arena, FullArena)
    arena.is_full = True
    both(ranks, OperationKind.OFFLOAD, 1)
    arena.is_full = False
    assert node.copied_bytes() == 2 * (COMMON_BYTES + OWN_BYTES)
    assert node.shared() == (1, 0)
    both(ranks, OperationKind.LOAD, 1)
    assert torch.equal(ranks[0].common, ranks[1].common)


def test_a_restarted_daemon_compares_copies_with_what_it_has(
    node: Node, ranks: list[Replica]
) -> None:
    ranks[0].move(OperationKind.OFFLOAD, 1)
    node.stop()
    node.start()
    node.copied_bytes()
    # The first rank registers again, so that it counts as one that holds these weights.
    ranks[0].client.usage()
    ranks[1].move(OperationKind.OFFLOAD, 1)
    assert node.copied_bytes() == COMMON_BYTES + OWN_BYTES
    assert node.shared() == (1, 0)
    both(ranks, OperationKind.LOAD, 1)
    assert torch.equal(ranks[0].common, ranks[1].common)


def test_only_what_others_hold_and_is_large_gets_a_digest(ranks: list[Replica]) -> None:
    def replicated(*parts: StatePart) -> list[int]:
        answer = ranks[0].client.request(ListReplicated(parts=parts))
        return [each["section"]["nbytes"] for each in answer["sections"]]

    assert replicated(StatePart.OPTIMIZER, StatePart.PARAMETER) == [COMMON_BYTES]
    assert replicated(StatePart.OPTIMIZER) == []
    ranks[1].close()
    # The daemon notices that it has gone a moment later.
    wait_until(lambda: replicated(StatePart.OPTIMIZER, StatePart.PARAMETER) == [])
