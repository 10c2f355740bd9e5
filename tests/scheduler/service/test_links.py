"""Connections of the scheduler's socket, and calls to node agents."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from plexrl import errors
from plexrl.scheduler.queries.views import expected_nodes
from plexrl.scheduler.service.connections.router_calls import QUERY_NODE_TIMEOUT_S
from plexrl.wire.rpc import Handler, Peer
from tests.scheduler.live_service import (
    GRACE_S,
    OPERATOR,
    Plain,
    deployment_of,
    digest,
    job_of,
    live,
    pass_time,
    run_live,
    until,
)

A: Plain = {"tenant": "a"}


async def is_alive(router: Peer, node: str) -> bool:
    nodes = (await router.call("list_nodes", OPERATOR))["nodes"]
    (view,) = [view for view in nodes if view["node"] == node]
    return bool(view["alive"])


async def due() -> None:
    """Run the tasks that are due now until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def lost(router: Peer, node: str) -> None:
    """Wait until the node counts as lost; the test's time limit is the deadline."""
    while True:
        if not await is_alive(router, node):
            return


async def heard(router: Peer, name: str) -> None:
    """Wait until all earlier reports were handled; the queue is first in, first out."""
    create = {**OPERATOR, "name": name, "key_digest": digest(name)}
    await router.call("create_tenant", create)


