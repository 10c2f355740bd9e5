"""The node agent's calls that concern state, as the scheduler makes them."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plexrl.errors import (
    ConnectionLostError,
    InvalidRequestError,
    StateLostError,
    StateTierFullError,
)
from plexrl.wire.rpc import Peer
from plexrl.worker.agent import Agent
from plexrl.worker.config import AgentConfig, WorkerConfig
from plexrl.worker.launcher import WorkerProcess
from tests.statemanager.conftest import DEADLINE_S, MIB, Daemon, MakeShard, StartDaemon, wait_until

STATE = MIB // 2
Plain = dict[str, Any]


class NoWorkers:
    """A launcher for agents that are asked for none."""

    def warm_up(self) -> None: ...

    def start(self, config: WorkerConfig) -> WorkerProcess:
        raise OSError(f"no worker can be started, {config.deployment} neither")


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """For sockets, whose paths may have 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="plexrl-"))
    yield path
    shutil.rmtree(path)


@asynccontextmanager
async def scheduler_of_agent(run_dir: Path, daemon: Daemon) -> AsyncIterator[asyncio.Queue[Peer]]:
    """An agent of the daemon's node; every connection that it makes to its scheduler."""
    peers: asyncio.Queue[Peer] = asyncio.Queue()

    async def hello(peer: Peer, params: Plain) -> Plain:
        assert params["statemanager"] == daemon.config.listen
        peers.put_nowait(peer)
        return {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Peer(reader, writer, {"hello": hello}).run()

    path = str(run_dir / "scheduler.sock")
    config = AgentConfig(
        node=daemon.config.node,
        scheduler=path,
        statemanager=daemon.config.listen,
        ticket_key_file=str(daemon.config.ticket_key_path),
        gpus=1,
        gpu_memory_bytes=MIB,
        host_memory_bytes=daemon.config.host_bytes,
        run_dir=str(run_dir),
        rendezvous_dir=str(run_dir),
        data_dir=str(run_dir),
    )
    server = await asyncio.start_unix_server(serve, path)
    stop = asyncio.Event()
    agent = asyncio.create_task(Agent(config, NoWorkers()).run(stop, asyncio.Event()))
    try:
        yield peers
    finally:
        stop.set()
        async with asyncio.timeout(DEADLINE_S):
            await agent
        server.close()
        await server.wait_closed()


def run_with_agent(
    run_dir: Path, daemon: Daemon, work: Callable[[asyncio.Queue[Peer]], Awaitable[None]]
) -> None:
    async def run() -> None:
        async with scheduler_of_agent(run_dir, daemon) as peers, asyncio.timeout(DEADLINE_S):
            await work(peers)

    asyncio.run(run())


def migration(*sources: Daemon, seq: int = 1, **fields: object) -> Plain:
    paths = [daemon.config.listen for daemon in sources]
    return {"command": {"deployment": "job/actor", "seq": seq, "sources": paths, **fields}}


def test_a_version_comes_to_the_node_as_often_as_it_is_called(
    start_daemon: StartDaemon, make_shard: MakeShard, run_dir: Path
) -> None:
    empty, source, target = start_daemon(), start_daemon(), start_daemon()
    shard = make_shard(source)
    expected = shard.fill(1)
    shard.offload(1)

    async def work(peers: asyncio.Queue[Peer]) -> None:
        peer = await peers.get()
        calls = [peer.call("migrate_state", migration(empty, source)) for _ in range(3)]
        answers = await asyncio.gather(*calls)
        # Calls that come together are one migration.
        assert [answer["bytes_moved"] for answer in answers] == [STATE] * 3
        assert answers[0]["seconds"] > 0
        again = await peer.call("migrate_state", migration(empty, source))
        assert again["bytes_moved"] == 0
        await peer.call("release_state", {"command": {"deployment": "job/actor"}})
        ranks = await peer.call("migrate_state", migration(source, ranks=[0]))
        assert ranks["bytes_moved"] == STATE

    run_with_agent(run_dir, target, work)
    moved = make_shard(target)
    moved.load(1)
    assert np.array_equal(moved.contents, expected)


def test_a_refusal_comes_back_as_its_error(
    start_daemon: StartDaemon, make_shard: MakeShard, run_dir: Path
) -> None:
    source, target = start_daemon(), start_daemon(host_bytes=1, nvme_bytes=1)
    make_shard(source).offload(1)

    async def work(peers: asyncio.Queue[Peer]) -> None:
        peer = await peers.get()
        with pytest.raises(StateLostError, match="version 2 of 'job/actor'"):
            await peer.call("migrate_state", migration(source, seq=2))
        with pytest.raises(StateTierFullError, match="end a job or raise a bound"):
            await peer.call("migrate_state", migration(source))
        with pytest.raises(InvalidRequestError, match="malformed migrate_state"):
            await peer.call("migrate_state", {"command": {"deployment": "job/actor"}})

    run_with_agent(run_dir, target, work)


def test_a_migration_outlives_the_connection_that_asked_for_it(
    start_daemon: StartDaemon, make_shard: MakeShard, run_dir: Path
) -> None:
    source, target = start_daemon(), start_daemon()
    shard = make_shard(source, elements=4 * MIB)
    shard.offload(1)

    async def work(peers: asyncio.Queue[Peer]) -> None:
        peer = await peers.get()
        call = asyncio.create_task(peer.call("migrate_state", migration(source)))
        await asyncio.sleep(0)
        peer.close()
        with pytest.raises(ConnectionLostError):
            await call
        answer = await (await peers.get()).call("migrate_state", migration(source))
        assert answer["bytes_moved"] in (0, 32 * MIB)

    run_with_agent(run_dir, target, work)


def test_a_hint_is_answered_at_once_and_followed(
    start_daemon: StartDaemon, make_shard: MakeShard, run_dir: Path
) -> None:
    daemon = start_daemon()
    shard = make_shard(daemon)
    expected = shard.fill(1)
    shard.offload(1)
    # A clean exit leaves all versions on NVMe.
    daemon.terminate()
    daemon.start()

    def tier() -> str:
        [version] = shard.agent.usage()["deployments"]["job/actor"]["versions"]
        return str(version["tier"])

    async def work(peers: asyncio.Queue[Peer]) -> None:
        peer = await peers.get()
        for command in ({"deployment": "nobody", "seq": 1}, {"deployment": "job/actor"}, {}):
            assert await peer.call("prefetch_state", {"command": command}) == {}
        assert await asyncio.to_thread(tier) == "nvme"
        wanted = {"deployment": "job/actor", "seq": 1}
        assert await peer.call("prefetch_state", {"command": wanted}) == {}
        await asyncio.to_thread(wait_until, lambda: tier() == "host")

    run_with_agent(run_dir, daemon, work)
    assert shard.load(1).tier == "host"
    assert np.array_equal(shard.contents, expected)


def test_a_hint_does_not_fail_where_the_daemon_is_gone(
    start_daemon: StartDaemon, run_dir: Path
) -> None:
    daemon = start_daemon()

    async def work(peers: asyncio.Queue[Peer]) -> None:
        peer = await peers.get()
        daemon.kill()
        command = {"deployment": "job/actor", "seq": 1}
        assert await peer.call("prefetch_state", {"command": command}) == {}
        daemon.start()

    run_with_agent(run_dir, daemon, work)
