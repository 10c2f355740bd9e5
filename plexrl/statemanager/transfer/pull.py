"""Pull of a published version into a target's memory, from all its sources at once.

Invariants:

- Received bytes are valid only after each source has confirmed that it held the version throughout.
  If a source is lost, the others send its part, and the parts of the others are kept.
- A pull is of one seq and, from one source, of one stamp (ETag); versions never mix.
- Publishing never waits for readers: versions are immutable, and a lease keeps the one that is read
  (StaleFlow §5.1 takes a lock instead).
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

from plexrl.errors import ConnectionLostError, CorruptStateError, StateLostError, UnavailableError
from plexrl.statemanager.layout.plan.cache import PlanCache
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.layout.strided.copies import StridedCopies, concatenate, without
from plexrl.statemanager.protocol.connection import retry_connect
from plexrl.statemanager.protocol.delta_policy import DeltaPolicy
from plexrl.statemanager.store.receiving.pull_target import PullTarget
from plexrl.statemanager.store.receiving.reader import Delta, VersionReader, as_source
from plexrl.statemanager.transfer.delta.pace import DeltaPace


class PullMode(StrEnum):
    """The kind of a pull's transfer."""

    FULL = "full"
    DELTA = "delta"
    """Only the differences from the version that the target held."""


ATTEMPTS_MAX = 4
"""Maximum attempts of one pull; each lost source costs one."""
LAYOUTS_MAX = 1024

Opener = Callable[[ExitStack, str, str, int, Collection[str]], Sequence[VersionReader]]
"""As `Transport.open`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """Result of a pull."""

    bytes_wanted: int
    """Size of the target's slices."""
    bytes_moved: int
    """Bytes transferred; equal to `bytes_wanted` if no source was lost and no delta was used."""
    bytes_by_source: dict[str, int]
    """Address → bytes from that source."""
    mode: PullMode
    attempts: int


class KnownLayouts:
    """Cache of layouts by digest. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layouts: OrderedDict[str, Layout] = OrderedDict()

    def find(self, digest: str) -> Layout | None:
        """The layout with that digest, if cached."""
        with self._lock:
            return self._layouts.get(digest)

    def digests(self) -> list[str]:
        """The digests of all cached layouts."""
        with self._lock:
            return list(self._layouts)

    def add(self, layout: Layout) -> None:
        """Cache a layout."""
        with self._lock:
            self._layouts[layout.digest] = layout
            self._layouts.move_to_end(layout.digest)
            if len(self._layouts) > LAYOUTS_MAX:
                self._layouts.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bases:
    """Versions that the target holds, the bases of a delta."""

    deployment: str
    layout: str
    """Digest of the target's layout."""
    stamps: Mapping[tuple[str, int], str]
    """(address, rank) → stamp of every offered shard, also of replicas not read: with equal seq
    they have equal bytes."""

    def fit(self, deployment: str, wants: Layout) -> bool:
        return (deployment, wants.digest) == (self.deployment, self.layout)


_NO_BASES = _Bases(deployment="", layout="", stamps={})


