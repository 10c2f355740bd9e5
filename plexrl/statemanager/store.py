"""All versions a node holds, over its two tiers; the only place that knows where state lies.

Laws:

- A version is stored from the moment its file has its name until it is dropped or replaced.
- A tier never holds more than its bound, counting what is being written and what is still read.
- Who began to use a version keeps these very bytes, whatever becomes of it. A dropped version loses
  its name at once, so no crash brings it back; its bytes count until its last user is done.
- A version is in one tier, but for the moment of its move; after a crash in that moment the copy of
  the higher ordinal counts, and of equal ones the host's.

Room is made by one thread at a time (`_room`), which may hold it through a spill; everything else
takes `_lock`, which is never held during I/O on data.
"""

import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from plexrl.errors import PlexRLError, StateLostError, StateTierFullError
from plexrl.statemanager.device.memory import DeviceMemory
from plexrl.statemanager.residency import Resident, Room, TierName, place
from plexrl.statemanager.tier import Tier, VersionFile
from plexrl.statemanager.versions import Extent, Manifest, VersionKind


@dataclass(slots=True, eq=False)
class _Copy:
    """One file of one version. A retired one is no longer what its version's name means."""

    file: VersionFile
    tier: Tier
    last_use: int
    users: int = 0
    retired: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A version that its user can read for as long as the lease lasts."""

    file: VersionFile
    tier: Tier
    fd: int
    """Of the file, read-only."""

    def read(self, target_fd: int | DeviceMemory, extents: Sequence[Extent]) -> None:
        """As `Tier.read`."""
        self.tier.read(self.file, self.fd, target_fd, extents)

    def digest(self) -> str:
        """As `Tier.digest`."""
        return self.tier.digest(self.file, self.fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """A version and where it lies now."""

    manifest: Manifest
    tier: TierName
    nbytes: int
    """Of its file."""


class Store:
    """Thread-safe. `host` is filled first and spills to `nvme`."""

    def __init__(self, host: Tier, host_bytes: int, nvme: Tier, nvme_bytes: int) -> None:
        self._tiers = {TierName.HOST: host, TierName.NVME: nvme}
        self._bytes_max = {TierName.HOST: host_bytes, TierName.NVME: nvme_bytes}
        self._used_bytes = {TierName.HOST: 0, TierName.NVME: 0}
        self._room = threading.Lock()
        self._lock = threading.Lock()
        self._current: dict[str, _Copy] = {}
        self._clock = 0
        self._recover()

    def put(
        self, manifest: Manifest, source_fd: int | DeviceMemory, superseded: Iterable[str] = ()
    ) -> StoredVersion:
        """Store a version from the arena behind `source_fd`; a version of its name is replaced.

        `superseded` names versions that may be dropped if room is short.

        Raises:
            StateTierFullError: no tier has room, whatever is moved.
        """
        manifest = replace(manifest, stamp=uuid.uuid4().hex)

        def write(tier: Tier, file: VersionFile) -> VersionFile:
            return tier.write(file, source_fd, file.manifest.extents)

        return self._put(manifest, write, superseded)

    def adopt(self, manifest: Manifest, source_fd: int, source_offset: int) -> StoredVersion:
        """Store another node's version, stamp and digest included, from a file that holds its data
        at `source_offset`; a version of its name is replaced, unless it has that stamp already.

        Raises:
            CorruptStateError: the bytes are not those of the digest.
            StateTierFullError: no tier has room, whatever is moved.
        """

        def write(tier: Tier, file: VersionFile) -> VersionFile:
            return tier.take_in(file, source_fd, source_offset)

        return self._put(manifest, write, ())

    @contextmanager
    def lease(self, name: str, description: str) -> Iterator[Lease]:
        """The version of that name, to read while the block runs.

        Raises:
            StateLostError: there is no such version; `description` says which in words.
            CorruptStateError: its file is gone.
        """
        copy, fd = self._begin_use(name, description)
        try:
            yield Lease(file=copy.file, tier=copy.tier, fd=fd)
        finally:
            self._end_use(copy, fd)

    @contextmanager
    def lease_in_memory(self, name: str, description: str) -> Iterator[Lease]:
        """As `lease`, with the version brought into the host tier first.

        Raises:
            StateLostError: there is no such version.
            CorruptStateError: it was spilled and is damaged.
            StateTierFullError: the host tier cannot take it.
        """
        while True:
            copy, fd = self._begin_use(name, description)
            try:
                if copy.tier.name == TierName.HOST:
                    yield Lease(file=copy.file, tier=copy.tier, fd=fd)
                    return
                self._promote(copy, fd)
            finally:
                self._end_use(copy, fd)

    def prefetch(self, name: str, description: str) -> bool:
        """Bring a version to the host tier if nothing has to give way; returns whether it is there.

        Raises:
            StateLostError: there is no such version.
            CorruptStateError: it is damaged; it stays where it is.
            StorageError: the host tier cannot take it; it stays where it is.
        """
        copy, fd = self._begin_use(name, description)
        try:
            if copy.tier.name == TierName.HOST:
                return True
            planned = self._tiers[TierName.HOST].plan(copy.file.manifest)
            if not self._take_free(TierName.HOST, planned):
                return False
            self._bring_to_host(copy, fd, planned)
            return True
        finally:
            self._end_use(copy, fd)

    def find(self, wanted: Callable[[Manifest], bool]) -> list[StoredVersion]:
        """Every version for which `wanted` holds, by name."""
        with self._lock:
            return [
                StoredVersion(
                    manifest=copy.file.manifest, tier=copy.tier.name, nbytes=copy.file.nbytes
                )
                for _, copy in sorted(self._current.items())
                if wanted(copy.file.manifest)
            ]

    def drop(self, names: Iterable[str]) -> None:
        """Give versions up; a file in use goes when its last user is done."""
        with self._lock:
            self._drop(names)

    def touch(self, name: str) -> None:
        """Count the version as used now."""
        with self._lock:
            if name in self._current:
                self._clock += 1
                self._current[name].last_use = self._clock

    def used_bytes(self, tier: TierName) -> int:
        """Bytes in a tier, those being written or still read included."""
        with self._lock:
            return self._used_bytes[tier]

    def persist(self) -> list[str]:
        """Move every loadable version to the NVMe tier, the newest first (a clean exit).

        Returns the names of those that could not be kept there; they stay where they are.
        """
        left = []
        with self._room:
            found = self.find(lambda manifest: manifest.kind == VersionKind.STATE)
            for version in sorted(found, key=lambda v: v.manifest.seq, reverse=True):
                if version.tier == TierName.NVME:
                    continue
                try:
                    self._spill(version.manifest.name)
                except PlexRLError:
                    left.append(version.manifest.name)
        return left

    def _recover(self) -> None:
        for tier in (self._tiers[TierName.HOST], self._tiers[TierName.NVME]):
            for file in tier.recover():
                ordinal = file.manifest.ordinal
                self._clock = max(self._clock, ordinal)
                self._used_bytes[tier.name] += file.nbytes
                former = self._current.get(file.manifest.name)
                if former is not None and former.file.manifest.ordinal >= ordinal:
                    self._retire(_Copy(file, tier, last_use=ordinal))
                else:
                    self._install(_Copy(file, tier, last_use=ordinal))

    def _put(
        self,
        manifest: Manifest,
        write: Callable[[Tier, VersionFile], VersionFile],
        superseded: Iterable[str],
    ) -> StoredVersion:
        """Store a version, its file made by `write` in the tier that has room."""
        with self._lock:
            self._clock += 1
            manifest = replace(manifest, ordinal=self._clock)
        planned = self._tiers[TierName.HOST].plan(manifest)
        tier = self._make_room(planned, superseded)
        try:
            file = self._write_reserved(tier, planned, write)
        except StateTierFullError:
            if tier.name == TierName.NVME:
                raise
            # The memory file system is fuller than our bound; others may be using it.
            if not self._take_free(TierName.NVME, planned):
                with self._lock:
                    raise self._full(planned) from None
            tier = self._tiers[TierName.NVME]
            file = self._write_reserved(tier, planned, write)
        with self._lock:
            self._install(_Copy(file, tier, last_use=manifest.ordinal))
        return StoredVersion(manifest=file.manifest, tier=tier.name, nbytes=file.nbytes)

    def _make_room(self, planned: VersionFile, superseded: Iterable[str]) -> Tier:
        """Reserve the file's bytes in a tier, after moving what must go."""
        superseded = frozenset(superseded)
        with self._room:
            while True:
                with self._lock:
                    rooms = {
                        name: Room(used_bytes=used, bytes_max=self._bytes_max[name])
                        for name, used in self._used_bytes.items()
                    }
                    placement = place(
                        planned.nbytes,
                        self._residents(superseded),
                        rooms[TierName.HOST],
                        rooms[TierName.NVME],
                    )
                    if placement is None:
                        raise self._full(planned)
                    self._drop(placement.drop)
                    if not placement.spill:
                        self._used_bytes[placement.tier] += planned.nbytes
                        return self._tiers[placement.tier]
                # Room cannot shrink meanwhile, since who takes room holds `_room`; but a spilled
                # version may have gained a reader, so what is needed is looked at again.
                for name in placement.spill:
                    self._spill(name)

    def _take_free(self, name: TierName, planned: VersionFile) -> bool:
        """Reserve the file's bytes in a tier if they are free already."""
        with self._room, self._lock:
            if planned.nbytes > self._bytes_max[name] - self._used_bytes[name]:
                return False
            self._used_bytes[name] += planned.nbytes
            return True

    def _write_reserved(
        self,
        tier: Tier,
        planned: VersionFile,
        write: Callable[[Tier, VersionFile], VersionFile],
    ) -> VersionFile:
        try:
            return write(tier, tier.plan(planned.manifest))
        except BaseException:
            self._give_back(tier, planned.nbytes)
            raise

    def _spill(self, name: str) -> None:
        """Move a version from host to NVMe; `_room` is held."""
        with self._lock:
            copy = self._current.get(name)
            if copy is None or copy.tier.name == TierName.NVME:
                return
            free = self._bytes_max[TierName.NVME] - self._used_bytes[TierName.NVME]
            if copy.file.nbytes > free:
                raise self._full(copy.file)
            fd = self._use(copy)
            self._used_bytes[TierName.NVME] += copy.file.nbytes
        nvme = self._tiers[TierName.NVME]
        try:
            planned = nvme.plan(copy.file.manifest)
            file = nvme.write(planned, fd, copy.file.data_extent)
            self._replace(copy, _Copy(file, nvme, last_use=copy.last_use))
        except BaseException:
            self._give_back(nvme, copy.file.nbytes)
            raise
        finally:
            self._end_use(copy, fd)

    def _promote(self, copy: _Copy, fd: int) -> None:
        """Bring a version in use from NVMe to host."""
        host = self._tiers[TierName.HOST]
        planned = host.plan(copy.file.manifest)
        tier = self._make_room(planned, ())
        if tier is not host:
            self._give_back(tier, planned.nbytes)
            raise self._full(planned)
        self._bring_to_host(copy, fd, planned)

    def _bring_to_host(self, copy: _Copy, fd: int, planned: VersionFile) -> None:
        """Move a version in use from NVMe to its place in host, which is reserved."""
        host = self._tiers[TierName.HOST]
        try:
            file = host.write_from(planned, copy.tier, copy.file, fd)
        except BaseException:
            self._give_back(host, planned.nbytes)
            raise
        self._replace(copy, _Copy(file, host, last_use=copy.last_use))

    def _replace(self, copy: _Copy, moved: _Copy) -> None:
        """Let the version of `copy` be `moved`, unless it was dropped or replaced meanwhile."""
        with self._lock:
            if copy.retired:
                self._retire(moved)
            else:
                self._install(moved)

    def _begin_use(self, name: str, description: str) -> tuple[_Copy, int]:
        with self._lock:
            copy = self._current.get(name)
            if copy is None:
                raise StateLostError(f"{description} is not on this node: restore a checkpoint")
            fd = self._use(copy)
            self._clock += 1
            copy.last_use = self._clock
            return copy, fd

    def _end_use(self, copy: _Copy, fd: int) -> None:
        os.close(fd)
        with self._lock:
            copy.users -= 1
            if copy.retired and copy.users == 0:
                self._used_bytes[copy.tier.name] -= copy.file.nbytes

    def _give_back(self, tier: Tier, nbytes: int) -> None:
        with self._lock:
            self._used_bytes[tier.name] -= nbytes

    def _residents(self, superseded: frozenset[str]) -> list[Resident]:
        return [
            Resident(
                name=name,
                tier=copy.tier.name,
                nbytes=copy.file.nbytes,
                last_use=copy.last_use,
                in_use=copy.users > 0,
                superseded=name in superseded,
            )
            for name, copy in self._current.items()
        ]

    # The following hold `_lock` already.

    def _install(self, copy: _Copy) -> None:
        """Let the copy be what its version's name means."""
        name = copy.file.manifest.name
        self._drop([name])
        self._current[name] = copy

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            copy = self._current.pop(name, None)
            if copy is not None:
                self._retire(copy)

    def _use(self, copy: _Copy) -> int:
        """Begin a use; returns the descriptor to read from, which stays good when the name goes."""
        fd = copy.tier.open(copy.file)
        copy.users += 1
        return fd

    def _retire(self, copy: _Copy) -> None:
        copy.retired = True
        copy.tier.remove(copy.file)
        if copy.users == 0:
            self._used_bytes[copy.tier.name] -= copy.file.nbytes

    def _full(self, file: VersionFile) -> StateTierFullError:
        host, nvme = TierName.HOST, TierName.NVME
        return StateTierFullError(
            f"{file.manifest.description} needs {file.nbytes} bytes; the host tier holds "
            f"{self._used_bytes[host]} of {self._bytes_max[host]} and the NVMe tier "
            f"{self._used_bytes[nvme]} of {self._bytes_max[nvme]}, and what they hold cannot make "
            "way: end a job or raise a bound; the state stays where it was",
            needed_bytes=file.nbytes,
        )
