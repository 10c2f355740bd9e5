"""Replicas of published versions on the nodes of their readers (StaleFlow App. A.1).

If the ranks of a node together pull more bytes of a version than it has, the node fetches the
version once, and its ranks read the replica from shared memory. A replica that is fetched while the
ranks do something else may cost `BESIDE_COST_MAX` times their bytes: what they wait for is then
only the copy from shared memory. Otherwise they pull from the sources directly.

Invariants:

- A replica has the stamp (ETag) of the version, and all its bytes: it is stored like a version that
  was published here, read under the same leases, and replaced as the trainer publishes.
- A replica is never the only copy, so it is dropped first when space is short.
"""

import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass

import msgspec

from plexrl.errors import ConnectionLostError, PlexRLError, StateLostError, UnavailableError
from plexrl.statemanager.layout.versions import Manifest, VersionKind
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.protocol.tickets import AGENT, Claims, TicketKey
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.transfer.transport.tcp.client import TcpConnection
from plexrl.statemanager.transfer.transport.tcp.state import ReconnectingReader, open_states

LOG = logging.getLogger(__name__)

TIMEOUT_S = 30.0
"""Timeout of a source's answer."""
BESIDE_COST_MAX = 2.5
"""Bytes of a replica that is fetched beside generations, as a multiple of what the ranks pull: it
has the trainer's dtype, and an engine with half of its precision pulls half of its bytes."""
HINTS_MAX = 64
"""Queued prefetches; further ones are discarded."""

_PUBLISHED = VersionKind.PUBLISHED
_Hint = tuple[str, int, tuple[str, ...], int]
"""Arguments of `prefetch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """The cost of a replica."""

    nbytes: int
    """Bytes that were fetched for the caller; 0: it was here."""
    seconds: float
    """Duration of the fetch, whoever has caused it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """One rank's part of a version at its source."""

    address: str
    manifest: Manifest


