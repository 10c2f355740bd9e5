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
from plexrl.statemanager.protocol.address import nearest
from plexrl.wire.rpc import Peer
from plexrl.worker.agent.agent import Agent
from plexrl.worker.agent.launcher import WorkerProcess
from plexrl.worker.interface.config import AgentConfig, WorkerConfig
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
async def scheduler_of_agent(
    run_dir: Path,
    daemon: Daemon,
    reports: list[Plain] | None = None,
    addresses: list[str] | None = None,
    ready: list[Plain] | None = None,
) -> AsyncIterator[asyncio.Queue[Peer]]:
    """An agent of the daemon's node; every connection that it makes to its scheduler, and in
    `reports` what it reports of where state lies, in `addresses` where it says its StateManager is,
    in `ready` how far its host tier is."""
    peers: asyncio.Queue[Peer] = asyncio.Queue()
    addresses = [] if addresses is None else addresses

    async def state_reported(_: Peer, params: Plain) -> Plain:
        assert params["node"] == daemon.config.node
        if reports is not None:
            reports.extend(params["states"])
        return {}

    async def host_memory_reported(_: Peer, params: Plain) -> Plain:
        assert ready is not None, "nothing is prefaulted"
        ready.append(params)
        return {}

    async def hello(peer: Peer, params: Plain) -> Plain:
        assert nearest(params["statemanager"]) == daemon.config.listen
        addresses.append(params["statemanager"])
        peers.put_nowait(peer)
        return {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reported = {"state_reported": state_reported, "host_memory_reported": host_memory_reported}
        await Peer(reader, writer, {"hello": hello, **reported}).run()

    path = str(run_dir / "scheduler.sock")
    config = AgentConfig(
        node=daemon.config.node,
        scheduler=(f"unix:{path}",),
        statemanager=daemon.config.listen,
        statemanager_address=daemon.tcp,
        fabric="trusted",
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
    agent = asyncio.create_task(Agent(config, NoWorkers()).run(stop))
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


RANKS = [{"node": f"node{number}", "rank": 0, "gpu": 0} for number in range(3)]
"""On whichever of the daemons' nodes the agent is."""


def migration(*sources: Daemon, seq: int = 1, **fields: object) -> Plain:
    paths = [daemon.config.listen for daemon in sources]
    command = {"deployment": "job/actor", "seq": seq, "sources": paths, "nodes": ["node0"]}
    return {"command": {**command, "ranks": RANKS, **fields}}


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
        await peer.call("release_state", {"command": {"deployment": "job/actor", "nodes": []}})
        ranks = await peer.call(
            "migrate_state",
            migration(source, ranks=[*RANKS, {"node": "other", "rank": 1, "gpu": 0}]),
        )
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
        with pytest.raises(StateTierFullError, match="end a job or raise host_bytes"):
            await peer.call("migrate_state", migration(source))
        with pytest.raises(InvalidRequestError, match="malformed command"):
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
        hint = {"deployment": "nobody", "seq": 1, "nodes": ["node0"]}
        assert await peer.call("prefetch_state", {"command": hint}) == {}
        for command in ({"deployment": "job/actor"}, {}):
            with pytest.raises(InvalidRequestError, match="malformed command"):
                await peer.call("prefetch_state", {"command": command})
        assert await asyncio.to_thread(tier) == "nvme"
        wanted = {"deployment": "job/actor", "seq": 1, "nodes": ["node0"]}
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
        command = {"deployment": "job/actor", "seq": 1, "nodes": ["node0"]}
        assert await peer.call("prefetch_state", {"command": command}) == {}
        daemon.start()

    run_with_agent(run_dir, daemon, work)


def residency(deployment: str, host_bytes: int, nvme_bytes: int, *on_nvme: int) -> Plain:
    sizes = {"host_bytes": host_bytes, "nvme_bytes": nvme_bytes}
    return {"deployment": deployment, **sizes, "on_nvme": list(on_nvme)}


def test_the_scheduler_hears_of_an_earlier_version_that_would_survive_a_power_cut(
    daemon: Daemon, make_shard: MakeShard, run_dir: Path
) -> None:
    shard = make_shard(daemon)
    reports: list[Plain] = []

    async def work() -> None:
        async with (
            scheduler_of_agent(run_dir, daemon, reports) as peers,
            asyncio.timeout(DEADLINE_S),
        ):
            await peers.get()
            for seq, previous_seq, base_seq in (
                (1, 0, 0),
                (2, 0, 0),
                (3, 1, 0),
                (4, 1, 0),
                (5, 3, 1),
            ):
                shard.fill(seq)
                keep_seq = max(0, seq - 1)
                save = {"previous_seq": previous_seq, "base_seq": base_seq}
                await asyncio.to_thread(shard.snapshot, seq, keep_seq=keep_seq, **save)
            stored = residency("job/actor", STATE, 0, 1, 3)
            await asyncio.to_thread(wait_until, lambda: stored in reports)
            await asyncio.to_thread(shard.snapshot, 6, keep_seq=5, previous_seq=3)
            only = residency("job/actor", STATE, 0, 3)
            await asyncio.to_thread(wait_until, lambda: reports[-1] == only)

    asyncio.run(work())


def test_the_scheduler_hears_of_state_that_had_to_leave_host_memory(
    start_daemon: StartDaemon, make_shard: MakeShard, run_dir: Path
) -> None:
    """And of its way back, of all of it anew after it was gone itself, and of nothing else."""
    daemon = start_daemon(host_bytes=STATE + MIB // 4)
    shard, rival = make_shard(daemon), make_shard(daemon, deployment="job/critic")
    reports: list[Plain] = []

    async def heard(deployment: str, host_bytes: int, nvme_bytes: int) -> None:
        wanted = residency(deployment, host_bytes, nvme_bytes, 1)
        await asyncio.to_thread(wait_until, lambda: wanted in reports)
        reports.clear()

    async def work() -> None:
        async with (
            scheduler_of_agent(run_dir, daemon, reports) as peers,
            asyncio.timeout(DEADLINE_S),
        ):
            peer = await peers.get()
            await asyncio.to_thread(shard.offload, 1)
            # Pressure: there is room for one of them.
            await asyncio.to_thread(rival.offload, 1)
            await heard("job/actor", 0, STATE)
            await asyncio.to_thread(rival.agent.release, "job/critic")
            hint = {"deployment": "job/actor", "seq": 1, "nodes": ["node0"]}
            await peer.call("prefetch_state", {"command": hint})
            await heard("job/actor", STATE, 0)
            await asyncio.to_thread(daemon.kill)
            await asyncio.to_thread(daemon.start)
            await heard("job/actor", STATE, 0)
            peer.close()
            await peers.get()
            await heard("job/actor", STATE, 0)

    asyncio.run(work())


def test_what_is_needed_last_is_spilled_first(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(host_bytes=2 * (STATE + MIB // 4))
    soon, late, third = (
        make_shard(daemon, deployment=f"job/{name}") for name in ("soon", "late", "third")
    )
    # By recency alone it would be the first one that goes.
    soon.offload(1, next_use_s=5.0)
    late.offload(1, next_use_s=500.0)
    third.offload(1, next_use_s=50.0)
    held = third.agent.usage()["deployments"]
    tiers = {name: entry["versions"][0]["tier"] for name, entry in held.items()}
    assert tiers == {"job/soon": "host", "job/late": "nvme", "job/third": "host"}
    # What was hinted changes the order: now the third is needed last.
    third.agent.prefetch("job/late", 1, next_use_s=1.0)
    soon.client.load(seq=1, token=1)
    soon.offload(2, next_use_s=2.0)
    fourth = make_shard(daemon, deployment="job/fourth")
    fourth.offload(1, next_use_s=3.0)
    held = third.agent.usage()["deployments"]
    assert held["job/third"]["versions"][0]["tier"] == "nvme"


def test_nodes_that_share_no_machine_migrate_by_the_addresses_they_announced(
    start_daemon: StartDaemon, make_shard: MakeShard, run_dir: Path
) -> None:
    source, target = (start_daemon(serve_tcp="127.0.0.1:0") for _ in range(2))
    shard = make_shard(source)
    expected = shard.fill(1)
    shard.offload(1)
    addresses: list[str] = []

    async def work() -> None:
        async with scheduler_of_agent(run_dir, source, addresses=addresses) as peers:
            await peers.get()
        async with (
            scheduler_of_agent(run_dir, target) as peers,
            asyncio.timeout(DEADLINE_S),
        ):
            peer = await peers.get()
            [announced] = addresses
            # As it looks from another machine, where the path is none of the source's.
            elsewhere = announced.replace("#", "#another-")
            command = migration()["command"] | {"sources": [elsewhere]}
            answer = await peer.call("migrate_state", {"command": command})
            assert answer["bytes_moved"] == STATE

    asyncio.run(work())
    assert addresses[0].startswith(f"{source.tcp}#")
    moved = make_shard(target)
    moved.load(1)
    assert np.array_equal(moved.contents, expected)


def test_the_scheduler_hears_how_much_of_the_host_tier_is_ready(
    start_daemon: StartDaemon, make_shard: MakeShard, run_dir: Path
) -> None:
    """All but a version's header, which takes some of what was wanted."""
    daemon = start_daemon(host_bytes=16 * MIB, host_prefault_bytes=16 * MIB)
    make_shard(daemon).offload(1)
    ready: list[Plain] = []

    async def work() -> None:
        async with (
            scheduler_of_agent(run_dir, daemon, ready=ready) as peers,
            asyncio.timeout(DEADLINE_S),
        ):
            await peers.get()
            enough = 15 * MIB
            await asyncio.to_thread(
                wait_until, lambda: bool(ready) and ready[-1]["ready_bytes"] > enough
            )
            assert ready[-1]["node"] == daemon.config.node
            assert ready[-1]["ready_bytes"] < ready[-1]["wanted_bytes"] == 16 * MIB

    asyncio.run(work())
