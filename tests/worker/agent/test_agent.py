"""The node agent starts and stops workers as the scheduler says, whatever comes twice or late."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from plexrl.wire.rpc import Peer
from plexrl.worker.agent.agent import Agent
from plexrl.worker.config import AgentConfig, WorkerConfig
from tests.statemanager.conftest import DEADLINE_S, Daemon, daemon, start_daemon
from tests.statemanager.test_node_agent_state import run_dir

__all__ = ["daemon", "run_dir", "start_daemon"]

Plain = dict[str, Any]


class FakeWorker:
    """A worker that lives until it is stopped."""

    def __init__(self, config: WorkerConfig) -> None:
        self.incarnation = config.incarnation
        self.ready, self._says = Pipe(duplex=False)
        self.sentinel, self._life = os.pipe()
        self.is_stopped = False
        self._says.send(True)

    def exit_reason(self) -> str:
        return "it was stopped"

    def stop(self) -> None:
        if not self.is_stopped:
            self.is_stopped = True
            os.close(self._life)

    def kill(self) -> None:
        self.stop()

    def close(self) -> None:
        self.stop()
        os.close(self.sentinel)
        self.ready.close()
        self._says.close()


class FakeLauncher:
    """Starts fake workers."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []

    def warm_up(self) -> None: ...

    def start(self, config: WorkerConfig) -> FakeWorker:
        self.workers.append(FakeWorker(config))
        return self.workers[-1]

    def living(self) -> list[int]:
        """Incarnations of the workers that were not stopped."""
        return [worker.incarnation for worker in self.workers if not worker.is_stopped]


class Scheduler:
    """The scheduler's end of the agent's connection."""

    def __init__(self, peer: Peer, ready: "asyncio.Queue[int]") -> None:
        self._peer, self._ready = peer, ready

    async def launch(self, incarnation: int) -> None:
        ranks = [{"node": "node0", "rank": 0, "gpu": 0}]
        await self._send("launch", incarnation, kind="train", ranks=ranks)

    async def stop(self, incarnation: int) -> None:
        await self._send("stop", incarnation)

    async def _send(self, method: str, incarnation: int, **fields: object) -> None:
        names = {"deployment": "j/actor", "group": "g", "tenant": "t", "spec_json": "{}"}
        await self._peer.call(method, {"command": {**names, "incarnation": incarnation, **fields}})

    async def ready(self) -> int:
        """Incarnation of the next worker that is reported ready."""
        return await self._ready.get()


@asynccontextmanager
async def agent_of(
    folder: Path, statemanager: Daemon, launcher: FakeLauncher
) -> AsyncIterator[Scheduler]:
    peers: asyncio.Queue[Peer] = asyncio.Queue()
    ready: asyncio.Queue[int] = asyncio.Queue()

    async def hello(peer: Peer, _: Plain) -> Plain:
        peers.put_nowait(peer)
        return {}

    async def worker_ready(_: Peer, params: Plain) -> Plain:
        ready.put_nowait(params["incarnation"])
        return {"wanted": True}

    async def ignored(_: Peer, __: Plain) -> Plain:
        return {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reports = {"worker_ready": worker_ready, "worker_exited": ignored}
        await Peer(reader, writer, {"hello": hello, "state_reported": ignored, **reports}).run()

    path = str(folder / "scheduler.sock")
    config = AgentConfig(
        node="node0",
        scheduler=(f"unix:{path}",),
        statemanager=statemanager.config.listen,
        ticket_key_file=str(statemanager.config.ticket_key_path),
        gpus=1,
        gpu_memory_bytes=1,
        host_memory_bytes=1,
        run_dir=str(folder),
        rendezvous_dir=str(folder),
        data_dir=str(folder),
    )
    server = await asyncio.start_unix_server(serve, path)
    stop = asyncio.Event()
    running = asyncio.create_task(Agent(config, launcher).run(stop, asyncio.Event()))
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield Scheduler(await peers.get(), ready)
    finally:
        stop.set()
        await asyncio.wait({running}, timeout=DEADLINE_S)
        server.close()
        for worker in launcher.workers:
            worker.close()


def test_a_launch_that_comes_twice_or_late_starts_no_second_worker(
    run_dir: Path, daemon: Daemon
) -> None:
    launcher = FakeLauncher()

    async def work() -> None:
        async with agent_of(run_dir, daemon, launcher) as scheduler:
            await scheduler.launch(2)
            assert await scheduler.ready() == 2
            await scheduler.launch(2)
            await scheduler.launch(1)
            # Starts of one rank are made in order.
            await scheduler.launch(3)
            assert await scheduler.ready() == 3
            assert launcher.living() == [3], "the former worker was not stopped"
            assert [worker.incarnation for worker in launcher.workers] == [2, 3]

    asyncio.run(work())


def test_a_late_stop_leaves_newer_workers_alone(run_dir: Path, daemon: Daemon) -> None:
    launcher = FakeLauncher()

    async def work() -> None:
        async with agent_of(run_dir, daemon, launcher) as scheduler:
            await scheduler.launch(2)
            assert await scheduler.ready() == 2
            await scheduler.stop(1)
            assert launcher.living() == [2]
            await scheduler.stop(2)
            assert launcher.living() == []

    asyncio.run(work())