class Puller:
    """Pulls into one target; caches plans and layouts between pulls."""

    def __init__(self, opener: Opener, layouts: KnownLayouts, timeout_s: float) -> None:
        """`timeout_s` bounds the wait for a restarting source."""
        self._opener = opener
        self._layouts = layouts
        self._timeout_s = timeout_s
        self._plans = PlanCache()
        self.is_torn = False
        """Whether a pull failed after its start, so that the target holds no complete version."""
        self._bases = _NO_BASES
        self._pace = DeltaPace()

    def forget(self) -> None:
        """Record that the target now holds other state than a pulled version."""
        self.is_torn = False
        self._bases = _NO_BASES

    def forget_bases(self) -> None:
        """Record that the target was written to, so that the next pull is a full one."""
        self._bases = _NO_BASES

    def pull(
        self,
        addresses: Sequence[str],
        deployment: str,
        seq: int,
        wants: Layout,
        target: PullTarget,
        delta: DeltaPolicy | None = None,
    ) -> PullResult:
        """Fill the slices of `wants` in `target`.

        With `delta`, only the differences are transferred if the last pull filled the same slices
        from the same deployment and `target` has not changed since.

        Raises:
            StateLostError: the shards do not cover a wanted slice, or the version is gone.
            InvalidRequestError: a tensor has another shape there, or a dtype without a cast.
            UnavailableError: sources were lost in every attempt.
        """
        version = (deployment, seq)
        progress = _Progress()
        stamps: dict[tuple[str, int], str] = {}
        for attempt in range(1, ATTEMPTS_MAX + 1):
            with ExitStack() as held:
                jobs, read = self._prepare(held, addresses, version, wants, progress)
                fits = self._bases.fit(deployment, wants)
                bases = self._bases if fits else _NO_BASES
                self._bases = _NO_BASES
                if delta is not None and bases is not _NO_BASES and self._pays(delta):
                    jobs = [_with_bases(job, bases, delta) for job in jobs]
                self.is_torn = True
                started = time.perf_counter()
                fetched = _fetch_all(jobs, target)
                took_s = time.perf_counter() - started
                used = {job.address for job in jobs}
                stamps |= {(r.address, r.rank): r.stamp for r in read if r.address in used}
            progress.add(jobs, fetched)
            if progress.lost_sources:
                continue
            if attempt == 1:
                has_bases = any(part.delta is not None for job in jobs for part in job.parts)
                self._pace.took(wants.nbytes, took_s, is_delta=has_bases)
            self.is_torn = False
            self._bases = _Bases(deployment=deployment, layout=wants.digest, stamps=stamps)
            return progress.result(wants.nbytes, attempt)
        lost = next(iter(progress.lost_sources.values()))
        raise UnavailableError(
            f"version {seq} of {deployment!r} could not be pulled in {ATTEMPTS_MAX} attempts "
            f"({lost}): see the logs of the StateManagers"
        ) from lost

    def _pays(self, delta: DeltaPolicy) -> bool:
        return not delta.only_where_quicker or self._pace.prefers_delta()

    def _prepare(
        self,
        held: ExitStack,
        addresses: Sequence[str],
        version: tuple[str, int],
        wants: Layout,
        progress: "_Progress",
    ) -> tuple[list["_Job"], list[VersionReader]]:
        """The copies for each source, without those that are done, and all readers.

        Sources that are gone, or were lost in the last attempt, are awaited only if the others do
        not hold everything.
        """
        opened: list[VersionReader] = []
        awaited: list[str] = list(progress.lost_sources)
        for address in dict.fromkeys(addresses):
            if address in progress.lost_sources:
                continue
            try:
                opened += self._open(held, address, version)
            except (ConnectionLostError, OSError):
                awaited.append(address)
        done = concatenate([copies for copies in progress.done if len(copies)])
        while True:
            try:
                return self._jobs(opened, addresses, version, wants, done), opened
            except StateLostError:
                if not awaited:
                    raise
                address = awaited.pop(0)
                attempt = partial(self._open, held, address, version)
                opened += retry_connect(address, self._timeout_s, attempt)

    def _open(
        self, held: ExitStack, address: str, version: tuple[str, int]
    ) -> Sequence[VersionReader]:
        with ExitStack() as own:
            readers = self._opener(own, address, *version, self._layouts.digests())
            held.push(own.pop_all())
        for reader in readers:
            self._layouts.add(reader.layout)
        return readers

    def _jobs(
        self,
        opened: Sequence[VersionReader],
        addresses: Sequence[str],
        version: tuple[str, int],
        wants: Layout,
        done: StridedCopies,
    ) -> list["_Job"]:
        if not opened:
            deployment, seq = version
            raise StateLostError(
                f"no StateManager of {sorted(addresses)} has version {seq} of {deployment!r} "
                "published: publish the weights again"
            )
        plan = self._plans.plan([as_source(reader) for reader in opened], [wants])
        parts: dict[str, list[_Part]] = {}
        for number, copies in plan.targets[0].copies.items():
            reader = opened[number]
            rest = without(copies, done) if len(done) else copies
            if len(rest):
                parts.setdefault(reader.address, []).append(_Part(reader=reader, copies=rest))
        return [_Job(address=address, parts=tuple(found)) for address, found in parts.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Copies to read from one version."""

    reader: VersionReader
    copies: StridedCopies
    delta: Delta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The part of a pull that one source sends."""

    address: str
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetched:
    copies: StridedCopies
    """The copies that are done."""
    nbytes: int
    """Bytes transferred for them."""
    lost: Exception | None
    """Why the source was lost; absent: it was not."""


@dataclass(slots=True, kw_only=True)
class _Progress:
    """Results of a pull's attempts so far."""

    done: list[StridedCopies] = field(default_factory=list)
    """Copies whose bytes are valid."""
    done_bytes: int = 0
    moved_bytes: int = 0
    by_source: dict[str, int] = field(default_factory=dict)
    lost_sources: dict[str, Exception] = field(default_factory=dict)
    """Sources lost in the last attempt, by address."""

    def add(self, jobs: Sequence[_Job], fetched: Sequence[_Fetched]) -> None:
        """Add the results of one attempt."""
        self.lost_sources = {}
        for job, result in zip(jobs, fetched, strict=True):
            address = job.address
            self.moved_bytes += result.nbytes
            self.done_bytes += result.copies.nbytes
            if result.lost is not None:
                self.lost_sources[address] = result.lost
            if result.lost is None or job.parts[0].reader.arrives_whole:
                self.done.append(result.copies)
                self.by_source[address] = self.by_source.get(address, 0) + result.nbytes

    def result(self, bytes_wanted: int, attempts: int) -> PullResult:
        """The result of a pull that is complete."""
        return PullResult(
            bytes_wanted=bytes_wanted,
            bytes_moved=self.moved_bytes,
            bytes_by_source={name: size for name, size in self.by_source.items() if size},
            attempts=attempts,
            mode=PullMode.DELTA if self.moved_bytes < self.done_bytes else PullMode.FULL,
        )


def _with_bases(job: _Job, bases: _Bases, policy: DeltaPolicy) -> _Job:
    def changed(part: _Part) -> _Part:
        stamp = bases.stamps.get((part.reader.address, part.reader.rank))
        return part if stamp is None else replace(part, delta=Delta(stamp, policy))

    return replace(job, parts=tuple(changed(part) for part in job.parts))


def _fetch_all(jobs: Sequence[_Job], target: PullTarget) -> list[_Fetched]:
    """Fetch from all sources concurrently, from the first one on this thread."""
    if len(jobs) < 2:
        return [_fetch(job, target) for job in jobs]
    with ThreadPoolExecutor(len(jobs) - 1, thread_name_prefix="plexrl-pull") as pool:
        others = [pool.submit(_fetch, job, target) for job in jobs[1:]]
        first = _fetch(jobs[0], target)
        return [first, *(future.result() for future in others)]


def _fetch(job: _Job, target: PullTarget) -> _Fetched:
    done_copies: list[StridedCopies] = []
    moved: list[int] = []

    def report(copies: StridedCopies, nbytes: int) -> None:
        done_copies.append(copies)
        moved.append(nbytes)

    lost: Exception | None = None
    try:
        for part in job.parts:
            target.read(part.reader, part.copies, report, part.delta)
        job.parts[0].reader.confirm()
    except (CorruptStateError, UnavailableError) as error:
        lost = error
    return _Fetched(copies=concatenate(done_copies), nbytes=sum(moved), lost=lost)
