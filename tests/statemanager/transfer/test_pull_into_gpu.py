"""Pulls into an arena on an emulated GPU: the same bytes as into host memory, and no others."""

import gc
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import numpy as np
import pytest

from plexrl.errors import DeviceError
from plexrl.statemanager.device.cuda.device import CudaDevices
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.protocol.delta_policy import DeltaPolicy
from plexrl.statemanager.store.receiving.pull_target import CudaTarget
from plexrl.statemanager.store.receiving.reader import VersionReader
from plexrl.statemanager.transfer.pull import KnownLayouts, Puller
from plexrl.statemanager.transfer.transport.choice import Transports
from tests.statemanager.conftest import DEADLINE_S, NETWORK, Daemon, StartDaemon
from tests.statemanager.device_rigs import segments
from tests.statemanager.emulated_cuda import EmulatedCuda
from tests.statemanager.emulated_gpu import EmulatedArena
from tests.statemanager.transfer.test_weight_sync import Interrupted
from tests.statemanager.weight_sync import SERVING_TCP, Rank, fsdp, tensor_parallel

ACTOR, ROLLOUT = "job/actor", "job/rollout"
BLOCK_BYTES = 4096
"""Every tensor but the smallest is in several blocks."""


@pytest.fixture
def nodes(start_daemon: StartDaemon) -> list[Daemon]:
    """Two that hold a trainer's ranks, and serve each other over TCP."""
    return [start_daemon(**SERVING_TCP) for _ in range(2)]


@pytest.fixture
def driver() -> Iterator[EmulatedCuda]:
    made = EmulatedCuda(f"pull-{uuid.uuid4().hex[:8]}")
    made.enter(0)
    yield made
    # The traceback of a lost source holds the arena, whose addresses end with it.
    gc.collect()
    made.check_nothing_left()


@pytest.fixture
def devices(driver: EmulatedCuda) -> Iterator[CudaDevices]:
    made = CudaDevices(driver)
    yield made
    made.close()


@contextmanager
def lent_arena(devices: CudaDevices, driver: EmulatedCuda, nbytes: int) -> Iterator[EmulatedArena]:
    arena = EmulatedArena(driver, nbytes, uuid="")
    loan = devices.allocate(arena.nbytes, device=0, uid=0)
    arena.attach(segments(loan), keep_contents=False)
    yield arena
    arena.close()
    devices.free(loan)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("way", ["shared memory", "tcp"])
def test_a_gpu_gets_the_bytes_that_host_memory_gets(
    nodes: list[Daemon], driver: EmulatedCuda, devices: CudaDevices, way: str, dtype: str
) -> None:
    trainers = [Rank(nodes[rank // 2], ACTOR, rank, fsdp(rank, 4)) for rank in range(4)]
    rollout = Rank(nodes[0], ROLLOUT, 0, tensor_parallel(1, 2), dtype=dtype)
    sources = [node.config.listen if way == "shared memory" else node.tcp for node in nodes]
    layouts = KnownLayouts()
    ways = transports(nodes[0], layouts)
    puller = Puller(ways.open, layouts, DEADLINE_S)
    wants = Layout.of(rollout.slices)
    for rank in trainers:
        rank.fill(1)
    with lent_arena(devices, driver, rollout.arena.nbytes) as arena:
        target = CudaTarget(arena, BLOCK_BYTES)
        expected = np.full(arena.nbytes, 0xA5, np.uint8)
        for version in (1, 2):
            for rank in trainers:
                rank.client.publish(seq=version, token=1)
            delta = DeltaPolicy(block_bytes=64)
            result = puller.pull(sources, ACTOR, version, wants, target, delta)
            rollout.pull(sources, version)
            host = np.frombuffer(rollout.arena.buffer, np.uint8)
            for piece in rollout.slices:
                at = slice(piece.arena_offset, piece.arena_offset + piece.nbytes)
                expected[at] = host[at]
            assert bytes(arena.buffer) == expected.tobytes()
            if version == 1:
                assert result.bytes_moved == rollout.nbytes
            else:
                assert 0 < result.bytes_moved < 0.2 * rollout.nbytes
            for rank in trainers:
                rank.bits(rank.slices[0]).view(np.uint32)[::7, 60] ^= np.uint32(1 << 22)
        driver.broken = True
        with pytest.raises(DeviceError):
            puller.pull(sources, ACTOR, 2, wants, target)
        assert puller.is_torn
        driver.broken = False
        assert puller.pull(sources, ACTOR, 2, wants, target).bytes_moved == rollout.nbytes
        assert bytes(arena.buffer) == expected.tobytes()
        target.close()
    ways.close()
    for rank in (*trainers, rollout):
        rank.close()


def test_what_a_lost_source_sent_to_a_gpu_is_pulled_from_another(
    nodes: list[Daemon], driver: EmulatedCuda, devices: CudaDevices
) -> None:
    trainers = [Rank(node, ACTOR, rank, fsdp(0, 1)) for rank, node in enumerate(nodes)]
    rollout = Rank(nodes[0], ROLLOUT, 0, tensor_parallel(0, 1))
    for trainer in trainers:
        trainer.publish(1)
    layouts = KnownLayouts()
    ways = transports(nodes[0], layouts)

    def opened(
        held: ExitStack, address: str, deployment: str, seq: int, known: Collection[str]
    ) -> Sequence[VersionReader]:
        readers = ways.open(held, address, deployment, seq, known)
        if address == nodes[1].config.listen:
            return [cast("VersionReader", Interrupted(reader, nodes[1].kill)) for reader in readers]
        return readers

    puller = Puller(opened, layouts, DEADLINE_S)
    with lent_arena(devices, driver, rollout.arena.nbytes) as arena:
        target = CudaTarget(arena, BLOCK_BYTES)
        sources = [node.config.listen for node in nodes]
        result = puller.pull(sources, ACTOR, 1, Layout.of(rollout.slices), target)
        assert result.attempts == 2
        assert result.bytes_moved > result.bytes_wanted == sum(result.bytes_by_source.values())
        size = len(rollout.arena.buffer)
        rollout.arena.buffer[:] = arena.buffer[:size]
        target.close()
    assert rollout.holds(1)
    ways.close()
    for rank in (*trainers, rollout):
        rank.close()


def transports(node: Daemon, layouts: KnownLayouts) -> Transports:
    ticket = node.worker_ticket(ROLLOUT)
    return Transports(NETWORK, layouts.find, ticket=ticket, timeout_s=DEADLINE_S)
