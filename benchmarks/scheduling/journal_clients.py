"""Clients of a scheduler on its socket, in a process of their own; they also end its operations.

    python -m benchmarks.scheduling.journal_clients SOCKET CLIENTS OPERATIONS

Each client has a connection, as a router has, and one deployment. In a closed loop it submits an
operation, and the next one when that is finished. A run is reported finished as soon as it arrives.
Prints one JSON object: seconds, and seconds from each submission to its acceptance.
"""

import asyncio
import itertools
import json
import sys
import time
from typing import Any

from plexrl.wire.rpc import Peer

Plain = dict[str, Any]
TENANT: Plain = {"tenant": "t"}
PARAMS = {"type": "ForwardBackwardParams", "loss": {"name": "grpo"}}
WAIT_S = 60.0


class Client:
    """One connection and its deployment."""

    def __init__(self, number: int) -> None:
        self._job = f"j{number}"
        self._deployment = f"{self._job}/actor"
        self._router = f"r{number}"
        self._peer: Peer | None = None
        self._told: set[asyncio.Task[Any]] = set()
        self.accepted_s: list[float] = []

    async def connect(self, scheduler: str) -> None:
        """Say hello as a router, and make the deployment."""
        ignored = dict.fromkeys(("discard", "abort", "workers_gone", "live_workers"), _ignore)
        handlers = {**ignored, "run": self._run}
        self._peer = Peer(*await asyncio.open_unix_connection(scheduler), handlers)
        self._told.add(asyncio.create_task(self._peer.run()))
        await self._peer.call("hello", {"role": "router", "router": self._router})

    async def create(self) -> None:
        """Make the deployment."""
        times = {"controller_timeout_s": 1e9, "reattach_timeout_s": 1e9}
        await self._call("submit_job", job=self._job, name="job", **times)
        await self._call(
            "create_deployment",
            deployment=self._deployment,
            job=self._job,
            kind="train",
            workers=1,
            state_bytes=1,
            exclusive=True,
            spec_json="{}",
        )
        await self.operate("ready", "barrier")
        self.accepted_s.clear()

    async def operate(self, number: int | str, kind: str = "forward_backward") -> None:
        """One operation, until it is finished."""
        operation = f"{self._job}:{number}"
        began_at = time.perf_counter()
        await self._call(
            "submit_operation",
            operation=operation,
            deployment=self._deployment,
            kind=kind,
            params=None if kind == "barrier" else PARAMS,
            tokens=4096,
        )
        self.accepted_s.append(time.perf_counter() - began_at)
        view = await self._call("wait_operation", operation=operation, timeout_s=WAIT_S)
        assert view["state"] == "finished", f"{operation} is {view['state']}"

    async def tenant(self) -> None:
        """Make the tenant."""
        claim: Plain = {"tenant": None, "as_operator": True}
        assert self._peer is not None
        await self._peer.call("create_tenant", {**claim, "name": "t", "key_digest": "0" * 64})

    async def _call(self, method: str, **fields: Any) -> Plain:
        assert self._peer is not None
        return await self._peer.call(method, {**TENANT, **fields}, timeout_s=2 * WAIT_S)

    async def _run(self, peer: Peer, params: Plain) -> None:
        command = params["command"]
        done = {
            "operation": command["operation"],
            "token": command["token"],
            "compute_s": 0.0,
            "result_json": '{"tokens":1.0,"loss":0.0}',
        }
        task = asyncio.create_task(peer.call("operation_finished", done))
        self._told.add(task)
        task.add_done_callback(self._told.discard)


async def _ignore(_: Peer, __: Plain) -> None:
    return None


async def work(scheduler: str, count: int, operations: int) -> Plain:
    """Run the load."""
    clients = [Client(number) for number in range(count)]
    for client in clients:
        await client.connect(scheduler)
    await clients[0].tenant()
    for client in clients:
        await client.create()
    numbers = itertools.count()
    began_at = time.perf_counter()

    async def loop(client: Client) -> None:
        while (number := next(numbers)) < operations:
            await client.operate(number)

    await asyncio.gather(*(loop(client) for client in clients))
    seconds = time.perf_counter() - began_at
    return {"seconds": seconds, "accepted_s": [s for each in clients for s in each.accepted_s]}


if __name__ == "__main__":
    found = asyncio.run(work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    sys.stdout.write(json.dumps(found) + "\n")
