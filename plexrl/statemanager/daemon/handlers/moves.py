"""A rank's own state, between its arena and the store."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from plexrl.errors import ConflictError, InvalidRequestError
from plexrl.statemanager.daemon.handlers.caller import (
    WORKERS,
    Caller,
    Reply,
    handles,
    move_report,
    names_of,
)
from plexrl.statemanager.daemon.handlers.host_memory import in_host, opened_host
from plexrl.statemanager.daemon.handlers.lending import expect_offload, lend_to
from plexrl.statemanager.daemon.registry import Registration
from plexrl.statemanager.device.backend import Loan
from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.layout.keys import StatePart
from plexrl.statemanager.protocol.messages import Load, Publish, Save
from plexrl.statemanager.store.store import StoredVersion
from plexrl.statemanager.store.versions.versions import Manifest, VersionKind, version_name

if TYPE_CHECKING:
    from plexrl.statemanager.device.memory import DeviceMemory

PUBLISHED_PARTS = (StatePart.BUFFER, StatePart.PARAMETER)


def _save(caller: Caller, request: Save, _: Sequence[int]) -> Reply:
    own = caller.registered()
    store = caller.services.store
    started = time.perf_counter()
    _check_json(request.meta_json)
    with own.moving() as memory:
        caller.services.fencing.admit(own.group, request.token)
        keep = {request.seq, request.keep_seq}
        there = _versions(caller, own, VersionKind.STATE)
        others = [v for v in there if v.manifest.seq not in keep]
        superseded = names_of(others)
        earlier = names_of([v for v in others if v.manifest.seq == request.previous_seq])
        found = [v for v in there if v.manifest.world_size == own.world_size]
        stored = _unchanged(own, request, found)
        moved = 0
        if stored is None:
            manifest = _manifest(
                caller, own, VersionKind.STATE, request.seq, request.parts, request.meta_json
            )
            manifest = replace(manifest, token=request.token)
            host = own.host if in_host(manifest, own) else None
            stored = store.put(manifest, memory, superseded, host)
            moved = manifest.nbytes
            if host is not None and stored.tier == TierName.HOST:
                moved = _without_last(manifest)
        else:
            store.touch(stored.manifest.name)
        store.drop(name for name in superseded if name not in earlier)
        caller.services.earlier.keep(earlier)
        if request.next_use_s is not None:
            store.expect_in(own.deployment, request.next_use_s)
        report = move_report(moved, time.perf_counter() - started, stored.tier)
        return Reply({**report, "stamp": stored.manifest.stamp})


def _load(caller: Caller, request: Load, _: Sequence[int]) -> Reply:
    own = caller.registered()
    started = time.perf_counter()
    with own.in_turn():
        caller.services.fencing.admit(own.group, request.token)
        if own.host is not None:
            caller.services.store.loans.end(own.host)
        found: list[_Loaded] = []

        def fill(loan: Loan) -> Sequence[tuple[int, int]]:
            found.append(_loaded(caller, own, request, loan))
            return found[0].ranges

        lent = Reply({})
        if own.loan is None:
            lent = lend_to(own, caller.services.bases, fill)
            expect_offload(caller)
        else:
            fill(own.loan)
        [loaded] = found
        manifest = loaded.manifest
        there = _versions(caller, own, VersionKind.STATE)
        earlier = [v for v in there if v.manifest.seq == request.previous_seq != request.seq]
        caller.services.earlier.keep(names_of(earlier))
        seconds = time.perf_counter() - started
        fds = (*lent.fds, *opened_host(own))
        return Reply(
            {
                **move_report(loaded.nbytes, seconds, loaded.tier),
                **lent.answer,
                "parts": [part.value for part in manifest.parts],
                "meta": json.loads(manifest.meta_json),
                "stamp": loaded.stamp,
                "bytes_by_source": loaded.bytes_by_source,
            },
            fds,
        )


class _Loaded(NamedTuple):
    """What a load brought."""

    manifest: Manifest
    nbytes: int
    tier: TierName
    stamp: str
    """Of the rank's own version that the arena equals now; empty where it is of no such one."""
    ranges: Sequence[tuple[int, int]]
    bytes_by_source: dict[str, int]


