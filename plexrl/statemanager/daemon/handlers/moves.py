"""Moves of a rank's own state between its arena and the store."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from plexrl.errors import ConflictError, InvalidRequestError
from plexrl.statemanager.daemon.handlers.caller import (
    WORKERS,
    DaemonCaller,
    DaemonReply,
    handles,
    move_report,
    names_of,
)
from plexrl.statemanager.daemon.handlers.device_memory import (
    allocate_arena,
    check_free_memory,
    prefault_for_offload,
)
from plexrl.statemanager.daemon.handlers.host_memory import (
    allocate_step,
    clear_padding,
    is_in_host,
    open_host,
    open_step,
    stepped_memory,
)
from plexrl.statemanager.daemon.registry.registry import PrefetchedArena, Registration
from plexrl.statemanager.device.backend import DeviceAllocation
from plexrl.statemanager.device.memory import MemoryRange
from plexrl.statemanager.layout.keys import StatePart
from plexrl.statemanager.layout.versions import Extent, Manifest, VersionKind, version_name
from plexrl.statemanager.protocol.host_requests import BeginStep, SaveStep, UndoStep
from plexrl.statemanager.protocol.messages import (
    PUBLISHED_PARTS,
    ListReplicated,
    Load,
    Publish,
    ReplicatedSection,
    Save,
)
from plexrl.statemanager.store.store import TieredVersion
from plexrl.statemanager.store.tiers.eviction.policy import TierName

if TYPE_CHECKING:
    from plexrl.statemanager.device.memory import WritableDevice

DIGESTED_BYTES_MIN = 32 << 20
"""Smaller sections are copied and compared, which takes no longer than a digest takes to start."""


def _save(caller: DaemonCaller, request: Save, _: Sequence[int]) -> DaemonReply:
    rank = caller.registered()
    started = time.perf_counter()
    _check_json(request.meta_json)
    order = request.order
    successor = order.successor, order.successor_seq
    with (
        rank.exclusive_memory() as memory,
        caller.services.arena_prefetcher.during_offload(rank, *successor) as begin_prefetch,
    ):
        caller.services.fencing.admit(rank.group, order.token)
        return _store_state(caller, rank, request, memory, started, begin_prefetch)


def _store_state(
    caller: DaemonCaller,
    rank: Registration,
    request: Save,
    memory: "WritableDevice",
    started: float,
    on_copy: Callable[[], None] = lambda: None,
) -> DaemonReply:
    """Store the rank's state, which lies in `memory` and its host memory. `on_copy`: as for
    `Store.put`. The rank's lock is held."""
    store, order = caller.services.store, request.order
    keep = {order.seq, order.keep_seq}
    versions = _versions(caller, rank, VersionKind.STATE)
    others = [v for v in versions if v.manifest.seq not in keep]
    superseded = names_of(others)
    kept = {order.previous_seq, order.base_seq}
    earlier = names_of([v for v in others if v.manifest.seq in kept])
    same_size = [v for v in versions if v.manifest.world_size == rank.world_size]
    stored = _find_unchanged(rank, request, same_size)
    moved = 0
    if stored is None:
        manifest = _manifest(
            caller, rank, VersionKind.STATE, order.seq, request.parts, request.meta_json
        )
        manifest = _with_digests(manifest, request.digests)
        manifest = replace(manifest, token=order.token)
        host = rank.host if is_in_host(manifest, rank) else None
        stored = store.put(manifest, memory, superseded, host, on_copy)
        moved = manifest.nbytes
        if host is not None and stored.tier == TierName.HOST:
            moved = _bytes_without_last(manifest)
    else:
        store.touch(stored.manifest.name)
    store.drop(name for name in superseded if name not in earlier)
    caller.services.earlier_versions.keep(earlier)
    if order.next_use_s is not None:
        store.expect_use_in(rank.deployment, order.next_use_s)
    report = move_report(moved, time.perf_counter() - started, stored.tier)
    return DaemonReply({**report, "stamp": stored.manifest.stamp})


