"""Calls for an operator's page at a live scheduler: totals, the journal, and who may ask."""

import asyncio
from pathlib import Path

import pytest

from plexrl.errors import InvalidRequestError, NotFoundError
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