class Replicas:
    """Fetches replicas into a store. Thread-safe."""

    def __init__(self, store: Store, network: Network, key: TicketKey, versions_max: int) -> None:
        """`versions_max`: versions of a shard that are kept."""
        self._store = store
        self._network = network
        self._key = key
        self._versions_max = versions_max
        self._whole: dict[str, tuple[int, tuple[str, ...], float]] = {}
        """Source → seq of its newest replica that is complete, the names of its parts, and the
        seconds of its fetch."""
        self._coming: set[tuple[str, int]] = set()
        """Source and seq of what is fetched in the background, or queued."""
        self._missed: dict[str, tuple[int, int]] = {}
        """Source → seq of the latest version that was not fetched in the background, and the bytes
        that the ranks pulled of it then."""
        self._closing = threading.Event()
        self._hints: queue.Queue[_Hint | None] = queue.Queue(HINTS_MAX)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def prefetch(self, source: str, seq: int, addresses: Sequence[str], pulled_bytes: int) -> None:
        """Fetch a replica in the background, as `fetch` does; failures are logged."""
        self._coming.add((source, seq))
        try:
            self._hints.put_nowait((source, seq, tuple(addresses), pulled_bytes))
        except queue.Full:
            self._coming.discard((source, seq))
            self._missed[source] = (seq, pulled_bytes)
            LOG.warning("version %d of %s is not prefetched: too many others are", seq, source)

    def has_arrived(
        self, source: str, seq: int, addresses: Sequence[str], pulled_bytes: int
    ) -> bool:
        """Whether there is nothing to wait for: the replica is here, or there will be none. Begins
        to fetch it in the background, with the arguments of `prefetch`, unless it is fetched."""
        if self._is_whole(source, seq):
            return True
        if (source, seq) in self._coming:
            return False
        missed_seq, bytes_then = self._missed.get(source, (0, 0))
        if missed_seq == seq and pulled_bytes <= bytes_then:
            return True
        self.prefetch(source, seq, addresses, pulled_bytes)
        return (source, seq) not in self._coming

    def close(self) -> None:
        """End the background fetch; what has arrived of a version is kept."""
        self._closing.set()
        with suppress(queue.Full):
            self._hints.put_nowait(None)
        self._thread.join()

    def _run(self) -> None:
        while (hint := self._hints.get()) is not None and not self._closing.is_set():
            source, seq, addresses, pulled_bytes = hint
            found = None
            try:
                found = self.fetch(AGENT, source, seq, addresses, pulled_bytes)
            except (PlexRLError, OSError, msgspec.MsgspecError) as error:
                # Whatever is wrong with one source, the next hints are followed.
                LOG.info("version %d of %s was not prefetched: %s", seq, source, error)
            except Exception:
                # Syncs wait for this thread, so it must not end.
                LOG.exception("version %d of %s was not prefetched", seq, source)
            if found is None:
                self._missed[source] = (seq, pulled_bytes)
            self._coming.discard((source, seq))

    def fetch(
        self, claims: Claims, source: str, seq: int, addresses: Sequence[str], pulled_bytes: int
    ) -> Replica | None:
        """Have a replica of version `seq` of the deployment `source`. None: this node's ranks,
        which pull `pulled_bytes` of it, have no need of one.

        `claims` are those of the reader. `addresses` are the remote ones of all its sources.

        Raises:
            UnavailableError: a source cannot be reached.
            StateLostError: no source has the version.
            StateTierFullError: the host tier has no free space.
            QuotaExceededError: the tenant's quota is too small.
            OperationCancelledError: the deployment was released meanwhile.
        """
        if self._is_whole(source, seq):
            return Replica(nbytes=0, seconds=self._whole[source][2])
        started = time.perf_counter()
        ticket = self._key.mint(claims)
        offered = [
            shard for address in addresses for shard in self._offered(address, ticket, source, seq)
        ]
        if not offered:
            raise StateLostError(
                f"no StateManager of {sorted(addresses)} has version {seq} of {source!r} "
                "published: publish the weights again"
            )
        shards = _distinct(offered)
        nbytes = sum(shard.manifest.nbytes for shard in shards)
        is_beside = (source, seq) in self._coming
        if nbytes > BESIDE_COST_MAX * pulled_bytes or (not is_beside and nbytes >= pulled_bytes):
            return None
        moved = self._fetch_all(shards, ticket)
        names = tuple(shard.manifest.name for shard in shards)
        seconds = time.perf_counter() - started
        self._whole[source] = (seq, names, seconds)
        self._store.mark_expendable(names)
        for shard in shards:
            self._drop_surplus(shard.manifest)
        return Replica(nbytes=moved, seconds=seconds)

    def _is_whole(self, source: str, seq: int) -> bool:
        known_seq, names, _ = self._whole.get(source, (0, (), 0.0))
        if known_seq != seq or not names:
            return False
        held = {found.manifest.name for found in self._store.find(lambda m: m.name in names)}
        return held == set(names)

    def _offered(self, address: str, ticket: bytes, source: str, seq: int) -> list[_Shard]:
        try:
            with closing(TcpConnection(self._network, address, ticket, TIMEOUT_S)) as connection:
                readers = open_states(connection, source, seq, kind=_PUBLISHED)
                return [_Shard(address=address, manifest=reader.manifest) for reader in readers]
        except (ConnectionLostError, OSError) as error:
            raise UnavailableError(
                f"the StateManager at {address} cannot be reached ({error}): see its log",
                statemanager=address,
            ) from error

    def _fetch_all(self, shards: Sequence[_Shard], ticket: bytes) -> int:
        """Fetch the shards that are missing here, from all addresses at once."""
        by_address: dict[str, list[_Shard]] = {}
        for shard in shards:
            by_address.setdefault(shard.address, []).append(shard)

        def fetch(one: Iterable[_Shard]) -> int:
            return sum(self._fetch(shard, ticket) for shard in one)

        with ThreadPoolExecutor(len(by_address), thread_name_prefix="plexrl-replica") as pool:
            return sum(pool.map(fetch, by_address.values()))

    def _fetch(self, shard: _Shard, ticket: bytes) -> int:
        wanted = shard.manifest
        for found in self._store.find(lambda m: m.name == wanted.name):
            if found.manifest.stamp == wanted.stamp:
                return 0
        version = (wanted.deployment, wanted.seq, wanted.rank, wanted.stamp)
        with closing(
            ReconnectingReader(self._network, shard.address, ticket, version, _PUBLISHED)
        ) as reader:
            data = _UntilClosed(reader, self._closing)
            return self._store.receive(reader.manifest, reader.blocks, data)[1]

    def _drop_surplus(self, newest: Manifest) -> None:
        found = self._store.find(lambda m: m.kind == _PUBLISHED and m.shard == newest.shard)
        found.sort(key=lambda version: version.manifest.seq)
        surplus = found[: max(0, len(found) - self._versions_max)]
        self._store.drop(each.manifest.name for each in surplus)


class _UntilClosed:
    """Version data that cannot be read any more while the daemon ends."""

    def __init__(self, reader: ReconnectingReader, closing: threading.Event) -> None:
        self._reader = reader
        self._closing = closing

    def read_data(self, start: int, target: memoryview) -> None:
        if self._closing.is_set():
            raise UnavailableError("this StateManager is ending: try again")
        self._reader.read_data(start, target)


def _distinct(offered: Sequence[_Shard]) -> list[_Shard]:
    """The shards without those whose slices others hold."""
    chosen: list[_Shard] = []
    held: set[object] = set()
    for shard in sorted(offered, key=lambda each: (each.manifest.rank, each.address)):
        boxes = {(piece.key, piece.offset, piece.shape) for piece in shard.manifest.slices}
        if not boxes <= held:
            held |= boxes
            chosen.append(shard)
    return chosen
