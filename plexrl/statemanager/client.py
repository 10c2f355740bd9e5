"""What a worker calls: blocking moves of its own state.

When a call returns, the tensors are where it says and safe to use (PlexRL §5.3). A daemon that was
restarted meanwhile is connected to again and told of the arena, and the request is repeated. That
changes nothing twice: every request names its version, and the arena is given back only by the
client and only once it knows that the version is whole.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from plexrl.errors import (
    ConnectionLostError,
    CorruptStateError,
    InvalidRequestError,
    StateLostError,
    UnavailableError,
)
from plexrl.statemanager.arena import Arena
from plexrl.statemanager.boxes import plan_pull
from plexrl.statemanager.channel import Channel, close_all
from plexrl.statemanager.connection import connect, exchange, until_reached
from plexrl.statemanager.copy import Bytes, copy_box
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.keys import StatePart, StateSlice
from plexrl.statemanager.mapping import JoinedRegions
from plexrl.statemanager.protocol import (
    Adopt,
    Answer,
    Confirm,
    Load,
    OpenPublished,
    Ping,
    Prefetch,
    Publish,
    PublishedShard,
    Register,
    Release,
    Request,
    Save,
    StoredShard,
    Usage,
    regions_of,
)
from plexrl.statemanager.rank_link import RankLink

_PING = Ping()
_FENCED = (Save, Load, Publish)
"""Requests that say under which grant they are made."""

_Shard = tuple[tuple[StateSlice, ...], Bytes]
"""A published shard's slices, and the mapped data that they lie in."""


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
        self._path = socket_path
        self._deployment = deployment
        self._rank = rank
        self._world_size = world_size
        self._ticket = ticket
        self._timeout_s = timeout_s
        self._link = RankLink(socket_path, timeout_s, ticket)
        self._held: tuple[int, str] | None = None
        """Seq and stamp of the stored version that the arena equals while it has that seq."""

    def register(
        self, arena: WorkerArena, slices: Sequence[StateSlice], *, group: str, token: int
    ) -> None:
        """Have the daemon lend the arena memory; replaces what this rank registered before.

        What was written to a new arena stays. One that was registered before and has been offloaded
        gets memory when it is loaded.

        Raises:
            StaleTokenError: the group's lock has been granted to another since.
            InvalidRequestError: a slice does not lie in the arena.
            DeviceMemoryFullError: others have too much of the device.
        """
        self._held = None
        registration = Register(
            deployment=self._deployment,
            rank=self._rank,
            world_size=self._world_size,
            group=group,
            token=token,
            slices=tuple(slices),
            arena_bytes=arena.nbytes,
            kind=arena.kind,
            device=arena.device,
        )
        self._link.register(arena, registration)

    def offload(
        self,
        *,
        seq: int,
        keep_seq: int,
        token: int,
        parts: frozenset[StatePart],
        meta: Mapping[str, object] | None = None,
    ) -> MoveReport:
        """Store `parts` as version `seq` and give the arena's memory back.

        Versions other than `seq` and `keep_seq` are dropped once this one is whole. An arena that
        was loaded from or saved as version `seq` is taken to be unchanged: nothing is copied.

        Raises:
            StateTierFullError: no tier has room; the arena is as it was.
            StaleTokenError: the group's lock has been granted to another since.
            UnavailableError: the daemon did not come back in time; the arena is as it was.
        """
        started = time.perf_counter()
        report = self._save(seq, keep_seq, token, parts, meta)
        self._link.give_back()
        self._held = None
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
    ) -> MoveReport:
        """As `offload`, but the arena keeps its contents."""
        return self._save(seq, keep_seq, token, parts, meta)

    def load(self, *, seq: int, token: int) -> LoadReport:
        """Bring version `seq` of this shard into the arena; it stays stored as well.

        Raises:
            StateLostError: there is no such version.
            CorruptStateError: it is damaged; the arena holds nothing.
            DeviceMemoryFullError: others have too much of the device.
            InvalidRequestError: it was taken from an arena of another layout.
            StaleTokenError: the group's lock has been granted to another since.
            UnavailableError: the daemon did not come back in time; the arena's contents are
                undefined.
        """
        self._held = None
        try:
            answer = self._link.borrow(Load(seq=seq, token=token), keep_contents=False)
        except CorruptStateError:
            self._link.give_back()
            raise
        self._held = (seq, answer["stamp"])
        return LoadReport(
            bytes_moved=answer["bytes_moved"],
            seconds=answer["seconds"],
            tier=answer["tier"],
            parts=frozenset(StatePart(part) for part in answer["parts"]),
            meta=answer["meta"],
        )

    def publish(self, *, seq: int, token: int) -> MoveReport:
        """Put this shard's parameters and buffers where other deployments can pull them.

        Raises:
            StateTierFullError: no tier has room.
            StaleTokenError: the group's lock has been granted to another since.
        """
        self._link.attach()
        return msgspec.convert(self._call(Publish(seq=seq, token=token)), MoveReport)

    def pull(
        self, *, sources: Sequence[str], source: str, seq: int, wants: Sequence[StateSlice]
    ) -> MoveReport:
        """Fill the wanted slices of the registered arena from a published version.

        Every byte that is wanted is copied once, and no other. `sources` are the sockets of the
        StateManagers that hold shards of it; the version stays where it is for as long as this
        takes.

        Raises:
            StateLostError: the shards do not cover a wanted slice, or the version is gone.
            UnavailableError: a source cannot be reached.
        """
        arena = self._link.arena
        if not isinstance(arena, Arena):
            raise InvalidRequestError("register an arena of this CPU node before pulling into it")
        self._link.attach()
        started = time.perf_counter()
        self._held = None
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                moved = self._pull(
                    sources, OpenPublished(source=source, seq=seq), wants, arena.buffer
                )
                break
            except (ConnectionLostError, OSError) as error:
                # A source went while its bytes were read: nobody knows what was read.
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"the sources of version {seq} of {source!r} do not last ({error})"
                    ) from error
        return MoveReport(bytes_moved=moved, seconds=time.perf_counter() - started, tier="host")

    def ping(self) -> None:
        """One round trip: returns once the daemon has answered."""
        self._call(_PING)

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

    def prefetch(self, deployment: str, seq: int) -> None:
        """Hint that version `seq` will be loaded soon; returns at once."""
        self._call(Prefetch(deployment=deployment, seq=seq))

    def close(self) -> None:
        """End the connection; the daemon forgets the arena, not the versions."""
        self._link.close()

    def _pull(
        self,
        sources: Sequence[str],
        request: OpenPublished,
        wants: Sequence[StateSlice],
        arena: memoryview,
    ) -> int:
        """One attempt; returns the bytes that were copied."""
        with ExitStack() as opened:
            connections: list[Channel] = []
            shards: list[_Shard] = []
            for path in dict.fromkeys(sources):
                open_source = partial(
                    _open_published, path, self._timeout_s, self._ticket, request, opened
                )
                connection, held = until_reached(path, self._timeout_s, open_source)
                connections.append(connection)
                shards += held
            if not shards:
                raise StateLostError(
                    f"no StateManager of {sorted(set(sources))} has version {request.seq} of "
                    f"{request.source!r} published: publish the weights again"
                )
            transfers = plan_pull(wants, [slices for slices, _ in shards])
            target = np.frombuffer(arena, dtype=np.uint8)
            for transfer in transfers:
                copy_box(transfer, shards[transfer.shard][1], target)
            for connection in connections:
                exchange(connection, Confirm())
        return sum(transfer.nbytes for transfer in transfers)

    def _save(
        self,
        seq: int,
        keep_seq: int,
        token: int,
        parts: frozenset[StatePart],
        meta: Mapping[str, object] | None,
    ) -> MoveReport:
        self._link.attach()
        same_as = self._held[1] if self._held is not None and self._held[0] == seq else None
        answer = self._call(
            Save(
                seq=seq,
                keep_seq=keep_seq,
                token=token,
                parts=tuple(sorted(parts)),
                meta_json=msgspec.json.encode(dict(meta or {}), order="sorted").decode(),
                same_as=same_as,
            )
        )
        self._held = (seq, answer["stamp"])
        return MoveReport(
            bytes_moved=answer["bytes_moved"], seconds=answer["seconds"], tier=answer["tier"]
        )

    def _call(self, request: Request, fds: Sequence[int] = ()) -> Answer:
        """As `RankLink.call`."""
        return self._link.call(request, fds)


def _open_published(
    path: str, timeout_s: float, ticket: bytes, request: OpenPublished, opened: ExitStack
) -> tuple[Channel, list[_Shard]]:
    """The shards that the StateManager at `path` has, mapped, and the connection that keeps them
    in place; `opened` closes it, and unmaps them."""
    connection = opened.enter_context(connect(path, timeout_s, ticket))
    answer, fds = exchange(connection, request)
    try:
        held: list[_Shard] = []
        for shard in msgspec.convert(answer["shards"], tuple[PublishedShard, ...]):
            mapped = JoinedRegions(regions_of(shard.regions, fds), shard.nbytes)
            opened.callback(mapped.close)
            held.append((shard.slices, np.frombuffer(mapped.view, dtype=np.uint8)))
        return connection, held
    finally:
        close_all(fds)