def _begin_step(caller: DaemonCaller, request: BeginStep, _: Sequence[int]) -> DaemonReply:
    # No token is asked for: nothing here touches a device, and the group's holders change
    # meanwhile. Another process that registers the rank ends the step.
    rank = caller.registered()
    name = version_name(*rank.shard, rank.world_size, VersionKind.STATE, request.seq)

    def check(manifest: Manifest) -> None:
        _check_fits(manifest, rank)
        if manifest.stamp != request.stamp:
            raise ConflictError(f"{manifest.description} was stored again: load it first")
        _check_fits_step(rank, manifest.extents)

    with rank.exclusive():
        try:
            memory = allocate_step(caller, rank, request.arena_bytes)
            what = f"version {request.seq} of {rank.deployment!r} rank {rank.rank}"
            lease = caller.services.store.load(name, what, memory, check)
            clear_padding(rank, lease.manifest)
            rank.step_since = lease.manifest.token
            fds = open_step(rank)
        except BaseException:
            rank.release_host()
            raise
        return DaemonReply({"parts": [part.value for part in lease.manifest.parts]}, fds)


def _save_step(caller: DaemonCaller, request: SaveStep, _: Sequence[int]) -> DaemonReply:
    rank, started = caller.registered(), time.perf_counter()
    save = Save(order=request.order, parts=request.parts, meta_json="{}", same_as=None)
    with rank.exclusive():
        memory = stepped_memory(rank)
        # The group's newest token is another holder's, beside whom the step was made.
        caller.services.fencing.check(rank.group, request.order.token, rank.step_since)
        _check_fits_step(rank, caller.services.registry.layout(rank, request.parts).extents)
        return _store_state(caller, rank, save, memory, started)


def _undo_step(caller: DaemonCaller, request: UndoStep, _: Sequence[int]) -> DaemonReply:
    rank = caller.registered()
    name = version_name(*rank.shard, rank.world_size, VersionKind.STATE, request.seq)
    with rank.exclusive():
        store = caller.services.store
        made = store.find(lambda m: m.name == name and m.stamp == request.stamp)
        store.drop(names_of(made))
        return DaemonReply({})


def _check_fits_step(rank: Registration, extents: Iterable[Extent]) -> None:
    """Refuse slices of the arena that the memory of the rank's step does not have.

    Raises:
        InvalidRequestError: there is one.
    """
    assert rank.step is not None, "a step has memory"
    on_device = _on_device(rank, ((e.arena_offset, e.nbytes) for e in extents))
    end = max((first + nbytes for first, nbytes in on_device), default=0)
    if end > rank.step.nbytes:
        raise InvalidRequestError(
            f"the state of {rank.description} reaches to byte {end} of the memory for its step, "
            f"which has {rank.step.nbytes}: begin the step with memory for all that it stores"
        )


def _load(caller: DaemonCaller, request: Load, _: Sequence[int]) -> DaemonReply:
    rank = caller.registered()
    started = time.perf_counter()
    caller.services.fencing.admit(rank.group, request.token)
    caller.services.arena_prefetcher.drop_others(rank.device, rank.group, rank.deployment)
    with rank.exclusive():
        # Another holder may have been admitted while this one waited.
        caller.services.fencing.admit(rank.group, request.token)
        if rank.allocation is None:
            check_free_memory(caller, rank, request.use)
        if rank.host is not None:
            caller.services.store.host_allocations.release_all(rank.host)
        prefetched = rank.take_prefetched()
        results: list[_LoadResult] = []

        def fill(allocation: DeviceAllocation) -> Sequence[tuple[int, int]]:
            results.append(_load_version(caller, rank, request, allocation, prefetched))
            return results[0].ranges

        allocated = DaemonReply({})
        if rank.allocation is None:
            part = None if prefetched is None else prefetched.allocation
            allocated = allocate_arena(caller, rank, request.use, fill, part)
            prefault_for_offload(caller)
        else:
            fill(rank.allocation)
        [loaded] = results
        manifest = loaded.manifest
        versions = _versions(caller, rank, VersionKind.STATE)
        kept = {request.previous_seq, request.base_seq} - {request.seq}
        earlier = [v for v in versions if v.manifest.seq in kept]
        caller.services.earlier_versions.keep(names_of(earlier))
        seconds = time.perf_counter() - started
        fds = (*allocated.fds, *open_host(rank))
        return DaemonReply(
            {
                **move_report(loaded.nbytes, seconds, loaded.tier),
                **allocated.answer,
                "parts": [part.value for part in manifest.parts],
                "meta": json.loads(manifest.meta_json),
                "stamp": loaded.stamp,
                "prefetched_bytes": loaded.prefetched_bytes,
                "prefetch_s": 0.0 if prefetched is None else prefetched.seconds_before(started),
            },
            fds,
        )


