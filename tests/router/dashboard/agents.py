"""Agents of a fleet's nodes, and routers that carry nothing out: real connections to a scheduler.

Workers are said to run. What is in flight stays so, because nearly all of it is sent to the silent
routers.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from plexrl.scheduler.core.core import SchedulerCore
from plexrl.wire.links.address import parse_address
from plexrl.wire.links.credentials import Role
from plexrl.wire.links.dial import connect
from plexrl.wire.rpc import Peer
from tests.scheduler.live_service import Plain

AGENT_CALLS = ("launch", "stop", "release_state", "prefetch_state", "migrate")
ROUTER_CALLS = ("run", "abort", "discard", "forget_callers", "workers_gone")
ROUTERS = 63


def greetings(core: SchedulerCore) -> list[Plain]:
    """What routers and agents say to a scheduler that has restarted."""
    routers = [{"role": "router", "router": f"quiet{index}"} for index in range(ROUTERS)]
    return [*routers, *_agents(core)]


def _agents(core: SchedulerCore) -> list[Plain]:
    workers: dict[str, list[Plain]] = {name: [] for name in core.cluster.state.nodes}
    for deployment in core.cluster.state.deployments.values():
        for rank in deployment.placement.ranks if deployment.wpg.is_ready else ():
            seen = {
                "deployment": deployment.deployment,
                "rank": rank.rank,
                "incarnation": deployment.wpg.processes.incarnation,
                "address": deployment.wpg.processes.addresses[rank.rank],
            }
            workers[rank.node].append(seen)
    return [
        {
            "role": "agent",
            "node": node.node,
            "gpus": node.gpus,
            "gpu_memory_bytes": node.gpu_memory_bytes,
            "host_memory_bytes": node.host_memory_bytes,
            "statemanager": node.statemanager,
            "node_type": node.node_type,
            "block": node.block,
            "workers": workers[node.node],
            "states": [],
        }
        for node in core.cluster.state.nodes.values()
    ]


@contextmanager
def connected(address: str, wanted: list[Plain]) -> Iterator[None]:
    """One connection for each greeting, until the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    peers: list[Peer] = []
    tasks: list[asyncio.Task[None]] = []

    async def join() -> None:
        for greeting in wanted:
            link = await connect(parse_address(address), None, role=Role.SCHEDULER)
            peer = Peer(
                link.reader, link.writer, dict.fromkeys(AGENT_CALLS + ROUTER_CALLS, _nothing)
            )
            peers.append(peer)
            tasks.append(asyncio.create_task(peer.run()))
            await peer.call("hello", greeting)

    async def leave() -> None:
        for peer in peers:
            peer.close()
        await asyncio.gather(*tasks)

    try:
        asyncio.run_coroutine_threadsafe(join(), loop).result()
        yield
    finally:
        asyncio.run_coroutine_threadsafe(leave(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _nothing(_: Peer, __: Plain) -> Plain:
    return {}
