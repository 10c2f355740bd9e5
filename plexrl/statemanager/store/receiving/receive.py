"""Resumable receive of versions from another node, directly into host segments, block by block.

Invariants:

- A block has arrived when its bytes are in place and match the source's checksum; then a byte in
  the version's record marks it. After a lost connection or a crash, only missing blocks are sent.
- A record belongs to the version with its stamp. It is removed when the version is stored, when
  another version of the name comes, when the deployment is released, or when its space is needed
  while no transfer uses it.
- Sections that another rank already has here, by key and checksums, are shared and not sent.

    magic | u64 bytes of JSON | u64 xxh3 of JSON | manifest and pieces | zeros | one byte per block
"""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec

from plexrl.errors import ConflictError, CorruptStateError, OperationCancelledError
from plexrl.statemanager.bytes.data_plane import BLOCK_BYTES
from plexrl.statemanager.bytes.mapped_memory import view_at
from plexrl.statemanager.device.memory import ByteRun
from plexrl.statemanager.layout.ranges import subrange
from plexrl.statemanager.layout.versions import (
    Manifest,
    VersionRecord,
    decode_page,
    encode_page,
    header_bytes,
    padded,
)
from plexrl.statemanager.store.objects import ObjectState, SharedObject, Version, share_keys
from plexrl.statemanager.store.saving.saving import PIECE_TEXT_BYTES, new_object
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.tiers.fault_points import FaultPoints
from plexrl.statemanager.store.tiers.host.pool import HostPool
from plexrl.statemanager.store.tiers.nvme import DIGEST_BYTES, digest, file_bytes
from plexrl.statemanager.store.tiers.tier import Tier
from plexrl.statemanager.store.tiers.tier_allocator import TierAllocator
from plexrl.statemanager.store.versions.catalog import Catalog

LOG = logging.getLogger(__name__)

HOST = TierName.HOST
MAGIC = b"PLEXRLA1"
SUFFIX = ".arriving"
TRIES = 3
"""Attempts for a block that arrives damaged."""


class VersionData(Protocol):
    """The data of a version elsewhere. Thread-safe."""

    def read_data(self, start: int, target: memoryview) -> None:
        """Fill `target` with the data from offset `start` on."""
        ...


class DataMemory:
    """Another node's version, as `DeviceMemory`."""

    def __init__(self, data: VersionData, nbytes: int) -> None:
        self._data = data
        self.nbytes = nbytes

    def read(self, runs: Sequence[ByteRun]) -> None:
        """See `DeviceMemory.read`."""
        for run in runs:
            self._data.read_data(run.offset, view_at(run.address, run.nbytes))

    def write(self, runs: Sequence[ByteRun]) -> None:
        """Raises ConflictError: a version is immutable."""
        raise ConflictError(f"another node's version is immutable ({len(runs)} writes)")


@dataclass(slots=True, eq=False)
class PartialVersion:
    """A version of which some blocks have arrived."""

    manifest: Manifest
    objects: tuple[SharedObject, ...]
    """One object for each section."""
    own: tuple[SharedObject, ...]
    """The objects to be filled; the others are shared."""
    reserved: int
    """Bytes reserved for the header and the record. Space of the objects is counted with them."""
    path: Path
    marks_at: int
    """Offset in the record of `marks`."""
    marks: bytearray = field(default_factory=bytearray)
    """One byte for each block of `own`, in order; set when the block has arrived."""


