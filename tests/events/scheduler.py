"""A scheduler process that publishes to a broker, with a router and agents that do its work."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from plexrl.wire.rpc import Peer
from tests.scheduler.live_service import deployment_of, greeting, job_of
from tests.scheduler.scheduler_process import SchedulerProcess

Plain = dict[str, Any]
A: Plain = {"tenant": "a"}


@contextmanager
def scheduler(
    folder: Path,
    url: str,
    name: str = "s",
    *,
    waits: bool = True,
    lease_s: float = 1.0,
    **events: object,
) -> Iterator[SchedulerProcess]:
    """A scheduler that publishes at `url`; `events` are more fields of the broker's config."""
    started = SchedulerProcess(
        folder,
        name,
        str(folder / "journal.sqlite"),
        lease_s=lease_s,
        node_grace_s=0.2,
        policy="pack",
        tenants=[["a", "digest-a"], ["b", "digest-b"]],
        events={"url": url, **events},
    )
    try:
        if waits:
            started.wait_ready()
        yield started
    finally:
        started.close()


class Workers:
    """A router and the agents of some nodes: workers are ready at once, runs end at once."""

    def __init__(self, router: Peer) -> None:
        self.router = router
        self.agents: dict[str, Peer] = {}
        self._listen = ""

    async def submit(self, job: str, *, tenant: str = "a", state_bytes: int = 1000) -> None:
        """A job with one deployment `actor` of one worker."""
        await self.router.call("submit_job", job_of(tenant, job))
        deployment = deployment_of({"tenant": tenant}, job, state_bytes=state_bytes)
        await self.router.call("create_deployment", deployment)

    async def barrier(
        self, job: str, operation: str, *, tenant: str = "a", kind: str = "barrier"
    ) -> Plain:
        """Run an operation of the job's deployment to its end."""
        params = {
            "tenant": tenant,
            "operation": operation,
            "deployment": f"{job}/actor",
            "kind": kind,
        }
        await self.router.call("submit_operation", params)
        wait = {"tenant": tenant, "operation": operation, "timeout_s": 60.0}
        return await self.router.call("wait_operation", wait)

    async def finish(self, job: str, *, tenant: str = "a") -> None:
        """Complete a job."""
        done = {"tenant": tenant, "job": job, "outcome": "completed"}
        await self.router.call("finish_job", done)

    async def leave(self, node: str) -> None:
        """End the connection of a node's agent."""
        self.agents.pop(node).close()


@asynccontextmanager
async def workers(listen: str, *nodes: str, gpus: int = 2) -> AsyncIterator[Workers]:
    """Connect a router and the agents of `nodes`."""
    tasks: list[asyncio.Task[None]] = []

    async def connect(hello: Plain, handlers: Any) -> Peer:
        peer = Peer(*await asyncio.open_unix_connection(listen), handlers)
        tasks.append(asyncio.create_task(peer.run()))
        await peer.call("hello", hello)
        return peer

    async def run(peer: Peer, params: Plain) -> None:
        command = params["command"]
        report = {"operation": command["operation"], "token": command["token"], "compute_s": 0.1}
        tasks.append(asyncio.create_task(_call(peer, "operation_finished", report)))

    async def launch(peer: Peer, params: Plain) -> Plain:
        command = params["command"]
        for rank in command["ranks"]:
            ready = {
                "deployment": command["deployment"],
                "rank": rank["rank"],
                "incarnation": command["incarnation"],
                "address": f"worker-{rank['rank']}",
            }
            tasks.append(asyncio.create_task(_call(peer, "worker_ready", ready)))
        return {}

    handlers = {"run": run, "abort": _nothing, "discard": _nothing, "forget_callers": _nothing}
    found = Workers(await connect({"role": "router", "router": "r"}, handlers))
    own = dict.fromkeys(("stop", "release_state", "prefetch_state"), _nothing)
    for node in nodes:
        found.agents[node] = await connect(
            greeting(node, gpus=gpus, nvme_bytes=8 << 30), {**own, "launch": launch}
        )
    try:
        yield found
    finally:
        for peer in (found.router, *found.agents.values()):
            peer.close()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _call(peer: Peer, method: str, params: Plain) -> None:
    await peer.call(method, params)


async def _nothing(_: Peer, __: Plain) -> Plain:
    return {}