def _loaded(caller: Caller, own: Registration, request: Load, loan: Loan) -> _Loaded:
    """Write a version to the arena: the rank's own where it is laid out alike, else what is to be
    had of it from all ranks' versions."""
    store = caller.services.store
    name = version_name(*own.shard, own.world_size, VersionKind.STATE, request.seq)
    held = frozenset(own.slices)
    if any(held >= set(v.manifest.slices) for v in store.find(lambda m: m.name == name)):
        what = f"version {request.seq} of {own.deployment!r} rank {own.rank}"
        lease = store.load(name, what, loan, lambda manifest: _check_fits(manifest, own), own.host)
        manifest = lease.manifest
        ranges = _on_device(own, ((e.arena_offset, e.nbytes) for e in manifest.extents))
        shared = own.host is not None and own.host.loan is None
        nbytes = _without_last(manifest) if shared else manifest.nbytes
        return _Loaded(manifest, nbytes, lease.tier, manifest.stamp, ranges, {})
    memory: DeviceMemory = loan
    if own.host is not None:
        store.lend(own.host)
        memory = store.loans.memory(own.host, loan)
    relaid = caller.services.relayouter.load(
        own.deployment,
        request.seq,
        own.slices,
        memory,
        sources=request.sources,
        cast=request.cast,
    )
    return _Loaded(
        relaid.manifest,
        relaid.nbytes,
        relaid.tier,
        "",
        _on_device(own, relaid.ranges),
        relaid.bytes_by_source,
    )


def _publish(caller: Caller, request: Publish, _: Sequence[int]) -> Reply:
    own = caller.registered()
    store = caller.services.store
    started = time.perf_counter()
    with own.moving() as memory:
        caller.services.fencing.admit(own.group, request.token)
        kind = VersionKind.PUBLISHED
        manifest = _manifest(caller, own, kind, request.seq, PUBLISHED_PARTS, "{}")
        others = sorted(
            (v for v in _versions(caller, own, kind) if v.manifest.seq != request.seq),
            key=lambda version: version.manifest.seq,
        )
        surplus = max(0, len(others) + 1 - caller.services.config.published_versions)
        superseded = names_of(others[:surplus])
        stored = store.put(manifest, memory, superseded)
        store.drop(superseded)
        return Reply(move_report(manifest.nbytes, time.perf_counter() - started, stored.tier))


ENTRIES = (
    handles(Save, _save, WORKERS, is_move=True),
    handles(Load, _load, WORKERS, is_move=True),
    handles(Publish, _publish, WORKERS, is_move=True),
)


def _check_json(text: str) -> None:
    """Refuse what no load could answer with, nor a checkpoint be restored by."""
    try:
        msgspec.msgpack.encode(json.loads(text))
    except (ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"the version's meta is no JSON of ours: {error}") from error


def _on_device(own: Registration, ranges: Iterable[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Those that are not in host memory."""
    start = own.arena_bytes if own.host is None else own.host.start
    return [(first, nbytes) for first, nbytes in ranges if first < start]


def _without_last(manifest: Manifest) -> int:
    """Bytes of all sections but the one in host memory, which moves copy nothing of."""
    return sum(section.nbytes for section in manifest.sections[:-1])


def _versions(caller: Caller, own: Registration, kind: VersionKind) -> list[StoredVersion]:
    """The rank's own; and those of ranks that there are no more, which nobody else would drop."""
    return caller.services.store.find(
        lambda m: (
            m.kind == kind
            and m.deployment == own.deployment
            and (m.rank == own.rank or m.rank >= own.world_size)
        )
    )


def _manifest(
    caller: Caller,
    own: Registration,
    kind: VersionKind,
    seq: int,
    parts: Sequence[StatePart],
    meta_json: str,
) -> Manifest:
    slices = tuple(piece for piece in own.slices if piece.key.part in parts)
    layout = caller.services.registry.layout(own, parts)
    return Manifest(
        deployment=own.deployment,
        rank=own.rank,
        world_size=own.world_size,
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


def _unchanged(
    own: Registration, request: Save, stored: Sequence[StoredVersion]
) -> StoredVersion | None:
    """The stored version that already is what the request asks for, where there is one.

    A checkpoint comes this way with training waiting, so nothing is laid out anew.
    """
    for version in stored:
        there = version.manifest
        if (there.stamp, there.seq) == (request.same_as, request.seq):
            parts = tuple(sorted(request.parts))
            slices = tuple(piece for piece in own.slices if piece.key.part in parts)
            asked = (own.world_size, parts, request.meta_json, slices)
            is_same = asked == (there.world_size, there.parts, there.meta_json, there.slices)
            return version if is_same else None
    return None


def _check_fits(manifest: Manifest, own: Registration) -> None:
    """A version was replaced by one of another layout just when it was to be loaded."""
    misses_host = own.host is not None and not in_host(manifest, own)
    # Without hashing them where they are the very slices: there may be many thousands.
    same = tuple(piece for piece in own.slices if piece.key.part in manifest.parts)
    fits = same == manifest.slices or set(manifest.slices) <= set(own.slices)
    if misses_host or not fits:
        raise ConflictError(
            f"{manifest.description} is being saved from another layout: load again",
            deployment=manifest.deployment,
            seq=manifest.seq,
        )
