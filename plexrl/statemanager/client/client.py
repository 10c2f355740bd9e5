"""A worker's client of its node's StateManager: blocking moves of the worker's own state.

When a call returns, the move is complete and the tensors are safe to use (PlexRL §5.3). If the
daemon restarts, the client reconnects, registers the arena again and repeats the request. Requests
are idempotent: each names its version, and only the client returns the arena's memory, after it
knows that the version is complete.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from plexrl.errors import CorruptStateError, InvalidRequestError, PlexRLError, StateLostError
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.client.rank_link import RankLink
from plexrl.statemanager.client.reports import LoadReport, MoveReport, PullReport
from plexrl.statemanager.client.stored_step import StoredStep
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.device.cuda.arena import CudaArena
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.protocol.address import is_remote, nearest
from plexrl.statemanager.protocol.delta_policy import DeltaPolicy
from plexrl.statemanager.protocol.messages import (
    Adopt,
    Answer,
    BorrowBase,
    DeviceUse,
    Load,
    Prefetch,
    Publish,
    Register,
    Release,
    ReplicaArrived,
    Replicate,
    Request,
    Save,
    StoredShard,
    Usage,
)
from plexrl.statemanager.protocol.network import NO_NETWORK, Network
from plexrl.statemanager.store.receiving.pull_target import CudaTarget, HostTarget, PullTarget
from plexrl.statemanager.transfer.pull import KnownLayouts, Puller
from plexrl.statemanager.transfer.transport.choice import Transports
from plexrl.wire.messages import SaveRequest

LOG = logging.getLogger(__name__)


class StateManagerClient:
    """One rank's connection to its node's StateManager. Not thread-safe."""

    def __init__(
        self,
        socket_path: str,
        *,
        deployment: str,
        rank: int,
        world_size: int,
        ticket: bytes,
        timeout_s: float = 600.0,
        network: Network = NO_NETWORK,
        address: str = "",
    ) -> None:
        """`ticket` authenticates the client. `timeout_s` bounds each call, including the wait for
        a restarting daemon. `network` leads to StateManagers of other nodes, for pulls. `address`
        is where the daemon is reached from other nodes too; empty: at the socket only."""
        self.path = socket_path
        self.address = address or socket_path
        self.deployment = deployment
        self.rank = rank
        self._world_size = world_size
        self._ticket = ticket
        self._timeout_s = timeout_s
        self._link = RankLink(socket_path, timeout_s, ticket)
        self._held: tuple[int, str] | None = None
        """Seq and stamp (ETag) of the stored version that the arena equals."""
        self._offloaded: tuple[int, str] | None = None
        """Those of the version as which the state was offloaded; absent: it was loaded since."""
        self._wants: tuple[Sequence[StateSlice], Layout] | None = None
        self._staged: CudaTarget | None = None
        """Pinned memory for pulls into the registered arena; absent before the first one."""
        self._layouts = KnownLayouts()
        self._transports = Transports(
            network, self._layouts.find, ticket=ticket, timeout_s=timeout_s
        )
        self._puller = Puller(self._transports.open, self._layouts, timeout_s)

    def register(
        self,
        arena: WorkerArena,
        slices: Sequence[StateSlice],
        *,
        group: str,
        token: int,
        host: HostArena | None = None,
    ) -> None:
        """Register an arena, to which the daemon lends memory; replaces this rank's previous one.

        A new arena keeps its contents. An arena that was registered before and then offloaded gets
        memory when it is loaded. `host` holds the slices whose offsets begin at
        `host_requests.host_start`; it borrows its memory from this daemon.

        Raises:
            StaleTokenError: the group lock has since been granted to another holder.
            InvalidRequestError: a slice lies outside the arena.
            DeviceMemoryFullError: other allocations leave too little device memory.
        """
        self._held = None
        self._puller.forget()
        registration = Register(
            deployment=self.deployment,
            rank=self.rank,
            world_size=self._world_size,
            group=group,
            token=token,
            slices=tuple(slices),
            arena_bytes=arena.nbytes,
            kind=arena.kind,
            device=arena.device,
            device_uuid=arena.uuid,
            host_bytes=0 if host is None else host.nbytes,
        )
        self._link.register(arena, registration, host)
        if host is not None:
            host.lender = self._link

    def attach(self) -> None:
        """Borrow memory for the registered arena if it has none; its contents stay.

        Raises:
            DeviceMemoryFullError: other allocations leave too little device memory.
        """
        self._link.attach()

    def borrow_base(
        self, base: WorkerArena, *, content: str, token: int, fill: Callable[[], None]
    ) -> int:
        """Borrow frozen weights into `base` until the next offload.

        Arenas of this tenant's deployments with equal `content` share that memory, read-only. If
        the daemon has none, `fill` writes it once for all. Returns the bytes that were filled.

        Raises:
            DeviceMemoryFullError: other allocations leave too little device memory. This rank's
                device memory has been returned, unsaved.
        """
        request = BorrowBase(token=token, content=content, nbytes=base.nbytes)
        try:
            return self._link.borrow_base(base, request, fill)
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Return the arena's memory, unsaved."""
        self._link.give_back()
        self._held = None
        self._puller.forget()

    def offload(
        self,
        order: SaveRequest,
        *,
        parts: frozenset[StatePart],
        meta: Mapping[str, object] | None = None,
        digests: Mapping[str, str] | None = None,
    ) -> MoveReport:
        """Store `parts` as version `order.seq` and return the arena's memory.

        `digests`: by share key, of what other ranks of this node may have saved; equal bytes are
        not copied again.

        Versions other than `order.seq` and `order.keep_seq` are dropped when this one is complete;
        `order.previous_seq` and `order.base_seq` only when space is short. An arena that was loaded
        from or saved as version `order.seq` counts as unchanged, so nothing is copied.

        Raises:
            StateTierFullError: no tier has free space; the arena is unchanged.
            StaleTokenError: the group lock has since been granted to another holder.
            UnavailableError: the daemon did not come back in time; the arena is unchanged.
        """
        started = time.perf_counter()
        report = self.snapshot(order, parts=parts, meta=meta, digests=digests)
        stored = self._held
        self.give_back()
        self._offloaded = stored
        # Returning pages takes time that the daemon does not measure.
        return replace(report, seconds=time.perf_counter() - started)

    def snapshot(
        self,
        order: SaveRequest,
        *,
        parts: frozenset[StatePart],
        meta: Mapping[str, object] | None = None,
        digests: Mapping[str, str] | None = None,
    ) -> MoveReport:
        """As `offload`, but the arena keeps its memory and contents."""
        self._check_whole()
        self._link.attach()
        if self._link.host is not None:
            self._link.host.give_up()
        answer = self._link.call(
            Save(
                order=order,
                parts=tuple(sorted(parts)),
                meta_json=msgspec.json.encode(dict(meta or {}), order="sorted").decode(),
                same_as=self.stamp(order.seq),
                digests=dict(digests or {}),
            )
        )
        self._held = (order.seq, answer["stamp"])
        return msgspec.convert(answer, MoveReport)

    def load(
        self,
        *,
        seq: int,
        token: int,
        previous_seq: int = 0,
        base_seq: int = 0,
    ) -> LoadReport:
        """Load version `seq` of this shard into the arena; it also stays stored.

        A version saved under another layout (of data, tensor, pipeline or expert parallelism) is
        converted: each byte is read once. From now on `previous_seq` and `base_seq` are kept
        only while there is free space.

        Raises:
            StateLostError: the version does not exist or is incomplete.
            CorruptStateError: the version is damaged; the arena is empty.
            DeviceMemoryFullError: other allocations leave too little device memory.
            InvalidRequestError: a tensor was saved with another shape or dtype.
            StaleTokenError: the group lock has since been granted to another holder.
            UnavailableError: the daemon did not come back in time; the arena's contents are
                undefined.
        """
        self._held = self._offloaded = None
        if self._link.host is not None:
            self._link.host.detach()
        try:
            request = Load(
                seq=seq,
                token=token,
                previous_seq=previous_seq,
                base_seq=base_seq,
                use=self._link.use,
            )
            answer = self._link.borrow_device(request, keep_contents=False)
        except CorruptStateError:
            self.give_back()
            raise
        if answer["stamp"]:
            self._held = (seq, answer["stamp"])
        self._puller.forget()
        return msgspec.convert(answer, LoadReport)

    def publish(
        self, *, seq: int, token: int, digests: Mapping[str, str] | None = None
    ) -> MoveReport:
        """Publish this shard's parameters and buffers, for other deployments to pull; `digests` as
        in `offload`.

        Raises:
            StateTierFullError: no tier has free space.
            StaleTokenError: the group lock has since been granted to another holder.
        """
        self._check_whole()
        self._link.attach()
        request = Publish(seq=seq, token=token, digests=dict(digests or {}))
        return msgspec.convert(self._link.call(request), MoveReport)

    def pull(
        self,
        *,
        sources: Sequence[str],
        source: str,
        seq: int,
        wants: Sequence[StateSlice],
        delta: DeltaPolicy | None = None,
        replicate: bool = False,
    ) -> PullReport:
        """Fill the wanted slices of the registered arena from a published version.

        Exactly the wanted bytes are transferred, each once; a slice wanted in another dtype is
        cast. `sources` are the StateManagers that hold shards of the version: socket paths on this
        machine, and remote addresses elsewhere. They hold the version during the
        pull. A pull that fails midway leaves the wanted slices without a complete version: nothing
        can be saved or published until a pull or load succeeds.

        With `delta`, only the differences are transferred if the last pull was from the same
        source into the same slices, which have not been written since.

        With `replicate`, and if this node's ranks together pull more bytes of the version over the
        network than it has, this node's StateManager fetches it once, and the pull is from there.

        Raises:
            StateLostError: the shards do not cover a wanted slice, or the version is gone.
            InvalidRequestError: a tensor has another shape there, or a dtype without a cast.
            UnavailableError: a needed source cannot be reached.
            DeviceError: the arena's GPU failed.
        """
        arena = self._link.arena
        if arena is None:
            raise InvalidRequestError("a pull needs an arena: register one first")
        self._link.attach()
        started = time.perf_counter()
        self._held = None
        if self._wants is None or self._wants[0] is not wants:
            self._wants = wants, Layout.of(wants)
        target = self._target_in(arena)
        sources = [nearest(address) for address in sources]
        remote = tuple(filter(is_remote, sources))
        replicated, transfer_s = None, 0.0
        if replicate and remote:
            replicated, transfer_s = self._replicated(source, seq, remote, self._wants[1].nbytes)
        try:
            if replicated is not None:
                try:
                    result = self._puller.pull([self.path], source, seq, self._wants[1], target)
                except (StateLostError, CorruptStateError) as error:
                    # It was dropped for want of space, or is damaged; the sources may be well.
                    LOG.info("pulling from the sources, not from the replica: %s", error)
                    replicated, transfer_s = None, 0.0
            if replicated is None:
                result = self._puller.pull(sources, source, seq, self._wants[1], target, delta)
        finally:
            self._transports.forget_unused()
        return PullReport(
            bytes_moved=result.bytes_moved,
            seconds=time.perf_counter() - started,
            tier="host",
            bytes_wanted=result.bytes_wanted,
            bytes_by_source=result.bytes_by_source,
            attempts=result.attempts,
            mode=result.mode,
            bytes_replicated=replicated or 0,
            transfer_s=transfer_s,
        )

    def _target_in(self, arena: WorkerArena) -> PullTarget:
        if isinstance(arena, Arena):
            return HostTarget(np.frombuffer(arena.buffer, dtype=np.uint8))
        assert isinstance(arena, CudaArena), "other arenas are in host memory"
        if self._staged is None or self._staged.arena is not arena:
            self._end_staging()
            self._staged = CudaTarget(arena)
        return self._staged

    def _end_staging(self) -> None:
        if self._staged is not None:
            self._staged.close()
            self._staged = None

    def has_arrived(
        self, *, sources: Sequence[str], source: str, seq: int, wants: Sequence[StateSlice]
    ) -> bool:
        """Whether a pull with these arguments and `replicate` has nothing to wait for: this node
        has a replica, or gets none. Otherwise it is fetched; returns at once."""
        remote = tuple(filter(is_remote, map(nearest, sources)))
        if not remote:
            return True
        if self._wants is None or self._wants[0] is not wants:
            self._wants = wants, Layout.of(wants)
        request = ReplicaArrived(
            source=source, seq=seq, addresses=remote, nbytes=self._wants[1].nbytes
        )
        try:
            return bool(self._link.call(request)["arrived"])
        except PlexRLError as error:
            LOG.info("version %d of %s is not fetched ahead: %s", seq, source, error)
            return True

    def _replicated(
        self, source: str, seq: int, addresses: tuple[str, ...], nbytes: int
    ) -> tuple[int | None, float]:
        """Bytes that this node fetched now for a replica of the version, and the seconds of its
        fetch. None: it has no replica."""
        request = Replicate(source=source, seq=seq, addresses=addresses, nbytes=nbytes)
        try:
            answer = self._link.call(request)
        except PlexRLError as error:
            # Whatever keeps the node from a replica, the sources may serve this rank.
            LOG.info("no replica of version %d of %s: %s", seq, source, error)
            return None, 0.0
        return int(answer["bytes_moved"]) if answer["held"] else None, float(answer["seconds"])

    def expect_use(self, use: DeviceUse) -> None:
        """Announce what will be used of the device besides the arena after the next load: the load
        is refused if that is not free."""
        self._link.use = use

    def forget_pulled(self) -> None:
        """Record that the arena's weights were written, so that the next pull is a full one."""
        self._puller.forget_bases()

    def usage(self) -> dict[str, Any]:
        """The node's tiers, versions and arenas, and its first device, in bytes."""
        return self._link.call(Usage())

    def release(self, deployment: str, *, kept_ranks: tuple[int, ...] | None = None) -> None:
        """Drop every version and registration of a deployment, or with `kept_ranks` the versions of
        other ranks only."""
        self._link.call(Release(deployment=deployment, kept_ranks=kept_ranks))

    def adopt(self, shard: StoredShard, fds: Sequence[int]) -> MoveReport:
        """Have the daemon store another daemon's version from its files. For the node agent.

        Raises:
            StateTierFullError: no tier has free space.
            CorruptStateError: the bytes do not match the manifest's digest.
            PermissionDeniedError: this client has registered an arena.
        """
        request = Adopt(manifest=shard.manifest, regions=shard.regions)
        return msgspec.convert(self._link.call(request, fds), MoveReport)

    def prefetch(
        self,
        deployment: str,
        seq: int,
        next_use_s: float | None = None,
        sources: Sequence[str] = (),
    ) -> None:
        """Hint that version `seq` will be loaded soon, in `next_use_s` seconds if known; returns at
        once. With `sources`: that this node's ranks will pull it, as published, from there."""
        remote = tuple(filter(is_remote, map(nearest, sources)))
        if remote or not sources:
            self._link.call(
                Prefetch(deployment=deployment, seq=seq, next_use_s=next_use_s, sources=remote)
            )

    def request(self, request: Request, fds: Sequence[int] = ()) -> Answer:
        """The answer to a request without a method of its own.

        Raises:
            PlexRLError: the daemon refused it.
            UnavailableError: the daemon did not come back in time.
        """
        return self._link.call(request, fds)

    def close(self) -> None:
        """Close the connection; the daemon drops the registration and keeps the versions."""
        self._transports.close()
        self._end_staging()
        self._link.close()

    def stamp(self, seq: int) -> str | None:
        """Stamp (ETag) of the stored version `seq`, if the arena is known to equal it."""
        return self._held[1] if self._held is not None and self._held[0] == seq else None

    def offloaded_stamp(self, seq: int) -> str:
        """Stamp of version `seq`, as which the state was offloaded.

        Raises:
            StateLostError: it was offloaded as another version, or is loaded.
        """
        if self._offloaded is None or self._offloaded[0] != seq:
            raise StateLostError(
                f"rank {self.rank} of {self.deployment!r} did not offload its state as version "
                f"{seq}: load it first",
                deployment=self.deployment,
                seq=seq,
            )
        return self._offloaded[1]

    def begin_step(self, arena: HostArena, seq: int) -> StoredStep:
        """A step of the state as it was offloaded, as version `seq`. Until `end_step` it counts as
        lost. Raises as `offloaded_stamp`."""
        stamp = self.offloaded_stamp(seq)
        self._offloaded = None
        return StoredStep(self._link, arena, seq=seq, stamp=stamp)

    def end_step(self, step: StoredStep) -> None:
        """Take the version that the step made for the offloaded state."""
        self._offloaded = step.stored

    @property
    def is_torn(self) -> bool:
        """Whether a pull failed midway, so that the arena holds no complete version."""
        return self._puller.is_torn

    def _check_whole(self) -> None:
        if self._puller.is_torn:
            raise StateLostError(
                f"the last pull into rank {self.rank} of {self.deployment!r} failed midway, so "
                "its arena holds no complete version: pull or load again"
            )
