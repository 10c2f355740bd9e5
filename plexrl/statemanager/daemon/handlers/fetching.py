"""Versions that this daemon fetches from another node's."""

import time
from collections.abc import Sequence
from contextlib import closing

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.daemon.handlers.caller import AGENTS, Caller, Reply, handles, move_report
from plexrl.statemanager.daemon.handlers.sharing import check_adoptable
from plexrl.statemanager.protocol.address import host_and_port
from plexrl.statemanager.protocol.messages import Fetch
from plexrl.statemanager.protocol.tickets import AGENT
from plexrl.statemanager.transfer.transport.tcp.state_blocks import RemoteBlocks


def _fetch(caller: Caller, request: Fetch, _: Sequence[int]) -> Reply:
    started = time.perf_counter()
    address = host_and_port(request.source)
    if address is None:
        raise InvalidRequestError(
            f"a version is fetched from tcp://host:port, not {request.source}"
        )
    store = caller.services.store
    for stored in store.find(
        lambda m: (
            (m.deployment, m.seq, m.rank, m.stamp)
            == (request.deployment, request.seq, request.rank, request.stamp)
        )
    ):
        return Reply(move_report(0, time.perf_counter() - started, stored.tier))
    ticket = caller.services.key.mint(AGENT)
    wanted = (request.deployment, request.seq, request.rank, request.stamp)
    with closing(RemoteBlocks(address, ticket, *wanted)) as blocks:
        manifest = blocks.shard.manifest
        check_adoptable(manifest)
        if (manifest.deployment, manifest.seq, manifest.rank) != wanted[:3]:
            raise InvalidRequestError(f"{request.source} answered with {manifest.description}")
        version, moved = store.receive(manifest, blocks.shard.blocks, blocks.fetch, blocks)
    return Reply(move_report(moved, time.perf_counter() - started, version.tier))


ENTRIES = (handles(Fetch, _fetch, AGENTS, is_move=True),)
