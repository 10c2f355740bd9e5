"""Prefetch of a rank's arena during the offload of another rank: the link copies in both directions
at once (PlexRL §5.2.2).

The scheduler names the deployment that is loaded after an offload. Once the offload has its place
in a tier, the first segments of that deployment's arenas are allocated in memory that is free, and
filled. The load adds the remaining segments when the offload has freed its memory.

A prefetch changes nothing that a load relies on. Invariants:

- It is a move of its rank: it holds the registration's lock from the moment that it is wanted, so a
  load waits for its end, and none begins after a load.
- No worker has the memory before the load. A load of another version, or a version that was saved
  again since, writes all of it anew.
- It ends with a failed offload, with a load of another deployment of the group, with its
  registration, and when another allocation lacks memory.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from plexrl.errors import PlexRLError
from plexrl.statemanager.daemon.registry.registry import PrefetchedArena, Registration, Registry
from plexrl.statemanager.device.memory import MemoryRange
from plexrl.statemanager.layout.versions import VersionKind, version_name
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.tiers.eviction.policy import TierName

LOG = logging.getLogger(__name__)

THREADS_MAX = 16
"""Prefetches at once; a node has one for each GPU."""

FREE_PART_LEFT = 16
"""One part in so many of the free memory is left, because drivers allocate some for themselves."""


class ArenaPrefetcher:
    """Thread-safe."""

    def __init__(self, store: Store, registry: Registry, *, only_idle: bool) -> None:
        """`only_idle`: allocate no more memory than the devices keep for their next arena, because
        the host's own memory is theirs and has other uses."""
        self._only_idle = only_idle
        self._store = store
        self._registry = registry
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="arena-prefetch")

    @contextmanager
    def during_offload(
        self, leaving: Registration, deployment: str, seq: int
    ) -> Iterator[Callable[[], None]]:
        """Yields a function that begins to prefetch version `seq` of `deployment` to the device of
        `leaving`. If the block raises, the prefetch ends, and its memory is free again.

        `deployment` is of the same group; empty: nothing is prefetched.
        """
        begun: list[tuple[Registration, Future[None]]] = []

        def begin() -> None:
            if not begun and deployment:
                begun.extend(
                    (rank, self._start(rank, seq))
                    for rank in self._successors(leaving, deployment)
                    if rank.lock.acquire(blocking=False)
                )

        try:
            yield begin
        except BaseException:
            for rank, prefetch in begun:
                if not prefetch.cancel():
                    wait([prefetch])
                rank.drop_prefetched()
            raise

    def drop_others(self, device: int, group: str, deployment: str) -> None:
        """End the prefetches for other deployments of a group on a device: this one, which may not
        be the expected one, is loaded."""
        for rank in self._registry.on_device(device):
            is_other = rank.group == group and rank.deployment != deployment
            if is_other and rank.allocation is None:
                rank.drop_prefetched()

    def evict(self, device: int, keep: Registration | None) -> bool:
        """Free the memory of one prefetch on a device, but not that for `keep`; false: none is
        complete."""
        for rank in self._registry.on_device(device):
            if rank is not keep and rank.try_drop_prefetched():
                return True
        return False

    def close(self) -> None:
        """Wait for the running prefetches; no other one begins."""
        self._threads.shutdown(cancel_futures=True)

    def _successors(self, leaving: Registration, deployment: str) -> Sequence[Registration]:
        """The ranks that this rank's offload makes room for. Where several ranks share a device, as
        on a CPU node, each offload has its own."""
        there = [r for r in self._registry.on_device(leaving.device) if r.group == leaving.group]
        ours = [rank for rank in there if rank.deployment == leaving.deployment]
        theirs = [rank for rank in there if rank.deployment == deployment]
        if leaving not in ours:
            return ()
        return theirs[ours.index(leaving) :: len(ours)]

    def _start(self, rank: Registration, seq: int) -> Future[None]:
        """Prefetch on another thread; the rank's lock is held, and released at the end."""
        try:
            prefetch = self._threads.submit(self._prefetch, rank, seq)
        except BaseException:
            rank.lock.release()
            raise
        # Also if it is cancelled.
        prefetch.add_done_callback(lambda _: rank.lock.release())
        return prefetch

    def _prefetch(self, rank: Registration, seq: int) -> None:
        has_memory = rank.allocation is not None or rank.prefetched is not None
        if rank.ended or has_memory or rank.host is not None:
            return
        try:
            rank.prefetched = self._filled(rank, seq)
        except PlexRLError as error:
            LOG.info("%s is not prefetched to its device: %s", rank.description, error)
        except Exception:
            # A bug must not hold up the offload, and the load does without a prefetch.
            LOG.exception("%s was not prefetched to its device", rank.description)

    def _filled(self, rank: Registration, seq: int) -> PrefetchedArena | None:
        """The first part of the rank's arena; None: the version is not in the host tier, has
        another layout, or no segment fits."""
        started = time.perf_counter()
        name = version_name(*rank.shard, rank.world_size, VersionKind.STATE, seq)
        with self._store.lease(name, f"version {seq} of {rank.description}") as lease:
            manifest = lease.manifest
            same = tuple(piece for piece in rank.slices if piece.key.part in manifest.parts)
            if lease.tier != TierName.HOST or same != manifest.slices:
                return None
            usage = rank.devices.usage(rank.device)
            free_bytes = 0 if self._only_idle else usage.free_bytes or 0
            part = rank.devices.allocate_part(
                rank.arena_bytes,
                device=rank.device,
                uid=rank.uid,
                bytes_max=usage.idle_bytes + free_bytes - free_bytes // FREE_PART_LEFT,
                bytes_wanted=max((e.arena_offset + e.nbytes for e in manifest.extents), default=0),
            )
            if part is None:
                return None
            try:
                lease.load(MemoryRange(part, 0, part.nbytes))
            except BaseException:
                rank.devices.recycle(part)
                raise
            ends = [(e.arena_offset, e.arena_offset + e.nbytes) for e in manifest.extents]
            return PrefetchedArena(
                allocation=part,
                stamp=manifest.stamp,
                bytes_moved=sum(max(0, min(end, part.nbytes) - at) for at, end in ends),
                began_at=started,
                seconds=time.perf_counter() - started,
            )