class _LoadResult(NamedTuple):
    """The result of a load."""

    manifest: Manifest
    nbytes: int
    tier: TierName
    stamp: str
    """Stamp of the rank's own version that the arena now equals; empty after a relayout."""
    ranges: Sequence[tuple[int, int]]
    """(offset, bytes) in the arena."""
    prefetched_bytes: int = 0
    """Bytes of these that were in the arena before."""


def _load_version(
    caller: DaemonCaller,
    rank: Registration,
    request: Load,
    allocation: DeviceAllocation,
    prefetched: PrefetchedArena | None,
) -> _LoadResult:
    """Write a version to the arena: the rank's own version if its layout matches, else a relayout
    from the versions of all ranks."""
    store = caller.services.store
    name = version_name(*rank.shard, rank.world_size, VersionKind.STATE, request.seq)
    slices = frozenset(rank.slices)
    if any(slices >= set(v.manifest.slices) for v in store.find(lambda m: m.name == name)):
        what = f"version {request.seq} of {rank.deployment!r} rank {rank.rank}"
        rest = MemoryRange(allocation, 0, allocation.nbytes)
        found_bytes = 0

        def check(manifest: Manifest) -> None:
            nonlocal found_bytes
            _check_fits(manifest, rank)
            if prefetched is not None and prefetched.stamp == manifest.stamp:
                rest.start, found_bytes = prefetched.allocation.nbytes, prefetched.bytes_moved

        lease = store.load(name, what, rest, check, rank.host)
        manifest = lease.manifest
        ranges = _on_device(rank, ((e.arena_offset, e.nbytes) for e in manifest.extents))
        reads_snapshot = rank.host is not None and rank.host.allocation is None
        nbytes = _bytes_without_last(manifest) if reads_snapshot else manifest.nbytes
        return _LoadResult(manifest, nbytes, lease.tier, manifest.stamp, ranges, found_bytes)
    memory: WritableDevice = allocation
    if rank.host is not None:
        store.allocate_host(rank.host)
        memory = store.host_allocations.joined_memory(rank.host, allocation)
    relaid = caller.services.relayouter.load(rank.deployment, request.seq, rank.slices, memory)
    return _LoadResult(
        relaid.manifest,
        relaid.nbytes,
        relaid.tier,
        "",
        _on_device(rank, relaid.ranges),
    )


def _publish(caller: DaemonCaller, request: Publish, _: Sequence[int]) -> DaemonReply:
    rank = caller.registered()
    store = caller.services.store
    started = time.perf_counter()
    with rank.exclusive_memory() as memory:
        caller.services.fencing.admit(rank.group, request.token)
        kind = VersionKind.PUBLISHED
        manifest = _manifest(caller, rank, kind, request.seq, PUBLISHED_PARTS, "{}")
        manifest = _with_digests(manifest, request.digests)
        others = sorted(
            (v for v in _versions(caller, rank, kind) if v.manifest.seq != request.seq),
            key=lambda version: version.manifest.seq,
        )
        surplus = max(0, len(others) + 1 - caller.services.config.published_versions)
        superseded = names_of(others[:surplus])
        stored = store.put(manifest, memory, superseded)
        store.drop(superseded)
        return DaemonReply(move_report(manifest.nbytes, time.perf_counter() - started, stored.tier))


def _list_replicated(
    caller: DaemonCaller, request: ListReplicated, _: Sequence[int]
) -> DaemonReply:
    rank = caller.registered()
    with rank.exclusive():
        layout = caller.services.registry.layout(rank, request.parts)
    sections = []
    for section in layout.sections:
        if section.share_key and section.nbytes >= DIGESTED_BYTES_MIN:
            end = section.start + section.nbytes
            inside = [e for e in layout.extents if section.start <= e.file_offset < end]
            sections.append(ReplicatedSection(section=section, extents=tuple(inside)))
    return DaemonReply({"sections": sections})


