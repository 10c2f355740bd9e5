"""A published version of another node, brought to this one once for all its ranks that want it.

The union of what the ranks of a deployment here want is pulled into a buffer, over the network, and
stored as a version that the deployment itself has published; the ranks pull it over shared memory.
The buffer stays as it is until the next version, which can so come as a delta.

Laws:

- One pull at a time for a deployment and a source; ranks that come meanwhile wait and find it done.
- What lies here is used again only while the sources still offer the very same stamps.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from plexrl.statemanager.device.mapping import move
from plexrl.statemanager.device.memory import Run
from plexrl.statemanager.layout.keys import ARENA_ALIGNMENT, StatePart, StateSlice
from plexrl.statemanager.layout.layout import lay_out
from plexrl.statemanager.layout.plan.cost import NodeLink, RouteChoice, choose_route
from plexrl.statemanager.layout.scales import Wants
from plexrl.statemanager.protocol.tickets import Claims, TicketKey
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.versions.versions import Manifest, VersionKind, padded
from plexrl.statemanager.transfer.copy.strided_copy import Bytes
from plexrl.statemanager.transfer.delta.delta import DeltaPolicy
from plexrl.statemanager.transfer.pull import KnownLayouts, Puller
from plexrl.statemanager.transfer.transport.choice import Ways

TIMEOUT_S = 60.0
"""Bounds each wait for a source."""
PUBLISHED_PARTS = (StatePart.BUFFER, StatePart.PARAMETER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayed:
    """What came of asking for a version."""

    choice: RouteChoice
    bytes_moved: int = 0
    """Over the network, by this very call; 0 where another rank's has brought them."""


class Relays:
    """Of one node. Thread-safe."""

    def __init__(self, store: Store, key: TicketKey, versions_kept: int) -> None:
        """`versions_kept` of each deployment stay, for ranks that are late."""
        self._store = store
        self._key = key
        self._versions_kept = versions_kept
        self._lock = threading.Lock()
        self._relays: dict[str, _Relay] = {}

    def bring(
        self,
        claims: Claims,
        addresses: Sequence[str],
        version: tuple[str, int],
        ranks: Sequence[Sequence[StateSlice]],
        delta: DeltaPolicy | None,
    ) -> Relayed:
        """Have a version (deployment, seq) here for a deployment whose ranks want these slices, if
        that is cheaper than each pulling for itself.

        Raises:
            PlexRLError: as `Puller.pull`, and as `Store.put`.
        """
        wants = union_of(ranks)
        union_bytes = sum(piece.nbytes for piece in wants)
        sizes = [sum(piece.nbytes for piece in slices) for slices in ranks]
        choice = choose_route(sizes, union_bytes, NodeLink())
        if not choice.is_relayed:
            return Relayed(choice=choice)
        with self._lock:
            relay = self._relays.get(claims.deployment)
            if relay is None:
                # Its readers are of this deployment, so its ticket is as good as theirs.
                ticket = self._key.mint(claims)
                relay = self._relays[claims.deployment] = _Relay(self._store, ticket)
        moved = relay.bring(claims, addresses, version, wants, delta, self._versions_kept)
        return Relayed(choice=choice, bytes_moved=moved)

    def forget(self, deployment: str) -> None:
        """Let a deployment's buffer go; what is stored goes with its other versions."""
        with self._lock:
            self._relays.pop(deployment, None)


