"""The node agent starts and stops workers as the scheduler says, whatever comes twice or late."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from plexrl.wire.rpc import Peer
from plexrl.worker.agent.agent import Agent
from plexrl.worker.interface.config import AgentConfig, WorkerConfig
from tests.statemanager.conftest import (
    DEADLINE_S,
    Daemon,
    MakeShard,
    StartDaemon,
    daemon,
    make_shard,
    start_daemon,
)
from tests.statemanager.test_node_agent_state import run_dir

__all__ = ["daemon", "make_shard", "run_dir", "start_daemon"]

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
        self.warm_up_fails = False
        self.warmed_up = asyncio.Event()

    def warm_up(self) -> None:
        if self.warm_up_fails:
            raise OSError(errno.ENOSPC, "no space")
        self.warmed_up.set()

    def start(self, config: WorkerConfig) -> FakeWorker:
        assert self.warmed_up.is_set(), "a worker started in a launcher that was not prepared"
        self.workers.append(FakeWorker(config))
        return self.workers[-1]

    def living(self) -> list[int]:
        """Incarnations of the workers that were not stopped."""
        return [worker.incarnation for worker in self.workers if not worker.is_stopped]


class Scheduler:
    """The scheduler's end of the agent's connection."""

    def __init__(
        self,
        peer: Peer,
        ready: "asyncio.Queue[int]",
        exits: "asyncio.Queue[Plain]",
        conditions: "asyncio.Queue[list[Plain]]",
        hello: Plain,
    ) -> None:
        """`exits`: reports of workers that have ended; `conditions`: of what is wrong; `hello`:
        what the agent said of its node when it connected."""
        self._peer, self._ready, self.hello = peer, ready, hello
        self.exits, self.conditions = exits, conditions

    async def launch(self, incarnation: int, nodes: Sequence[str] = ("node0",)) -> None:
        """Launch one rank on each of `nodes`."""
        ranks = [{"node": node, "rank": rank, "gpu": 0} for rank, node in enumerate(nodes)]
        await self._send("launch", incarnation, kind="train", ranks=ranks)

    async def migrate(self, source: Daemon, ranks: Sequence[int]) -> None:
        """Order the node to fetch version 1 of these ranks."""
        command = {"deployment": "j/actor", "seq": 1, "sources": [source.config.listen]}
        placed = [{"node": "node0", "rank": rank, "gpu": 0} for rank in ranks]
        command |= {"nodes": ["node0"], "ranks": placed}
        await self._peer.call("migrate_state", {"command": command})

    async def stop(self, incarnation: int) -> None:
        await self._send("stop", incarnation, nodes=["node0"])

    async def _send(self, method: str, incarnation: int, **fields: object) -> None:
        names = {"deployment": "j/actor", "group": "g", "tenant": "t", "spec_json": "{}"}
        await self._peer.call(method, {"command": {**names, "incarnation": incarnation, **fields}})

    async def ready(self) -> int:
        """Incarnation of the next worker that is reported ready."""
        return await self._ready.get()


@asynccontextmanager
async def agent_of(
    folder: Path,
    statemanager: Daemon,
    launcher: FakeLauncher,
    **changes: Any,
) -> AsyncIterator[Scheduler]:
    """A connected agent; `changes` of its configuration."""
    peers: asyncio.Queue[tuple[Peer, Plain]] = asyncio.Queue()
    ready: asyncio.Queue[int] = asyncio.Queue()
    exits: asyncio.Queue[Plain] = asyncio.Queue()
    conditions: asyncio.Queue[list[Plain]] = asyncio.Queue()

    async def hello(peer: Peer, params: Plain) -> Plain:
        peers.put_nowait((peer, params))
        return {}

    async def worker_ready(_: Peer, params: Plain) -> Plain:
        ready.put_nowait(params["incarnation"])
        return {"wanted": True}

    async def ignored(_: Peer, __: Plain) -> Plain:
        return {}

    async def worker_exited(_: Peer, params: Plain) -> Plain:
        exits.put_nowait(params)
        return {}

    async def node_conditions_reported(_: Peer, params: Plain) -> Plain:
        conditions.put_nowait(params["conditions"])
        return {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reports = {
            "worker_ready": worker_ready,
            "worker_exited": worker_exited,
            "node_conditions_reported": node_conditions_reported,
        }
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
        **changes,
    )
    server = await asyncio.start_unix_server(serve, path)
    stop = asyncio.Event()
    running = asyncio.create_task(Agent(config, launcher).run(stop))
    try:
        async with asyncio.timeout(DEADLINE_S):
            peer, said = await peers.get()
            yield Scheduler(peer, ready, exits, conditions, said)
    finally:
        stop.set()
        await asyncio.wait({running}, timeout=DEADLINE_S)
        server.close()
        for worker in launcher.workers:
            worker.close()


def test_a_node_says_how_fast_it_is_and_what_it_has(run_dir: Path, daemon: Daemon) -> None:
    async def work() -> None:
        async with agent_of(run_dir, daemon, FakeLauncher(), node_speed=0.3) as scheduler:
            found = scheduler.hello
            assert {name: found[name] for name in ("node", "gpus", "speed")} == {
                "node": "node0",
                "gpus": 1,
                "speed": 0.3,
            }

    asyncio.run(work())


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


def test_what_fails_to_prepare_is_tried_again_by_the_next_launch(
    run_dir: Path, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = FakeLauncher()
    launcher.warm_up_fails = True

    async def work() -> None:
        async with agent_of(run_dir, daemon, launcher) as scheduler:
            await scheduler.launch(1)
            assert "no space" in (await scheduler.exits.get())["reason"]
            assert "not prepared for workers" in caplog.text
            launcher.warm_up_fails = False
            await scheduler.launch(2)
            assert await scheduler.ready() == 2

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


def offload_ranks(daemon: Daemon, make_shard: MakeShard, ranks: Sequence[int]) -> None:
    for rank in ranks:
        make_shard(daemon, deployment="j/actor", rank=rank, world_size=2).offload(1)


def ranks_at(daemon: Daemon) -> list[int]:
    """Ranks whose versions the daemon holds."""
    with closing(daemon.agent(DEADLINE_S)) as client:
        held = client.usage()["deployments"].get("j/actor", {}).get("versions", [])
    return sorted(version["rank"] for version in held)


def test_a_node_that_stays_with_other_ranks_drops_the_versions_of_the_former_ones(
    run_dir: Path, daemon: Daemon, make_shard: MakeShard
) -> None:
    launcher = FakeLauncher()
    offload_ranks(daemon, make_shard, (0, 1))

    async def work() -> None:
        async with agent_of(run_dir, daemon, launcher) as scheduler:
            await scheduler.launch(2, ("elsewhere", "node0"))
            assert await scheduler.ready() == 2
            assert ranks_at(daemon) == [1]

    asyncio.run(work())


def test_a_late_launch_drops_nothing_that_a_later_move_has_brought(
    run_dir: Path, start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    launcher = FakeLauncher()
    source, daemon = start_daemon(), start_daemon()
    offload_ranks(source, make_shard, (0,))
    offload_ranks(daemon, make_shard, (1,))

    async def work() -> None:
        async with agent_of(run_dir, daemon, launcher) as scheduler:
            await scheduler.migrate(source, [0])
            await scheduler.launch(2, ("elsewhere", "node0"))
            assert ranks_at(daemon) == [0, 1]
            await scheduler.launch(3, ("node0", "elsewhere"))
            assert ranks_at(daemon) == [0]

    asyncio.run(work())