def test_each_disconnection_of_an_agent_starts_a_new_grace_period(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await cluster.router()
            agents = cluster.service.shell.agents
            for turn in range(3):
                agent = await cluster.agent("n")
                await cluster.leave(agent)
                await until(lambda: not agents.connected())
                await heard(router, f"gone-{turn}")
                # The timers of all earlier departures come due before this one's.
                pass_time(0.9 * GRACE_S)
                await due()
                await heard(router, f"later-{turn}")
                assert await is_alive(router, "n"), f"lost in turn {turn}"
            pass_time(0.2 * GRACE_S)
            await lost(router, "n")
            await cluster.agent("n")
            pass_time(2 * GRACE_S)
            await due()
            await heard(router, "afterwards")
            assert await is_alive(router, "n")

    run_live(talk)


def test_a_newer_connection_of_a_node_replaces_the_former(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await cluster.router()
            former = await cluster.agent("n")
            await cluster.agent("n")
            await until(lambda: len(cluster.service.shell.agents.connected()) == 1)
            with pytest.raises(errors.ConnectionLostError):
                await former.call("worker_exited", {})
            pass_time(2 * GRACE_S)
            await due()
            await heard(router, "afterwards")
            assert await is_alive(router, "n")

    run_live(talk)


def test_a_release_is_resent_to_an_agent_that_disconnected_before_its_answer(
    tmp_path: Path,
) -> None:
    async def talk() -> None:
        told: asyncio.Queue[str] = asyncio.Queue()

        async def hold(_: Peer, params: Plain) -> None:
            told.put_nowait(params["command"]["deployment"])
            await asyncio.Event().wait()

        async def release(_: Peer, params: Plain) -> None:
            told.put_nowait(params["command"]["deployment"])

        async with live(tmp_path) as cluster:
            router = await cluster.router()
            for turn in range(3):
                # The first is given up by its connection's end, the others by a newer connection.
                agent = await cluster.agent("n", {"release_state": hold}, states=["old/one"])
                assert await told.get() == "old/one"
                if turn == 0:
                    await cluster.leave(agent)
                    await until(lambda: not cluster.service.shell.agents.connected())
            await cluster.agent("n", {"release_state": release})
            assert await told.get() == "old/one"
            await heard(router, "afterwards")

    run_live(talk)


def test_an_ended_connection_leaves_no_task_running(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await cluster.router()
            await heard(router, "begun")
            before = len(asyncio.all_tasks())
            for _ in range(5):
                agent = await cluster.agent("n")
                await cluster.leave(agent)
                await until(lambda: not cluster.service.shell.agents.connected())
            # One timer waits for the node.
            await until(lambda: len(asyncio.all_tasks()) <= before + 1)

    run_live(talk)


# Logs


def test_one_node_without_an_answer_does_not_hide_the_others_logs(tmp_path: Path) -> None:
    async def talk() -> None:
        asked: asyncio.Queue[str] = asyncio.Queue()

        async def answer(_: Peer, params: Plain) -> Plain:
            asked.put_nowait("n")
            text = {"deployment": params["deployment"], "node": "n", "rank": 0, "text": "hello"}
            return {"logs": [text]}

        async def refuse(_: Peer, __: Plain) -> Plain:
            asked.put_nowait("refusing")
            raise errors.StorageError("the disk is gone")

        async def leave(peer: Peer, _: Plain) -> Plain:
            asked.put_nowait("leaving")
            peer.close()
            return {}

        async def babble(_: Peer, __: Plain) -> Plain:
            asked.put_nowait("babbling")
            return {"logs": "text"}

        async def hang(_: Peer, __: Plain) -> Plain:
            asked.put_nowait("hanging")
            await asyncio.Event().wait()
            return {}

        async with live(tmp_path) as cluster:
            router = await cluster.router()
            await cluster.agent("n", {"read_log": answer})
            await router.call("submit_job", job_of("a", "j"))
            await router.call("create_deployment", deployment_of(A, "j"))
            for node, handler in (
                ("refusing", refuse),
                ("leaving", leave),
                ("babbling", babble),
                ("hanging", hang),
            ):
                await cluster.agent(node, {"read_log": handler})
            reading = asyncio.create_task(router.call("read_log", {**A, "job": "j", "lines": 3}))
            assert len({await asked.get() for _ in range(5)}) == 5
            # The others' answers are in their sockets, and a round through the journal reads them.
            await heard(router, "asked")
            pass_time(QUERY_NODE_TIMEOUT_S + 1.0)
            found = await reading
            assert found["logs"] == [
                {"deployment": "j/actor", "node": "n", "rank": 0, "text": "hello"}
            ]
            failed = {note["node"]: note["reason"] for note in found["failed"]}
            assert sorted(failed) == ["babbling", "hanging", "leaving", "refusing"]
            assert failed["refusing"] == "the disk is gone"
            nothing = {**A, "job": "j", "deployment": "critic"}
            assert await router.call("read_log", nothing) == {"logs": [], "failed": []}

    run_live(talk)


def test_a_node_whose_agent_is_away_is_named_until_its_work_goes_elsewhere(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path, node_replace_s=0.05) as cluster:
            router = await cluster.router()
            agent = await cluster.agent("n", {"list_checkpoints": none_here})
            await router.call("submit_job", job_of("a", "j"))
            ask = partial(router.call, "list_checkpoints", {**A, "job": "j"})
            assert await ask() == {"checkpoints": [], "failed": []}
            await cluster.leave(agent)
            await until(lambda: not cluster.service.shell.agents.connected())
            away = {"node": "n", "reason": "its agent is not connected"}
            assert await ask() == {"checkpoints": [], "failed": [away]}
            pass_time(GRACE_S)
            core = cluster.service.shell.core
            await until(lambda: not expected_nodes(core.cluster, cluster.service.shell.clock.now()))
            assert await ask() == {"checkpoints": [], "failed": []}

    async def none_here(_: Peer, __: Plain) -> Plain:
        return {"checkpoints": []}

    run_live(talk)


def test_routers_are_told_which_workers_have_ended_and_which_live(tmp_path: Path) -> None:
    told: asyncio.Queue[tuple[str, Plain]] = asyncio.Queue()

    def note(method: str) -> Handler:
        async def taken(_: Peer, params: Plain) -> Plain:
            told.put_nowait((method, params))
            return {}

        return taken

    handlers = {method: note(method) for method in ("workers_gone", "live_workers")}

    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await cluster.router("r1", handlers)
            assert await told.get() == ("live_workers", {"incarnations": {}})
            agent = await cluster.agent("n")
            await router.call("submit_job", job_of("a", "j"))
            await router.call("create_deployment", deployment_of(A, "j"))
            worker = {"deployment": "j/actor", "rank": 0, "incarnation": 1}
            await agent.call("worker_ready", {**worker, "address": "unix:/w"})
            await agent.call("worker_exited", {**worker, "reason": "killed"})
            gone = {"deployment": "j/actor", "incarnation": 1}
            assert await told.get() == ("workers_gone", gone)
            await agent.call("worker_ready", {**worker, "incarnation": 2, "address": "unix:/w"})
            await cluster.router("r2", handlers)
            assert await told.get() == ("live_workers", {"incarnations": {"j/actor": 2}})
            await router.call("finish_job", {**A, "job": "j", "outcome": "completed"})
            ended = [await told.get(), await told.get()]
            assert ended == 2 * [("workers_gone", {**gone, "incarnation": 2})]

    run_live(talk)


def test_what_a_host_tier_has_ready_is_shown_while_its_agent_is_connected(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await cluster.router()
            agent = await cluster.agent("n")
            report = {"node": "n", "ready_bytes": 3, "wanted_bytes": 15}
            await agent.call("host_memory_reported", report)
            (view,) = (await router.call("list_nodes", OPERATOR))["nodes"]
            assert (view["host_ready_bytes"], view["host_prefault_bytes"]) == (3, 15)
            with pytest.raises(errors.PermissionDeniedError):
                await agent.call("host_memory_reported", {**report, "node": "other"})
            await cluster.leave(agent)
            await until(lambda: not cluster.service.shell.agents.connected())
            (view,) = (await router.call("list_nodes", OPERATOR))["nodes"]
            assert "host_ready_bytes" not in view

    run_live(talk)