class _Relay:
    """Of one deployment."""

    def __init__(self, store: Store, ticket: bytes) -> None:
        layouts = KnownLayouts()
        self._store = store
        self._ways = Ways(layouts.find, ticket=ticket, timeout_s=TIMEOUT_S)
        self._puller = Puller(self._ways.open, layouts, TIMEOUT_S)
        self._in_pull = threading.Lock()
        self._buffer: Bytes = np.empty(0, dtype=np.uint8)
        self._layout = ""

    def bring(
        self,
        claims: Claims,
        addresses: Sequence[str],
        version: tuple[str, int],
        wants: tuple[StateSlice, ...],
        delta: DeltaPolicy | None,
        versions_kept: int,
    ) -> int:
        with self._in_pull:
            try:
                stamps = self._puller.offered(addresses, *version)
                meta = _Meta(source=version[0], stamps=stamps)
                manifest = _manifest(claims, version[1], wants, meta)
                if stamps and self._has(manifest):
                    return 0
                scaled = Wants.of(wants)
                if scaled.all.digest != self._layout:
                    self._puller.forget()
                    self._buffer = np.zeros(padded(manifest_bytes(wants)), dtype=np.uint8)
                    self._layout = scaled.all.digest
                result = self._puller.pull(addresses, *version, scaled, self._buffer, delta)
            finally:
                self._ways.forget_unused()
            if not set(self._puller.stamps()) <= set(stamps):
                # It was published again meanwhile, so whoever asks next is to look again.
                manifest = _manifest(claims, version[1], wants, replace(meta, stamps=()))
            superseded = self._superseded(manifest, versions_kept)
            self._store.put(manifest, _BufferMemory(self._buffer), superseded)
            self._store.drop(superseded)
            return result.bytes_moved

    def _has(self, manifest: Manifest) -> bool:
        return any(
            (found.manifest.meta_json, found.manifest.slices)
            == (manifest.meta_json, manifest.slices)
            for found in self._store.find(lambda m: m.name == manifest.name)
        )

    def _superseded(self, manifest: Manifest, versions_kept: int) -> list[str]:
        others = self._store.find(
            lambda m: (
                (m.deployment, m.rank, m.kind)
                == (manifest.deployment, manifest.rank, manifest.kind)
                and m.seq != manifest.seq
            )
        )
        others.sort(key=lambda found: found.manifest.seq)
        surplus = max(0, len(others) + 1 - versions_kept)
        return [found.manifest.name for found in others[:surplus]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meta:
    """What tells whether a stored version is what the sources offer."""

    source: str
    stamps: tuple[tuple[str, int, str], ...] = field(default=())


class _BufferMemory:
    """As `DeviceMemory`, over a buffer of this process."""

    def __init__(self, buffer: Bytes) -> None:
        self._address = buffer.ctypes.data
        self.nbytes = len(buffer)

    def read(self, runs: Sequence[Run]) -> None:
        for run in runs:
            assert 0 <= run.offset <= self.nbytes - run.nbytes, "the manifest is of this buffer"
            move(run.address, self._address + run.offset, run.nbytes)

    def write(self, runs: Sequence[Run]) -> None:
        for run in runs:
            assert 0 <= run.offset <= self.nbytes - run.nbytes, "the manifest is of this buffer"
            move(self._address + run.offset, run.address, run.nbytes)


def union_of(ranks: Sequence[Sequence[StateSlice]]) -> tuple[StateSlice, ...]:
    """Every box that some rank wants in some dtype, once, placed one after the other."""
    found: dict[StateSlice, StateSlice] = {}
    end = 0
    for slices in ranks:
        for piece in slices:
            box = replace(piece, arena_offset=0)
            if piece.nbytes and box not in found:
                found[box] = replace(piece, arena_offset=end)
                end += padded(piece.nbytes, ARENA_ALIGNMENT)
    return tuple(found.values())


def manifest_bytes(slices: Sequence[StateSlice]) -> int:
    """Of a memory that holds all slices."""
    return max((piece.arena_offset + piece.nbytes for piece in slices), default=0)


def _manifest(claims: Claims, seq: int, wants: tuple[StateSlice, ...], meta: _Meta) -> Manifest:
    layout = lay_out(wants)
    return Manifest(
        deployment=claims.deployment,
        rank=0,
        world_size=1,
        seq=seq,
        kind=VersionKind.PUBLISHED,
        parts=PUBLISHED_PARTS,
        meta_json=msgspec.json.encode(meta).decode(),
        slices=wants,
        extents=layout.extents,
        nbytes=layout.nbytes,
        sections=layout.sections,
        tenant=claims.tenant,
    )
