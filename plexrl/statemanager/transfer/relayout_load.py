"""Load of a rank's arena from versions that ranks of another layout saved.

Long ranges in this process's memory are copied to the arena directly. All others are gathered in
staging buffers, one per block of the arena, so that a device is written in a few long copies
whatever the layouts are.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from plexrl.errors import StateLostError
from plexrl.statemanager.bytes.data_plane import BLOCK_BYTES, DataPlane
from plexrl.statemanager.device.memory import ByteRun, WritableDevice
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.statemanager.layout.plan.cache import PlanCache
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.layout.plan.plan import Plan
from plexrl.statemanager.layout.staging import StagingBlocks, covered
from plexrl.statemanager.layout.strided.copies import BYTES_CAST, StridedCopies
from plexrl.statemanager.layout.versions import Manifest
from plexrl.statemanager.store.receiving.reader import StateReader, as_source
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.versions.leasing import lease_states
from plexrl.statemanager.transfer.relayout import check_dtypes, lost_error, saves, wanted_slices

DIRECT_BYTES_MIN = 64 << 10
"""A range of this many bytes is copied without staging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayoutLoad:
    """Result of a load."""

    manifest: Manifest
    """Manifest of one of the ranks that saved the version."""
    nbytes: int
    """Bytes loaded: those of the arena's slices, each once."""
    ranges: tuple[tuple[int, int], ...]
    """(offset, bytes) of the written parts of the arena."""
    tier: TierName
    """NVMe if any bytes came from there."""


class Relayouter:
    """Loads across layouts; caches plans. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._plane = store.plane
        self._planning = threading.Lock()
        self._plans = PlanCache()

    def load(
        self,
        deployment: str,
        seq: int,
        slices: Sequence[StateSlice],
        memory: WritableDevice,
    ) -> RelayoutLoad:
        """Fill the slices of an arena from a version that this daemon holds.

        Raises:
            StateLostError: no save is complete; nothing was written.
            InvalidRequestError: a tensor was saved with another shape or dtype; nothing was
                written.
            CorruptStateError: a version is damaged; the arena may be partly written.
        """
        with ExitStack() as held:
            opened = lease_states(self._store, held, deployment, seq)
            save, wants, plan = self._plan_load(deployment, seq, slices, opened)
            [target] = plan.targets
            used = {save[index]: copies for index, copies in target.copies.items()}
            _fill(self._plane, memory, used)
            for reader in used:
                reader.confirm()
            return RelayoutLoad(
                manifest=save[0].manifest,
                nbytes=target.nbytes,
                ranges=tuple((piece.arena_offset, piece.nbytes) for piece in wants),
                tier=TierName.HOST
                if all(reader.tier == TierName.HOST for reader in used)
                else TierName.NVME,
            )

    def _plan_load(
        self,
        deployment: str,
        seq: int,
        slices: Sequence[StateSlice],
        opened: Sequence[StateReader],
    ) -> tuple[list[StateReader], tuple[StateSlice, ...], Plan]:
        """The first save that covers all wanted slices, those slices, and the plan.

        A missing rank matters only if no other rank has replicas of its slices.
        """
        manifests = [reader.manifest for reader in opened]
        why = ""
        for indices in saves(manifests):
            save = [opened[index] for index in indices]
            wants = wanted_slices(slices, save[0].manifest)
            for reader in save:
                check_dtypes(wants, reader.slices)
            try:
                return save, wants, self._plan(save, wants)
            except StateLostError as error:
                why = why or error.message.partition(";")[0]
        raise lost_error(deployment, seq, manifests, why)

    def _plan(self, save: Sequence[StateReader], wants: Sequence[StateSlice]) -> Plan:
        with self._planning:
            return self._plans.plan([as_source(reader) for reader in save], [Layout.of(wants)])


def _fill(
    plane: DataPlane, memory: WritableDevice, copies_of: dict[StateReader, StridedCopies]
) -> None:
    """Copy from the readers to the arena."""
    direct: list[ByteRun] = []
    staged: list[tuple[StateReader, StagingBlocks]] = []
    for reader, copies in copies_of.items():
        rest = copies
        if reader.mapped is not None:
            is_long = (copies.counts == 1) & (copies.casts == BYTES_CAST)
            is_long &= copies.items >= DIRECT_BYTES_MIN
            for source, job in reader.mapped.jobs(copies.chosen(is_long)):
                address = source.ctypes.data
                columns = (job.dst_offsets.tolist(), job.src_offsets.tolist(), job.items.tolist())
                for to, place, nbytes in zip(*columns, strict=True):
                    assert 0 <= place <= len(source) - nbytes
                    direct.append(ByteRun(to, address + place, nbytes))
            rest = copies.chosen(~is_long)
        if len(rest):
            staged.append((reader, StagingBlocks(rest, BLOCK_BYTES)))
    plane.copy(direct, memory.write)

    def fill_block(start: int) -> None:
        with plane.buffer() as buffer:
            # The last block of the arena may be shorter than the buffer.
            block = np.frombuffer(buffer.view, dtype=np.uint8)
            filled: list[ByteRun] = []
            for reader, blocks in staged:
                copies = blocks.copies(start)
                if len(copies):
                    reader.read(copies, block)
                    filled += [
                        ByteRun(start + at, buffer.address + at, nbytes)
                        for at, nbytes in covered(copies)
                    ]
            memory.write(_join(filled))

    starts = sorted({at for _, blocks in staged for at in blocks.starts()})
    plane.spread(fill_block, starts)


def _join(copies: list[ByteRun]) -> list[ByteRun]:
    """The same copies, with adjacent ones joined."""
    found: list[ByteRun] = []
    for run in sorted(copies, key=lambda run: run.offset):
        if found and found[-1].offset + found[-1].nbytes == run.offset:
            found[-1] = ByteRun(found[-1].offset, found[-1].address, found[-1].nbytes + run.nbytes)
        else:
            found.append(run)
    return found
