"""A real scheduler service on a real Unix socket, in the test's own loop, whose clock can jump."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.service.journal.history.writer import history_writer
from plexrl.scheduler.service.journal.recovery import restore
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from plexrl.scheduler.service.service import Service
from plexrl.scheduler.service.shell import Clock, Shell
from plexrl.scheduler.state.messages.events import TimerFired
from plexrl.wire.links.address import TlsAddress, parse_address
from plexrl.wire.links.credentials import Credentials, Role
from plexrl.wire.links.dial import connect
from plexrl.wire.rpc import Handler, Peer

Plain = dict[str, Any]
OPERATOR: Plain = {"tenant": None, "as_operator": True}
GRACE_S = 1000.0


def digest(key: str) -> str:
    """What the scheduler knows of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


class JumpingLoop(asyncio.SelectorEventLoop):
    """Sockets and threads are real; time also passes when the test says so."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def run_live(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `test` in a loop whose time `pass_time` can move."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(test())


def pass_time(seconds: float) -> None:
    """Make every timer due that would be in `seconds`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)
    loop.ahead_s += seconds


async def until(is_true: Callable[[], bool]) -> None:
    """Let the loop run until `is_true`; the runner's time limit is the deadline."""
    while True:
        if is_true():
            return
        await asyncio.sleep(0)


class Live:
    """A service and the clients that this test has made."""

    def __init__(self, service: Service, config: SchedulerConfig) -> None:
        self.service = service
        self._config = config
        self._running: list[tuple[Peer, asyncio.Task[None]]] = []

    @property
    def tls_address(self) -> TlsAddress:
        """The address for other machines."""
        found = map(parse_address, self.service.listeners.addresses)
        return next(each for each in found if isinstance(each, TlsAddress))

    async def connect(
        self,
        handlers: Mapping[str, Handler] | None = None,
        credentials: Credentials | None = None,
    ) -> Peer:
        """A connection that has not said hello; with credentials, from another machine."""
        address = self.tls_address if credentials else parse_address(self._config.listen[0])
        link = await connect(address, credentials, role=Role.SCHEDULER)
        peer = Peer(link.reader, link.writer, handlers or {})
        self._running.append((peer, asyncio.create_task(peer.run())))
        return peer

    async def router(
        self,
        name: str = "router",
        handlers: Mapping[str, Handler] | None = None,
        credentials: Credentials | None = None,
    ) -> Peer:
        """A connection that said hello as a router."""
        methods = ("run", "abort", "discard", "forget_callers", "workers_gone", "live_workers")
        quiet = dict.fromkeys(methods, _nothing)
        peer = await self.connect({**quiet, **(handlers or {})}, credentials)
        await peer.call("hello", {"role": "router", "router": name})
        return peer

    async def agent(
        self,
        node: str,
        handlers: Mapping[str, Handler] | None = None,
        credentials: Credentials | None = None,
        **changes: Any,
    ) -> Peer:
        """A connection that said hello as a node's agent."""
        quiet = dict.fromkeys(("launch", "stop", "release_state"), _nothing)
        peer = await self.connect({**quiet, "read_log": _no_logs, **(handlers or {})}, credentials)
        await peer.call("hello", greeting(node, **changes))
        return peer

    async def leave(self, peer: Peer) -> None:
        """End a connection of this test's."""
        (running,) = [task for known, task in self._running if known is peer]
        peer.close()
        await running

    async def close(self) -> None:
        """End all connections of this test's; returns when the service has taken that in."""
        for peer, _ in self._running:
            peer.close()
        await asyncio.gather(*(task for _, task in self._running))
        shell = self.service.shell
        await until(lambda: not shell.agents.connected() and not shell.core.status(0.0)["routers"])
        # The queue has one order: what was said before this is in the journal now.
        await shell.report(TimerFired())


@asynccontextmanager
async def live(folder: Path, **changes: Any) -> AsyncIterator[Live]:
    """A service with its journal and socket in `folder`, and the tenants `a` and `b`."""
    fields: Plain = {
        "listen": (f"unix:{folder}/s.sock",),
        "journal": str(folder / "journal.sqlite"),
        "operator_key_digest": digest("operator"),
        "node_grace_s": GRACE_S,
        "tenants": (("a", digest("a")), ("b", digest("b"))),
        **changes,
    }
    config = SchedulerConfig(**fields)
    journal = SqlJournal(config.journal)
    journal.acquire("test", 600.0)
    restored = restore(config, journal)
    shell = Shell(
        restored.core,
        journal,
        Clock(restored.at),
        position=restored.position,
        snapshot_position=restored.snapshot_position,
        snapshot_events=config.snapshot_events,
    )
    shell.history = history_writer(config, journal, lambda: shell.core, restored.position)
    service = Service(config, shell)
    if shell.history is not None:
        service.keep(shell.history.run())
    ready, stop = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(service.run(ready.set, stop))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    clients = Live(service, config)
    if running.done():
        running.result()
    try:
        yield clients
    finally:
        if not running.done():
            await clients.close()
        stop.set()
        await running
        journal.release()
        journal.close()


def greeting(node: str, **changes: Any) -> Plain:
    """A node agent's hello."""
    return {
        "role": "agent",
        "node": node,
        "gpus": 2,
        "gpu_memory_bytes": 1 << 30,
        "host_memory_bytes": 1 << 30,
        "statemanager": f"sm-{node}",
        "workers": [],
        "states": [],
        **changes,
    }


def job_of(tenant: str, job: str) -> Plain:
    """Parameters of `submit_job`."""
    return {
        "tenant": tenant,
        "job": job,
        "name": job,
        "controller_timeout_s": 1e6,
        "reattach_timeout_s": 1e6,
    }


def deployment_of(claim: Plain, job: str, name: str = "actor", **changes: Any) -> Plain:
    """Parameters of `create_deployment`."""
    return {
        **claim,
        "deployment": f"{job}/{name}",
        "job": job,
        "kind": "train",
        "workers": 1,
        "state_bytes": 1000,
        "exclusive": False,
        "spec_json": "{}",
        **changes,
    }


def barrier_of(claim: Plain, deployment: str, operation: str, **changes: Any) -> Plain:
    """Parameters of `submit_operation`."""
    return {
        **claim,
        "operation": operation,
        "deployment": deployment,
        "kind": "barrier",
        **changes,
    }


def _nothing(_: Peer, __: Plain) -> Awaitable[Plain]:
    return _answer({})


def _no_logs(_: Peer, __: Plain) -> Awaitable[Plain]:
    return _answer({"logs": []})


async def _answer(plain: Plain) -> Plain:
    return plain