ENTRIES = (
    handles(Save, _save, WORKERS, is_move=True),
    handles(Load, _load, WORKERS, is_move=True),
    handles(BeginStep, _begin_step, WORKERS, is_move=True),
    handles(SaveStep, _save_step, WORKERS, is_move=True),
    handles(UndoStep, _undo_step, WORKERS),
    handles(Publish, _publish, WORKERS, is_move=True),
    handles(ListReplicated, _list_replicated, WORKERS),
)


def _check_json(text: str) -> None:
    """Refuse metadata that an answer or a checkpoint could not carry."""
    try:
        msgspec.msgpack.encode(json.loads(text))
    except (ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"the version's metadata is not valid JSON: {error}") from error


def _on_device(rank: Registration, ranges: Iterable[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """The ranges that lie on the device, not in host memory."""
    start = rank.arena_bytes if rank.host is None else rank.host.start
    return [(first, nbytes) for first, nbytes in ranges if first < start]


def _bytes_without_last(manifest: Manifest) -> int:
    """Bytes of all sections but the last, which lies in host memory and is not copied."""
    return sum(section.nbytes for section in manifest.sections[:-1])


def _versions(caller: DaemonCaller, rank: Registration, kind: VersionKind) -> list[TieredVersion]:
    """The rank's own versions, and those of ranks that no longer exist, which no other rank would
    drop."""
    return caller.services.store.find(
        lambda m: (
            m.kind == kind
            and m.deployment == rank.deployment
            and (m.rank == rank.rank or m.rank >= rank.world_size)
        )
    )


def _manifest(
    caller: DaemonCaller,
    rank: Registration,
    kind: VersionKind,
    seq: int,
    parts: Sequence[StatePart],
    meta_json: str,
) -> Manifest:
    slices = tuple(piece for piece in rank.slices if piece.key.part in parts)
    layout = caller.services.registry.layout(rank, parts)
    return Manifest(
        deployment=rank.deployment,
        rank=rank.rank,
        world_size=rank.world_size,
        seq=seq,
        kind=kind,
        parts=tuple(sorted(parts)),
        meta_json=meta_json,
        slices=slices,
        extents=layout.extents,
        nbytes=layout.nbytes,
        sections=layout.sections,
        tenant=caller.claims.tenant,
    )


def _with_digests(manifest: Manifest, digests: Mapping[str, str]) -> Manifest:
    """The manifest with digests of sections, by share key."""
    sections = [
        replace(section, device_digest=digests.get(section.share_key, ""))
        for section in manifest.sections
    ]
    return replace(manifest, sections=tuple(sections))


def _find_unchanged(
    rank: Registration, request: Save, stored: Sequence[TieredVersion]
) -> TieredVersion | None:
    """The stored version that already equals the requested one; None if there is none.

    Training waits for a checkpoint's save, so this computes no layout.
    """
    for version in stored:
        manifest = version.manifest
        if (manifest.stamp, manifest.seq) == (request.same_as, request.order.seq):
            parts = tuple(sorted(request.parts))
            slices = tuple(piece for piece in rank.slices if piece.key.part in parts)
            wanted = (rank.world_size, parts, request.meta_json, slices)
            is_same = wanted == (
                manifest.world_size,
                manifest.parts,
                manifest.meta_json,
                manifest.slices,
            )
            return version if is_same else None
    return None


def _check_fits(manifest: Manifest, rank: Registration) -> None:
    """Refuse a version whose layout changed between the search for it and its load."""
    misses_host = rank.host is not None and not is_in_host(manifest, rank)
    # Equal tuples need no hashing; there may be many thousands of slices.
    same = tuple(piece for piece in rank.slices if piece.key.part in manifest.parts)
    fits = same == manifest.slices or set(manifest.slices) <= set(rank.slices)
    if misses_host or not fits:
        raise ConflictError(
            f"{manifest.description} is being saved from another layout: load again",
            deployment=manifest.deployment,
            seq=manifest.seq,
        )
