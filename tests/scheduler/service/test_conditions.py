"""What is wrong in a cluster is named, over the scheduler's socket."""

import asyncio
import time
from pathlib import Path

from plexrl.errors import JournalUnavailableError
from plexrl.scheduler.operations.deadlines.overdue import overdue_view
from plexrl.scheduler.queries.explain_placement import blocking_heads
from plexrl.scheduler.queries.views import lost_nodes
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from plexrl.scheduler.state.messages.events import NodeDrainChanged, TimerFired
from plexrl.wire.rpc import Peer
from tests.scheduler.live_service import (
    GRACE_S,
    Live,
    Plain,
    barrier_of,
    deployment_of,
    job_of,
    live,
    pass_time,
    run_live,
    until,
)

A: Plain = {"tenant": "a"}


async def conditions(router: Peer) -> dict[str, Plain]:
    """The present conditions by code."""
    found = (await router.call("conditions", {}))["conditions"]
    assert len({each["code"] for each in found}) == len(found), "a code comes twice"
    return {each["code"]: each for each in found}


def is_lost(cluster: Live, node: str) -> bool:
    return node in dict(lost_nodes(cluster.service.shell.core.cluster.state))


def test_a_lost_node_is_a_condition_until_it_returns_or_is_drained(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await cluster.router("r")
            for node in ("n1", "n2"):
                await cluster.leave(await cluster.agent(node))
            while not (is_lost(cluster, "n1") and is_lost(cluster, "n2")):
                pass_time(GRACE_S)
                await asyncio.sleep(0)
            lost = (await conditions(router))["node_lost"]
            assert "n1; n2" in lost["message"]
            await cluster.agent("n1")
            assert "n1" not in (await conditions(router))["node_lost"]["message"]
            await cluster.service.shell.request(NodeDrainChanged(node="n2", is_draining=True))
            assert "node_lost" not in await conditions(router)

    run_live(talk)


def test_a_checkpoint_may_be_on_a_node_whose_agent_is_about_to_return(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await cluster.router("r")
            await cluster.leave(await cluster.agent("n"))
            await router.call("submit_job", job_of("a", "j"))
            answer = await router.call("list_checkpoints", {**A, "job": "j"})
            assert [each["node"] for each in answer["failed"]] == ["n"]

    run_live(talk)


def test_what_nodes_report_is_merged_by_code_and_ends_with_their_connection(
    tmp_path: Path,
) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await cluster.router("r")
            agents = {node: await cluster.agent(node) for node in ("n1", "n2")}
            for at, (node, agent) in enumerate(agents.items()):
                told = [{"code": "part_stuck", "message": f"on {node}", "since": 5.0 - at}]
                await agent.call("node_conditions_reported", {"node": node, "conditions": told})
            found = (await conditions(router))["part_stuck"]
            assert found == {"code": "part_stuck", "message": "on n1; on n2", "since": 4.0}
            await cluster.leave(agents["n2"])
            await until(lambda: not cluster.service.shell.agents.is_connected("n2"))
            assert (await conditions(router))["part_stuck"]["message"] == "on n1"
            nothing: Plain = {"node": "n1", "conditions": []}
            await agents["n1"].call("node_conditions_reported", nothing)
            assert "part_stuck" not in await conditions(router)

    run_live(talk)


def test_an_overdue_operation_is_a_condition(tmp_path: Path) -> None:
    runs: asyncio.Queue[Plain] = asyncio.Queue()

    async def run(_: Peer, params: Plain) -> None:
        runs.put_nowait(params["command"])

    async def talk() -> None:
        async with live(tmp_path, operation_overdue_s=0.2) as cluster:
            core = cluster.service.shell.core
            clock = cluster.service.shell.clock
            router = await cluster.router("r", {"run": run})
            agent = await cluster.agent("n")
            await router.call("submit_job", job_of("a", "j"))
            await router.call("create_deployment", deployment_of(A, "j"))
            await router.call("submit_operation", barrier_of(A, "j/actor", "o"))
            fields = {"deployment": "j/actor", "incarnation": 1, "rank": 0, "address": "x"}
            await agent.call("worker_ready", fields)
            load = await runs.get()
            await until(lambda: bool(overdue_view(core.cluster, clock.now())))
            found = (await conditions(router))["operation_overdue"]
            # The first load builds the model, which takes nobody knows how long.
            assert f"load {load['operation']} of j/actor has run for" in found["message"]
            assert "replaced in" in found["message"]
            await until(lambda: core.deployment_view("j/actor", 0.0)["incarnation"] == 2)
            assert not [
                each for each in overdue_view(core.cluster, clock.now()) if each["kind"] == "load"
            ]

    run_live(talk)


def test_a_job_that_waits_more_than_it_accepts_is_a_condition(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await cluster.router("r")
            await cluster.agent("n")
            for job, accepted in (("promised", {"slo": 0.1}), ("plain", {})):
                await router.call("submit_job", {**job_of("a", job), **accepted})
                await router.call("create_deployment", deployment_of(A, job))
            assert "slo_breached" not in await conditions(router)
            cycles = [
                each.demand.cycles
                for each in cluster.service.shell.core._context.state.deployments.values()
            ]
            for each in cycles:
                each.waiting_part = 0.5
            found = (await conditions(router))["slo_breached"]
            assert "promised of a waited 50% of its time and accepts 10%" in found["message"]
            assert "plain" not in found["message"]
            assert (await conditions(router))["slo_breached"]["since"] == found["since"]
            for each in cycles:
                each.waiting_part = 0.1
            assert "slo_breached" not in await conditions(router)

    run_live(talk)


def test_a_starving_job_that_keeps_gpus_from_all_others_is_a_condition(tmp_path: Path) -> None:
    settings: Plain = {"policy": "isolated", "starvation_bound_s": 0.01, "reservations": False}

    async def talk() -> None:
        async with live(tmp_path, **settings) as cluster:
            core, clock = cluster.service.shell.core, cluster.service.shell.clock
            router = await cluster.router("r")
            await cluster.agent("n", gpus=2)
            for job, workers in (("small", 1), ("large", 2)):
                await router.call("submit_job", job_of("a", job))
                await router.call("create_deployment", deployment_of(A, job, workers=workers))
            await until(lambda: bool(blocking_heads(core.cluster, clock.now())))
            found = (await conditions(router))["head_job_blocks"]
            assert "large/actor of a waits for 2 GPUs and keeps 1 idle" in found["message"]
            done = {**A, "job": "small", "outcome": "completed"}
            await router.call("finish_job", done)
            assert "head_job_blocks" not in await conditions(router)

    run_live(talk)


def test_explain_says_that_work_is_held_while_the_journal_is_away(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            outage = cluster.service.shell.outage
            router = await cluster.router("r")
            await router.call("submit_job", job_of("a", "j"))
            usual = (await router.call("explain_job", {**A, "job": "j"}))["summary"]
            outage.begin(JournalUnavailableError("/secret/journal.sqlite: I/O error"))
            held = (await router.call("explain_job", {**A, "job": "j"}))["summary"]
            outage.end(is_reported=True)
            assert "takes no new work (journal_unavailable)" in held
            assert held.endswith(usual)
            assert "/secret" not in held
            assert (await router.call("explain_job", {**A, "job": "j"}))["summary"] == usual

    run_live(talk)


def test_a_clock_that_was_ahead_at_an_earlier_start_is_a_condition(tmp_path: Path) -> None:
    journal = SqlJournal(str(tmp_path / "journal.sqlite"))
    journal.acquire("earlier", 600.0)
    journal.append([(TimerFired(), time.time() + 86_400.0)])
    journal.release()
    journal.close()

    async def talk() -> None:
        async with live(tmp_path) as cluster:
            found = (await conditions(await cluster.router("r")))["clock_ahead"]
            assert " s ahead of this machine's clock" in found["message"]

    run_live(talk)


def test_a_clock_that_is_right_is_no_condition(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            assert await conditions(await cluster.router("r")) == {}

    run_live(talk)
