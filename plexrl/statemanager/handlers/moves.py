"""A rank's own state, between its arena and the store."""

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.device.backend import Loan
from plexrl.statemanager.handlers.caller import (
    WORKERS,
    Caller,
    Reply,
    handles,
    move_report,
    names_of,
)
from plexrl.statemanager.handlers.lending import expect_offload, lend_to
from plexrl.statemanager.keys import StatePart
from plexrl.statemanager.protocol import Load, Publish, Save
from plexrl.statemanager.registry import Registration
from plexrl.statemanager.store import StoredVersion
from plexrl.statemanager.versions import Manifest, VersionKind, version_name

if TYPE_CHECKING:
    from plexrl.statemanager.lease import Lease

PUBLISHED_PARTS = (StatePart.BUFFER, StatePart.PARAMETER)


def _save(caller: Caller, request: Save, _: Sequence[int]) -> Reply:
    own = caller.registered()
    store = caller.services.store
    started = time.perf_counter()
    with own.moving() as memory:
        caller.services.fencing.admit(own.group, request.token)
        keep = {request.seq, request.keep_seq}
        found = _versions(caller, own, VersionKind.STATE)
        superseded = names_of([v for v in found if v.manifest.seq not in keep])
        stored = _unchanged(own, request, found)
        moved = 0
        if stored is None:
            manifest = _manifest(
                caller, own, VersionKind.STATE, request.seq, request.parts, request.meta_json
            )
            stored = store.put(manifest, memory, superseded)
            moved = manifest.nbytes
        else:
            store.touch(stored.manifest.name)
        store.drop(superseded)
        report = move_report(moved, time.perf_counter() - started, stored.tier)
        return Reply({**report, "stamp": stored.manifest.stamp})


def _load(caller: Caller, request: Load, _: Sequence[int]) -> Reply:
    own = caller.registered()
    store = caller.services.store
    started = time.perf_counter()
    with own.in_turn():
        caller.services.fencing.admit(own.group, request.token)
        wanted = version_name(*own.shard, VersionKind.STATE, request.seq)
        description = f"version {request.seq} of {own.deployment!r} rank {own.rank}"
        loaded: list[Lease] = []

        def fill(loan: Loan) -> Sequence[tuple[int, int]]:
            loaded.append(
                store.load(wanted, description, loan, lambda manifest: _check_fits(manifest, own))
            )
            extents = loaded[0].manifest.extents
            return [(extent.arena_offset, extent.nbytes) for extent in extents]

        lent = Reply({})
        if own.loan is None:
            lent = lend_to(own, fill)
            expect_offload(caller)
        else:
            fill(own.loan)
        manifest = loaded[0].manifest
        seconds = time.perf_counter() - started
        return Reply(
            {
                **move_report(manifest.nbytes, seconds, loaded[0].tier),
                **lent.answer,
                "parts": [part.value for part in manifest.parts],
                "meta": json.loads(manifest.meta_json),
                "stamp": manifest.stamp,
            },
            lent.fds,
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


def _versions(caller: Caller, own: Registration, kind: VersionKind) -> list[StoredVersion]:
    return caller.services.store.find(
        lambda m: (m.deployment, m.rank) == own.shard and m.kind == kind
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
    """A version goes back only to an arena laid out as the one it was taken from."""
    # Without hashing them where they are the very slices: there may be many thousands.
    same = tuple(piece for piece in own.slices if piece.key.part in manifest.parts)
    if same != manifest.slices and not set(manifest.slices) <= set(own.slices):
        raise InvalidRequestError(
            f"{manifest.description} was taken from an arena of another layout: load it with the "
            "model and number of workers that it was saved with",
            deployment=manifest.deployment,
            seq=manifest.seq,
        )