class ResumableReceive:
    """Receives versions, one at a time for each name. Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        tier: Tier,
        pool: HostPool,
        allocator: TierAllocator,
        faults: FaultPoints,
    ) -> None:
        self._catalog = catalog
        self._tier = tier
        self._pool = pool
        self._allocator = allocator
        self._faults = faults
        self._changed = threading.Condition(catalog.lock)
        self._idle: dict[str, PartialVersion] = {}
        self._busy: dict[str, tuple[str, threading.Event]] = {}
        """Running receives: name → deployment, and the event that cancels it."""
        allocator.on_shortage = self.drop_idle

    @contextmanager
    def turn(self, manifest: Manifest) -> Iterator[threading.Event]:
        """Serialise receives of one name; the event is set when the receive is cancelled."""
        cancelled = threading.Event()
        with self._catalog.lock:
            self._changed.wait_for(lambda: manifest.name not in self._busy)
            self._busy[manifest.name] = (manifest.deployment, cancelled)
        try:
            yield cancelled
        finally:
            with self._catalog.lock:
                del self._busy[manifest.name]
                self._changed.notify_all()

    def receive(
        self,
        manifest: Manifest,
        digests: Sequence[bytes],
        data: VersionData,
        cancelled: threading.Event,
    ) -> tuple[Version, int]:
        """Receive and store a version, within its `turn`; returns it and the bytes fetched.

        `digests` are the checksums of the blocks of each section.

        Raises:
            StateTierFullError: the host tier has no free space; nothing is kept.
            CorruptStateError: a block arrives damaged in every attempt; the others are kept.
            OperationCancelledError: its deployment was released; nothing is kept.
            PlexRLError: `data` raised it; received blocks are kept.
        """
        arrival = self._begun(manifest, digests)
        moved = 0
        try:
            for found, start, at in _missing(arrival):
                if cancelled.is_set():
                    raise OperationCancelledError(f"{manifest.description} was released")
                moved += self._bring(arrival, found, start, data)
                arrival.marks[at] = 1
                self._mark(arrival, at)
                self._faults.reach("arrive.block")
            version = self._finish(arrival)
        except OperationCancelledError:
            with self._catalog.lock:
                self._drop(arrival)
            raise
        except BaseException:
            with self._catalog.lock:
                self._idle[manifest.name] = arrival
            raise
        return version, moved

    def release(self, deployment: str) -> None:
        """Cancel a deployment's receives, wait for their end, and drop its partial versions."""
        with self._catalog.lock:
            self._changed.wait_for(lambda: not self._end_busy(deployment))
            for name, arrival in list(self._idle.items()):
                if arrival.manifest.deployment == deployment:
                    self._drop(self._idle.pop(name))

    def drop_idle(self) -> None:
        """Drop the partial versions that no transfer uses."""
        with self._catalog.lock:
            for name in list(self._idle):
                self._drop(self._idle.pop(name))

    def reserved_bytes(self) -> int:
        """Bytes of the records of idle partial versions. The caller holds the catalog's lock."""
        return sum(arrival.reserved for arrival in self._idle.values())

    def recover(self) -> None:
        """Restore partial versions of an earlier daemon; stored versions are restored before."""
        for path in sorted(self._tier.directory.glob(f"*{SUFFIX}")):
            with self._catalog.lock:
                arrival = self._recover(path)
                if arrival is None:
                    path.unlink()
                elif arrival.manifest.name in self._idle:
                    self._drop(arrival)
                else:
                    self._idle[arrival.manifest.name] = arrival

    def _begun(self, manifest: Manifest, digests: Sequence[bytes]) -> PartialVersion:
        with self._catalog.lock:
            arrival = self._idle.pop(manifest.name, None)
            if arrival is not None and arrival.manifest.stamp != manifest.stamp:
                self._drop(arrival)
                arrival = None
        if arrival is None:
            arrival = self._begin(manifest, digests)
        for found, made in zip(arrival.objects, digests, strict=True):
            found.digests = made
        return arrival

    def _begin(self, manifest: Manifest, digests: Sequence[bytes]) -> PartialVersion:
        catalog = self._catalog
        with catalog.lock:
            manifest = replace(manifest, ordinal=catalog.next_ordinal())
            objects = [
                self._shared(manifest, index, made) or new_object(manifest, section)
                for index, (section, made) in enumerate(
                    zip(manifest.sections, digests, strict=True)
                )
            ]
            own = [found for found in objects if found.state == ObjectState.PENDING]
            held = [found for found in objects if found not in own]
            catalog.acquire(held, HOST)
        needed = sum(found.bytes_in(HOST) for found in own)
        text = len(msgspec.json.encode(manifest)) + len(objects) * 4 * PIECE_TEXT_BYTES
        blocks = sum(-(-found.nbytes // BLOCK_BYTES) for found in own)
        reserved = 2 * header_bytes(text, ()) + padded(blocks)
        try:
            self._allocator.reserve(manifest, needed + reserved, needed + reserved, host_only=True)
        except BaseException:
            with catalog.lock:
                catalog.release(held, HOST)
            raise
        try:
            near = self._pool.node_of(manifest.shard)
            for found in own:
                found.pieces = self._pool.alloc(found.bytes_in(HOST), manifest.tenant, near)
            arrival = self._written(manifest, objects, own, reserved, blocks)
        except BaseException:
            with catalog.lock:
                for found in own:
                    catalog.discard_written(found, HOST)
                catalog.release(held, HOST)
                catalog.unreserve(HOST, needed + reserved)
            raise
        with catalog.lock:
            catalog.acquire(own, HOST)
        self._pool.reserve_other(reserved)
        return arrival

    def _shared(self, manifest: Manifest, index: int, digests: bytes) -> SharedObject | None:
        """Another rank's object in the host tier with the same section, if any."""
        key = share_keys(manifest)[index]
        found = None if key is None else self._catalog.shared.get(key)
        if found is None or found.state != ObjectState.WHOLE or found.pieces is None:
            return None
        return found if found.digests == digests else None

    def _written(
        self,
        manifest: Manifest,
        objects: Sequence[SharedObject],
        own: Sequence[SharedObject],
        reserved: int,
        blocks: int,
    ) -> PartialVersion:
        record = VersionRecord(manifest, tuple(found.record(HOST) for found in objects))
        page = encode_page(MAGIC, msgspec.json.encode((record, [found.id for found in own])))
        path = self._tier.directory / f"{manifest.file_name}{SUFFIX}"
        part = path.with_suffix(".part")
        try:
            part.write_bytes(page + bytes(blocks))
            part.rename(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self._tier.write_error(error) from error
        return PartialVersion(
            manifest=manifest,
            objects=tuple(objects),
            own=tuple(own),
            reserved=reserved,
            path=path,
            marks_at=len(page),
            marks=bytearray(blocks),
        )

    def _recover(self, path: Path) -> PartialVersion | None:
        """The partial version of a record, its memory claimed; None if the memory is in use."""
        try:
            contents = path.read_bytes()
            text = decode_page(MAGIC, contents)
            record, own_ids = msgspec.json.decode(text, type=tuple[VersionRecord, list[str]])
        except (OSError, CorruptStateError, msgspec.MsgspecError) as error:
            LOG.warning("%s cannot be resumed (%s); removed", path, error)
            return None
        known = {found.id: found for v in self._catalog.current.values() for found in v.objects}
        objects: list[SharedObject] = []
        claimed: list[SharedObject] = []
        marks_at = len(encode_page(MAGIC, text))
        for one in record.objects:
            found = known.get(one.id)
            if (
                one.id in own_ids
                and found is None
                and self._pool.claim(one.pieces, record.manifest.tenant)
            ):
                found = SharedObject(
                    id=one.id,
                    nbytes=one.nbytes,
                    file_bytes=file_bytes(one.id, one.nbytes),
                    pieces=one.pieces,
                )
                claimed.append(found)
            elif one.id in own_ids or found is None or found.pieces is None:
                # The version is stored, or a shared replica is gone: the receive cannot resume.
                for each in claimed:
                    self._pool.free(each.pieces or ())
                return None
            objects.append(found)
        reserved = padded(len(contents))
        self._catalog.used_bytes[HOST] += reserved + sum(f.bytes_in(HOST) for f in claimed)
        self._catalog.acquire(objects, HOST)
        self._pool.reserve_other(reserved)
        self._catalog.last_ordinal = max(self._catalog.last_ordinal, record.manifest.ordinal)
        return PartialVersion(
            manifest=record.manifest,
            objects=tuple(objects),
            own=tuple(claimed),
            reserved=reserved,
            path=path,
            marks_at=marks_at,
            marks=bytearray(contents[marks_at:]),
        )

    def _bring(
        self, arrival: PartialVersion, found: SharedObject, start: int, data: VersionData
    ) -> int:
        section = arrival.manifest.sections[arrival.objects.index(found)]
        count = min(BLOCK_BYTES, found.nbytes - start)
        pieces = subrange(found.pieces or (), start, padded(count))
        views = [self._pool.view(piece) for piece in pieces]
        at = start // BLOCK_BYTES * DIGEST_BYTES
        tail = padded(count) - count
        for _ in range(TRIES):
            place = section.start + start
            for view in _first(views, count):
                data.read_data(place, view)
                place += len(view)
            if digest(views, count) == found.digests[at : at + DIGEST_BYTES]:
                if tail:
                    # Segments are recycled: clear the bytes after the data.
                    views[-1][len(views[-1]) - tail :] = bytes(tail)
                return count
        raise CorruptStateError(
            f"{arrival.manifest.description} arrives damaged (block {start // BLOCK_BYTES} of "
            f"object {found.id}): check the network and the source's memory"
        )

    def _mark(self, arrival: PartialVersion, at: int) -> None:
        fd = os.open(arrival.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, b"\1", arrival.marks_at + at)
        finally:
            os.close(fd)

    def _finish(self, arrival: PartialVersion) -> Version:
        catalog = self._catalog
        with catalog.lock:
            # Other versions of the name may have been stored and dropped meanwhile.
            manifest = replace(arrival.manifest, ordinal=catalog.next_ordinal())
            for found, key in zip(arrival.objects, share_keys(manifest), strict=True):
                if found in arrival.own and key is not None and key not in catalog.shared:
                    found.share_key = key
                    catalog.shared[key] = found
        version = Version(
            manifest, arrival.objects, last_use=manifest.ordinal, last_use_s=self._allocator.now()
        )
        records = [found.record(HOST) for found in arrival.objects]
        header = header_bytes(len(msgspec.json.encode(manifest)), records)
        self._tier.write_header(version.record(HOST), "put")
        with catalog.lock:
            for found in arrival.own:
                catalog.finish_object(found, ObjectState.WHOLE)
            catalog.set_current(version)
            catalog.add_header(version, HOST, header)
            # The header takes its space from the record's reservation.
            catalog.used_bytes[HOST] += header
            self._let_go(arrival)
        self._pool.reserve_other(header)
        return version

    def _drop(self, arrival: PartialVersion) -> None:
        for found in arrival.own:
            self._catalog.finish_object(found, ObjectState.FAILED)
        self._let_go(arrival)

    def _let_go(self, arrival: PartialVersion) -> None:
        """Remove the record and the objects without a version. The caller holds the lock."""
        arrival.path.unlink(missing_ok=True)
        self._catalog.release(arrival.objects, HOST)
        self._catalog.unreserve(HOST, arrival.reserved)
        self._pool.reserve_other(-arrival.reserved)

    def _end_busy(self, deployment: str) -> bool:
        found = [event for whose, event in self._busy.values() if whose == deployment]
        for event in found:
            event.set()
        return bool(found)


def _missing(arrival: PartialVersion) -> Iterator[tuple[SharedObject, int, int]]:
    """(object, offset, index of its mark) of each missing block."""
    at = 0
    for found in arrival.own:
        for start in range(0, found.nbytes, BLOCK_BYTES):
            if not arrival.marks[at]:
                yield found, start, at
            at += 1


def _first(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` bytes of `views`."""
    found = []
    for view in views:
        if nbytes > 0:
            found.append(view[:nbytes])
            nbytes -= len(view)
    return found
