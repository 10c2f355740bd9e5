"""What a worker calls: blocking moves of its own state.

When a call returns, the tensors are where it says and safe to use (PlexRL §5.3). A daemon that was
restarted meanwhile is connected to again and told of the arena, and the request is repeated. That
changes nothing twice: every request names its version, and the arena is given back only by the
client and only once it knows that the version is whole.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from plexrl.errors import (
    CorruptStateError,
    InvalidRequestError,
    StateLostError,
)
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.client.host_link import HostLink
from plexrl.statemanager.client.rank_link import RankLink
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.protocol.address import nearest
from plexrl.statemanager.protocol.messages import (
    Adopt,
    Answer,
    BorrowBase,
    Load,
    Prefetch,
    Publish,
    Register,
    Release,
    Request,
    Save,
    StoredShard,
    Usage,
)
from plexrl.statemanager.transfer.delta.delta import DeltaPolicy
from plexrl.statemanager.transfer.pull import KnownLayouts, Puller, PullMode
from plexrl.statemanager.transfer.transport.choice import Transports


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """What a move did."""

    bytes_moved: int
    """0 for a version that was stored already and is unchanged."""
    seconds: float
    tier: str
    """Where the bytes lie now (for a load: lay): `host` or `nvme`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(MoveReport):
    """What a load brought."""

    parts: frozenset[StatePart] = frozenset()
    meta: dict[str, Any] = field(default_factory=dict)
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    """Of what was laid out anew: address, the node's own empty → bytes that came from there. Empty
    for a version of this very layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport(MoveReport):
    """What a pull brought."""

    bytes_wanted: int
    """Of the target's own slices; `bytes_moved` is the same unless a source was lost, or less came
    as a delta."""
    bytes_by_source: dict[str, int]
    attempts: int
    mode: PullMode = PullMode.FULL

    @property
    def fraction(self) -> float:
        """Bytes moved of those wanted."""
        return self.bytes_moved / self.bytes_wanted if self.bytes_wanted else 1.0


class StateManagerClient:
    """One rank's connection to its node's StateManager. Not for use by several threads at once."""

    def __init__(
        self,
        socket_path: str,
        *,
        deployment: str,
        rank: int,
        world_size: int,
        ticket: bytes,
        timeout_s: float = 600.0,
    ) -> None:
        """`ticket` says what this client may ask for. `timeout_s` bounds each call, the wait for a
        restarting daemon included."""
        self.path = socket_path
        self.deployment = deployment
        self.rank = rank
        self._world_size = world_size
        self._ticket = ticket
        self._timeout_s = timeout_s
        self._link = RankLink(socket_path, timeout_s, ticket)
        self._held: tuple[int, str] | None = None
        """Seq and stamp of the stored version that the arena equals while it has that seq."""
        self._wants: tuple[Sequence[StateSlice], Layout] | None = None
        self._layouts = KnownLayouts()
        self._transports = Transports(self._layouts.find, ticket=ticket, timeout_s=timeout_s)
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
        """Have the daemon lend the arena memory; replaces what this rank registered before.

        What was written to a new arena stays. One that was registered before and has been offloaded
        gets memory when it is loaded. `host` holds the slices whose places begin at
        `host_requests.host_start`; from now on it borrows its memory here.

        Raises:
            StaleTokenError: the group's lock has been granted to another since.
            InvalidRequestError: a slice does not lie in the arena.
            DeviceMemoryFullError: others have too much of the device.
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
            host_bytes=0 if host is None else host.nbytes,
        )
        self._link.register(arena, registration, host)
        if host is not None:
            host.lender = HostLink(self._link)

    def attach(self) -> None:
        """Have memory behind the registered arena, if there is none; its contents stay.

        Raises:
            DeviceMemoryFullError: others have too much of the device.
        """
        self._link.attach()

    def borrow_base(
        self, base: WorkerArena, *, content: str, token: int, fill: Callable[[], None]
    ) -> int:
        """Have a base behind `base` until the next offload: memory that arenas with the same
        `content` share, of deployments of this tenant. Where the daemon has none, `fill` writes it,
        once for all; else it can only be read. Returns the bytes that were filled.

        Raises:
            DeviceMemoryFullError: others have too much of the device. What is on the device of
                this rank has been given back, unsaved.
        """
        request = BorrowBase(token=token, content=content, nbytes=base.nbytes)
        try:
            return self._link.borrow_base(base, request, fill)
        except BaseException:
            self._link.give_back()
            self._held = None
            raise

    def offload(
        self,
        *,
        seq: int,
        keep_seq: int,
        token: int,
        parts: frozenset[StatePart],
        meta: Mapping[str, object] | None = None,
        next_use_s: float | None = None,
        previous_seq: int = 0,
    ) -> MoveReport:
        """Store `parts` as version `seq` and give the arena's memory back.

        `next_use_s`: in how many seconds it is likely to be loaded again, if anybody knows.

        Versions other than `seq` and `keep_seq` are dropped once this one is whole; `previous_seq`
        too, but only when room is short. An arena that was loaded from or saved as version `seq`
        is taken to be unchanged: nothing is copied.

        Raises:
            StateTierFullError: no tier has room; the arena is as it was.
            StaleTokenError: the group's lock has been granted to another since.
            UnavailableError: the daemon did not come back in time; the arena is as it was.
        """
        started = time.perf_counter()
        report = self._save(seq, keep_seq, token, parts, meta, next_use_s, previous_seq)
        self._link.give_back()
        self._held = None
        self._puller.forget()
        # Giving pages back takes time too, which the daemon's figure does not know of.
        return replace(report, seconds=time.perf_counter() - started)

    def snapshot(
        self,
        *,
        seq: int,
        keep_seq: int,
        token: int,
        parts: frozenset[StatePart],
        meta: Mapping[str, object] | None = None,
        previous_seq: int = 0,
    ) -> MoveReport:
        """As `offload`, but the arena keeps its contents."""
        return self._save(seq, keep_seq, token, parts, meta, previous_seq=previous_seq)

    def load(
        self,
        *,
        seq: int,
        token: int,
        sources: Sequence[str] = (),
        cast: bool = False,
        previous_seq: int = 0,
    ) -> LoadReport:
        """Bring version `seq` of this shard into the arena; it stays stored as well.

        A version that was saved by ranks of another layout (of data, tensor, pipeline or expert
        parallelism) is brought all the same, each byte once, from what this node and the
        StateManagers at `sources` have of it; `cast` lets elements change their dtype on the way.
        `previous_seq` is kept only while there is room from now on.

        Raises:
            StateLostError: there is no such version, or what is there of it is not whole.
            CorruptStateError: it is damaged; the arena holds nothing.
            DeviceMemoryFullError: others have too much of the device.
            InvalidRequestError: a tensor was saved with another shape or dtype.
            StaleTokenError: the group's lock has been granted to another since.
            UnavailableError: the daemon did not come back in time; the arena's contents are
                undefined.
        """
        self._held = None
        if self._link.host is not None:
            self._link.host.detach()
        try:
            request = Load(
                seq=seq,
                token=token,
                sources=tuple(sources),
                cast=cast,
                previous_seq=previous_seq,
            )
            answer = self._link.borrow(request, keep_contents=False)
        except CorruptStateError:
            self._link.give_back()
            raise
        if answer["stamp"]:
            self._held = (seq, answer["stamp"])
        self._puller.forget()
        return LoadReport(
            bytes_moved=answer["bytes_moved"],
            seconds=answer["seconds"],
            tier=answer["tier"],
            parts=frozenset(StatePart(part) for part in answer["parts"]),
            meta=answer["meta"],
            bytes_by_source=answer["bytes_by_source"],
        )

    def publish(self, *, seq: int, token: int) -> MoveReport:
        """Put this shard's parameters and buffers where other deployments can pull them.

        Raises:
            StateTierFullError: no tier has room.
            StaleTokenError: the group's lock has been granted to another since.
        """
        self._check_whole()
        self._link.attach()
        return msgspec.convert(self._call(Publish(seq=seq, token=token)), MoveReport)

    def pull(
        self,
        *,
        sources: Sequence[str],
        source: str,
        seq: int,
        wants: Sequence[StateSlice],
        delta: DeltaPolicy | None = None,
    ) -> PullReport:
        """Fill the wanted slices of the registered arena from a published version.

        Every byte that is wanted is brought once, and no other; a slice that is wanted in another
        dtype is cast on the way. `sources` are the StateManagers that hold shards of it: paths of
        sockets on this machine, `tcp://host:port` or `nixl://host:port` elsewhere. The version
        stays where it is for as long as this takes. A pull that fails after it began leaves the
        wanted slices with bytes of no version: nothing can be saved or published until a pull or
        load succeeds.

        With `delta`, and where the last pull was of the same source into the same slices and
        nobody has written to them since, only blocks that differ are brought.

        Raises:
            StateLostError: the shards do not cover a wanted slice, or the version is gone.
            InvalidRequestError: a tensor has another shape there, or a dtype that no rule casts.
            UnavailableError: a source that is needed cannot be reached.
        """
        arena = self._link.arena
        if not isinstance(arena, Arena):
            raise InvalidRequestError("register an arena of this CPU node before pulling into it")
        self._link.attach()
        started = time.perf_counter()
        self._held = None
        if self._wants is None or self._wants[0] is not wants:
            self._wants = wants, Layout.of(wants)
        target = np.frombuffer(arena.buffer, dtype=np.uint8)
        sources = [nearest(address) for address in sources]
        try:
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
        )

    def forget_pulled(self) -> None:
        """The arena's weights were written by others: the next pull brings all bytes."""
        self._puller.forget_bases()

    def usage(self) -> dict[str, Any]:
        """The node's tiers, versions and arenas, and its first device, in bytes."""
        return self._call(Usage())

    def release(self, deployment: str) -> None:
        """Drop every version and registration of a deployment."""
        self._call(Release(deployment=deployment))

    def adopt(self, shard: StoredShard, fds: Sequence[int]) -> MoveReport:
        """Have the daemon take in another one's version from its files. For the node agent.

        Raises:
            StateTierFullError: no tier has room.
            CorruptStateError: the bytes are not those of the manifest's digest.
            PermissionDeniedError: this client has registered an arena.
        """
        request = Adopt(manifest=shard.manifest, regions=shard.regions)
        return msgspec.convert(self._call(request, fds), MoveReport)

    def prefetch(self, deployment: str, seq: int, next_use_s: float | None = None) -> None:
        """Hint that version `seq` will be loaded soon, in `next_use_s` seconds if that is known;
        returns at once."""
        self._call(Prefetch(deployment=deployment, seq=seq, next_use_s=next_use_s))

    def request(self, request: Request, fds: Sequence[int] = ()) -> Answer:
        """The answer to a request that has no method of its own here.

        Raises:
            PlexRLError: the daemon refused it.
            UnavailableError: the daemon did not come back in time.
        """
        return self._call(request, fds)

    def close(self) -> None:
        """End the connection; the daemon forgets the arena, not the versions."""
        self._transports.close()
        self._link.close()

    def stamp(self, seq: int) -> str | None:
        """Of the stored version `seq`, where the arena is known to equal it."""
        return self._held[1] if self._held is not None and self._held[0] == seq else None

    @property
    def is_torn(self) -> bool:
        """A pull was cut, so the arena is of no version."""
        return self._puller.is_torn

    def _check_whole(self) -> None:
        if self._puller.is_torn:
            raise StateLostError(
                f"the last pull into rank {self.rank} of {self.deployment!r} was cut, so its "
                "arena is of no version: pull or load again"
            )

    def _save(
        self,
        seq: int,
        keep_seq: int,
        token: int,
        parts: frozenset[StatePart],
        meta: Mapping[str, object] | None,
        next_use_s: float | None = None,
        previous_seq: int = 0,
    ) -> MoveReport:
        self._check_whole()
        self._link.attach()
        if self._link.host is not None:
            self._link.host.give_up()
        same_as = self.stamp(seq)
        answer = self._call(
            Save(
                seq=seq,
                keep_seq=keep_seq,
                token=token,
                parts=tuple(sorted(parts)),
                meta_json=msgspec.json.encode(dict(meta or {}), order="sorted").decode(),
                same_as=same_as,
                next_use_s=next_use_s,
                previous_seq=previous_seq,
            )
        )
        self._held = (seq, answer["stamp"])
        return MoveReport(
            bytes_moved=answer["bytes_moved"], seconds=answer["seconds"], tier=answer["tier"]
        )

    def _call(self, request: Request, fds: Sequence[int] = ()) -> Answer:
        """As `RankLink.call`."""
        return self._link.call(request, fds)
