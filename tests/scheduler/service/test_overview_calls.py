"""Calls for an operator's page at a live scheduler: totals, the journal, and who may ask."""

import asyncio
from pathlib import Path

import pytest

from plexrl.errors import InvalidRequestError, NotFoundError
from plexrl.ids import JobId
from plexrl.scheduler.queries.overview.runs import history_since
from plexrl.wire.rpc import Peer
from tests.scheduler.live_service import (
    OPERATOR,
    Plain,
    barrier_of,
    deployment_of,
    job_of,
    live,
    run_live,
)

A: Plain = {"tenant": "a"}
B: Plain = {"tenant": "b"}


def test_totals_count_what_ended_and_only_operators_see_them(tmp_path: Path) -> None:
    async def run() -> None:
        async with live(tmp_path) as clients:
            router = await clients.router()
            await clients.agent("n")
            await router.call("submit_job", job_of("a", "j"))
            await router.call("create_deployment", deployment_of(A, "j"))
            for name in ("one", "two"):
                await router.call("submit_operation", barrier_of(A, "j/actor", name))
                await router.call("cancel_operation", {**A, "operation": name})
            view = await router.call("overview", OPERATOR)
            (row,) = view["operations"]
            assert (row["kind"], row["state"], row["operations"]) == ("barrier", "cancelled", 2)
            assert view["journal"]["events"] > 5
            assert view["journal"]["is_held"] is False
            before = view["journal"]["events"]
            await router.call("submit_operation", barrier_of(A, "j/actor", "three"))
            after = (await router.call("overview", OPERATOR))["journal"]["events"]
            assert after == before + 1
            own = await router.call("overview", A)
            assert not {"operations", "journal", "switches"} & own.keys()
            assert (own["jobs_live"], (await router.call("overview", B))["jobs_live"]) == (1, 0)

    run_live(run)


def test_other_tenants_and_bad_windows_are_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with live(tmp_path) as clients:
            router = await clients.router()
            await clients.agent("n")
            await router.call("submit_job", job_of("a", "j"))
            assert (await router.call("job_times", {**A, "job": "j"}))["rows"] == []
            with pytest.raises(NotFoundError):
                await router.call("job_times", {**B, "job": "j"})
            for window in ({"seconds": 0.0}, {"seconds": 1.0, "until_s": -1.0}):
                with pytest.raises(InvalidRequestError):
                    await router.call("read_lanes", {**OPERATOR, **window})
            with pytest.raises(InvalidRequestError):
                await router.call("read_queue", {**OPERATOR, "which": "all"})

    run_live(run)


def test_others_are_answered_while_a_long_answer_is_made(tmp_path: Path) -> None:
    """A page of the queue explains one row at a time: a short request that came later is answered
    before it."""

    async def run() -> None:
        async with live(tmp_path) as clients:
            router, other = await clients.router(), await clients.router("other")
            await clients.agent("n")
            for index in range(60):
                await router.call("submit_job", job_of("a", f"j{index}"))
                await router.call("create_deployment", deployment_of(A, f"j{index}", workers=2))
            ended: list[str] = []

            async def note(name: str, call: "asyncio.Future[Plain]") -> None:
                await call
                ended.append(name)

            page = router.call("read_queue", {**OPERATOR, "which": "gpus", "limit": 60})
            short = other.call("get_job", {**A, "job": "j0"})
            await asyncio.gather(
                note("page", asyncio.ensure_future(page)),
                note("short", asyncio.ensure_future(short)),
            )
            assert ended == ["short", "page"]

    run_live(run)


def test_lanes_reach_back_to_the_archive_when_memory_has_forgotten(tmp_path: Path) -> None:
    async def finish(router: Peer, params: Plain) -> None:
        done = {name: params["command"][name] for name in ("operation", "token")}
        await router.call("operation_finished", {**done, "compute_s": 0.1})

    launches: asyncio.Queue[Plain] = asyncio.Queue()

    async def launch(_: Peer, params: Plain) -> None:
        launches.put_nowait(params["command"])

    async def run() -> None:
        changes = {"history": 4, "snapshot_events": 8, "archive_url": str(tmp_path / "history")}
        async with live(tmp_path, **changes) as clients:
            router = await clients.router("r", {"run": finish})
            agent = await clients.agent("n", {"launch": launch})
            await router.call("submit_job", job_of("a", "j"))
            await router.call("create_deployment", deployment_of(A, "j"))
            await launches.get()
            ready = {"deployment": "j/actor", "incarnation": 1, "address": "x", "rank": 0}
            await agent.call("worker_ready", ready)
            for number in range(40):
                await router.call("submit_operation", barrier_of(A, "j/actor", f"o{number}"))
                await router.call(
                    "wait_operation", {**A, "operation": f"o{number}", "timeout_s": 9.0}
                )
            shell = clients.service.shell
            began = shell.core.cluster.state.jobs[JobId("j")].submitted_at
            since = history_since(shell.core.cluster.state)
            assert since is not None
            window = {"seconds": 3600.0}
            while True:
                view = await router.call("read_lanes", {**OPERATOR, **window})
                if view["oldest"] < since - (since - began) / 3:
                    break
            (lane,) = view["lanes"]
            assert lane["is_gone"] is False
            assert lane["spans"][0][0] + view["since"] < since
            assert view["gaps"][0][0] == 0.0
            assert (await router.call("read_lanes", {**B, **window}))["lanes"] == []

    run_live(run)
