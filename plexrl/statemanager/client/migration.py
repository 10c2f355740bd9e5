"""Migration of an idle deployment's version to another node's StateManager, rank by rank.

The sources keep the version until they are released. Each rank arrives completely or not at all, so
a migration that was interrupted is repeated: ranks that have arrived are recognised by their stamp.

Invariants:

- A rank's version comes from the first source that has it. If no source has it any more, it may be
  at the target: the sources were released, and the command was repeated.
- On one machine, the daemons pass descriptors. Between machines the target fetches over TCP and can
  resume an interrupted rank (`plexrl.statemanager.store.receiving.receive`).
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import msgspec

from plexrl.errors import StateLostError, UnavailableError
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.client.reports import MoveReport
from plexrl.statemanager.layout.versions import Manifest, VersionKind
from plexrl.statemanager.protocol.address import is_remote, nearest
from plexrl.statemanager.protocol.channel import Channel, close_all
from plexrl.statemanager.protocol.connection import connect, exchange, retry_connect
from plexrl.statemanager.protocol.messages import Answer, Fetch, OpenState, StoredShard
from plexrl.statemanager.protocol.network import NO_NETWORK, Network
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.transfer.transport.tcp.client import TcpConnection
from plexrl.statemanager.transfer.transport.tcp.state import open_states

SOURCE_TIMEOUT_S = 10.0
"""Timeout of an unreachable source; the others may hold every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A rank's version at its present StateManager."""

    address: str
    """Address of the StateManager: its socket path, or a remote address."""
    stamp: str
    tier: TierName | None
    """Absent: another node does not report it."""
    world_size: int


def migrate(
    sources: Sequence[str],
    target: str,
    *,
    deployment: str,
    seq: int,
    ticket: bytes,
    network: Network = NO_NETWORK,
    ranks: Collection[int] | None = None,
    timeout_s: float = 600.0,
) -> MoveReport:
    """Migrate version `seq` of a deployment from the StateManagers at `sources` to the one at
    `target`, which is on this machine.

    `ticket` is an agent's, valid at all of them; `network` leads to those of other nodes. `ranks`
    absent: all ranks. `timeout_s` bounds each request, including a restart of the target.

    Raises:
        StateLostError: a rank's version was not found.
        StateTierFullError: the target has no free space; ranks that have arrived stay there.
        CorruptStateError: a source's version is damaged.
        UnavailableError: the target, or a source that may hold a missing rank, cannot be reached.
    """
    started = time.perf_counter()
    at_target = _held(target, deployment, seq, timeout_s, ticket)
    found, unreachable = _found(
        network, sources, deployment, seq, min(timeout_s, SOURCE_TIMEOUT_S), ticket
    )
    by_rank = {**at_target, **found}
    wanted = set(ranks) if ranks is not None else _all_ranks(found or at_target)
    missing = sorted(wanted - set(by_rank))
    if missing or not by_rank:
        what = f"version {seq} of {deployment!r}" + (f" rank {missing[0]}" if missing else "")
        if unreachable is not None:
            raise unreachable
        raise StateLostError(
            f"{what} is on no StateManager of {sorted({*sources, target})}: restore a checkpoint",
            deployment=deployment,
            seq=seq,
        )
    moved = 0
    tiers = set()
    for rank in sorted(wanted):
        if rank not in found or (rank in at_target and at_target[rank].stamp == found[rank].stamp):
            tiers.add(at_target[rank].tier)
            continue
        held = found[rank]
        if is_remote(held.address):
            request = Fetch(
                source=held.address, deployment=deployment, seq=seq, rank=rank, stamp=held.stamp
            )
            with closing(_client(target, timeout_s, ticket)) as client:
                report = msgspec.convert(client.request(request), MoveReport)
        else:
            opened = OpenState(deployment=deployment, seq=seq, rank=rank)
            report = _move(held.address, target, opened, timeout_s, ticket)
        moved += report.bytes_moved
        tiers.add(TierName(report.tier))
    return MoveReport(
        bytes_moved=moved,
        seconds=time.perf_counter() - started,
        tier=(TierName.NVME if TierName.NVME in tiers else TierName.HOST).value,
    )


def _move(
    source: str, target: str, request: OpenState, timeout_s: float, ticket: bytes
) -> MoveReport:
    """Have the target adopt a version while the source holds it open."""
    opened = retry_connect(
        source, timeout_s, partial(_open_state, source, timeout_s, ticket, request)
    )
    connection, shard, fds = opened
    with connection, closing(_client(target, timeout_s, ticket)) as client:
        try:
            return client.adopt(shard, fds)
        finally:
            close_all(fds)


def _open_state(
    path: str, timeout_s: float, ticket: bytes, request: OpenState
) -> tuple[Channel, StoredShard, list[int]]:
    """One rank's version, its descriptors, and the connection that holds it open."""
    connection = connect(path, timeout_s, ticket)
    try:
        answer, fds = exchange(connection, request)
    except BaseException:
        connection.close()
        raise
    [shard] = msgspec.convert(answer["shards"], tuple[StoredShard, ...])
    return connection, shard, fds


def _found(
    network: Network,
    sources: Sequence[str],
    deployment: str,
    seq: int,
    timeout_s: float,
    ticket: bytes,
) -> tuple[dict[int, _Held], UnavailableError | None]:
    """Every rank's version at the first source that has it, and the error of a skipped source."""
    found: dict[int, _Held] = {}
    unreachable = None
    for address in dict.fromkeys(nearest(source) for source in sources):
        try:
            if is_remote(address):
                held = _held_elsewhere(network, address, deployment, seq, timeout_s, ticket)
            else:
                held = _held(address, deployment, seq, timeout_s, ticket)
        except UnavailableError as error:
            unreachable = error
            continue
        found = {**held, **found}
    return found, unreachable


def _held(
    path: str, deployment: str, seq: int, timeout_s: float, ticket: bytes
) -> dict[int, _Held]:
    """The version at a StateManager of this machine, by rank; the later of two saves."""
    with closing(_client(path, timeout_s, ticket)) as client:
        versions: list[Answer] = (
            client.usage()["deployments"].get(deployment, {}).get("versions", [])
        )
    return {
        version["rank"]: _Held(
            address=path,
            stamp=version["stamp"],
            tier=TierName(version["tier"]),
            world_size=version["world_size"],
        )
        for version in sorted(versions, key=lambda version: version["token"])
        if version["kind"] == VersionKind.STATE and version["seq"] == seq
    }


def _held_elsewhere(
    network: Network, address: str, deployment: str, seq: int, timeout_s: float, ticket: bytes
) -> dict[int, _Held]:
    """As `_held`, of a StateManager of another machine."""

    def ask() -> list[Manifest]:
        with closing(TcpConnection(network, address, ticket, timeout_s)) as connection:
            return [reader.manifest for reader in open_states(connection, deployment, seq)]

    manifests = retry_connect(address, timeout_s, ask)
    return {
        manifest.rank: _Held(
            address=address, stamp=manifest.stamp, tier=None, world_size=manifest.world_size
        )
        for manifest in sorted(manifests, key=lambda manifest: manifest.token)
    }


def _all_ranks(by_rank: Mapping[int, _Held]) -> set[int]:
    return {rank for held in by_rank.values() for rank in range(held.world_size)}


def _client(path: str, timeout_s: float, ticket: bytes) -> StateManagerClient:
    return StateManagerClient(
        path, deployment="", rank=0, world_size=1, ticket=ticket, timeout_s=timeout_s
    )
