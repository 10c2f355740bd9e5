"""All versions a node holds, over its two tiers; the only place that knows where state lies.

Laws: a version is readable from the moment its manifest stands in a tier until it is dropped; the
host tier never holds more than its bound, counting what is still being written; a version in use
is neither moved nor dropped; a version is in one tier, but for the moment of its move.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from plexrl.errors import StateLostError, StateTierFullError
from plexrl.statemanager.residency import Resident, choose_spills
from plexrl.statemanager.tier import Bytes, Tier
from plexrl.statemanager.versions import Extent, Manifest, VersionKind


@dataclass(slots=True)
class _Stored:
    manifest: Manifest
    tier: Tier
    last_use: int
    users: int = 0
    doomed: bool = False


class Store:
    """Thread-safe. `host` is filled first and spills to `nvme`."""

    def __init__(self, host: Tier, host_bytes: int, nvme: Tier, nvme_bytes: int) -> None:
        self._host, self._host_max = host, host_bytes
        self._nvme, self._nvme_max = nvme, nvme_bytes
        self._lock = threading.RLock()
        self._versions: dict[str, _Stored] = {}
        self._reserved: dict[str, int] = {host.name: 0, nvme.name: 0}
        self._uses = 0
        for tier in (nvme, host):
            for manifest in tier.recover():
                # A version in both tiers was caught in its move: the host's copy is the quick one.
                if manifest.name in self._versions:
                    self._versions[manifest.name].tier.remove(manifest)
                self._versions[manifest.name] = _Stored(manifest, tier, self._next_use())

    def put(self, manifest: Manifest, source: Bytes, extents: Sequence[Extent]) -> str:
        """Store a version, making room first; returns the tier's name.

        A version of the same name that is there already is replaced.

        Raises:
            StateTierFullError: no tier has room, whatever is moved.
        """
        tier = self._make_room(manifest)
        try:
            stored = tier.write(manifest, source, extents)
        except BaseException:
            with self._lock:
                self._reserved[tier.name] -= manifest.nbytes
            raise
        with self._lock:
            self._reserved[tier.name] -= manifest.nbytes
            former = self._versions.get(manifest.name)
            if former is not None and former.tier is not tier:
                former.tier.remove(former.manifest)
            self._versions[manifest.name] = _Stored(stored, tier, self._next_use())
        return tier.name

    @contextmanager
    def reading(self, name: str, what: str) -> Iterator[tuple[Manifest, Tier]]:
        """The version of that name, held in place while the block runs.

        Raises:
            StateLostError: there is no such version; `what` says which in words.
        """
        with self._lock:
            stored = self._versions.get(name)
            if stored is None or stored.doomed:
                raise StateLostError(f"{what} is not on this node: restore a checkpoint")
            stored.users += 1
            stored.last_use = self._next_use()
        try:
            yield stored.manifest, stored.tier
        finally:
            with self._lock:
                stored.users -= 1
                if stored.doomed and stored.users == 0:
                    self._remove(stored)

    def find(self, wanted: Callable[[Manifest], bool]) -> list[Manifest]:
        """Every version for which `wanted` holds, by name."""
        with self._lock:
            return [
                self._versions[name].manifest
                for name in sorted(self._versions)
                if wanted(self._versions[name].manifest) and not self._versions[name].doomed
            ]

    def drop(self, manifests: Sequence[Manifest]) -> None:
        """Give versions up; one in use goes when its last user has finished."""
        with self._lock:
            for manifest in manifests:
                stored = self._versions.get(manifest.name)
                if stored is None:
                    continue
                stored.doomed = True
                if stored.users == 0:
                    self._remove(stored)

    def used_bytes(self, tier_name: str) -> int:
        """Bytes in a tier, those being written included."""
        with self._lock:
            stored = sum(
                stored.manifest.nbytes
                for stored in self._versions.values()
                if stored.tier.name == tier_name
            )
            return stored + self._reserved[tier_name]

    def spill_all(self) -> None:
        """Move every loadable version to the NVMe tier (a clean exit). The rest is dropped."""
        with self._lock:
            for stored in list(self._versions.values()):
                if stored.tier is self._host and stored.manifest.kind == VersionKind.STATE:
                    self._spill(stored)

    def _make_room(self, manifest: Manifest) -> Tier:
        with self._lock:
            needed = manifest.nbytes
            if needed <= self._host_max:
                residents = [
                    Resident(
                        name=name,
                        nbytes=stored.manifest.nbytes,
                        last_use=stored.last_use,
                        pinned=stored.users > 0,
                    )
                    for name, stored in self._versions.items()
                    if stored.tier is self._host
                ]
                used = self.used_bytes(self._host.name)
                names = choose_spills(residents, used, needed, self._host_max)
                if names is not None:
                    for name in names:
                        self._spill(self._versions[name])
                    self._reserved[self._host.name] += needed
                    return self._host
            used = self.used_bytes(self._nvme.name)
            if used + needed > self._nvme_max:
                raise StateTierFullError(
                    f"version {manifest.seq} of {manifest.deployment!r} has {needed} bytes; the "
                    f"host tier (bound {self._host_max}) cannot make room and the NVMe tier holds "
                    f"{used} of {self._nvme_max}: end a job or raise a bound; the state stays "
                    "where it was",
                    needed_bytes=needed,
                )
            self._reserved[self._nvme.name] += needed
            return self._nvme

    def _spill(self, stored: _Stored) -> None:
        """Move one version from host to NVMe; the lock is held, so nobody can begin to use it."""
        manifest = stored.manifest
        used = self.used_bytes(self._nvme.name)
        if used + manifest.nbytes > self._nvme_max:
            raise StateTierFullError(
                f"the NVMe tier holds {used} of {self._nvme_max} bytes; {manifest.nbytes} more do "
                "not fit: end a job or raise the bound; the state stays where it was",
                needed_bytes=manifest.nbytes,
            )
        whole = (Extent(arena_offset=0, file_offset=0, nbytes=manifest.nbytes),)
        moved = self._nvme.write(manifest, self._host.map(manifest), whole)
        self._host.remove(manifest)
        stored.manifest, stored.tier = moved, self._nvme

    def _remove(self, stored: _Stored) -> None:
        if self._versions.get(stored.manifest.name) is stored:
            del self._versions[stored.manifest.name]
            stored.tier.remove(stored.manifest)

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses
