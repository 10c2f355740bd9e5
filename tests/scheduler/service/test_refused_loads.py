"""A load that the StateManager refuses, over the scheduler's socket."""

import asyncio
from pathlib import Path

from plexrl.errors import DeviceMemoryFullError
from plexrl.wire.rpc import Peer
from tests.scheduler.live_service import (
    Plain,
    barrier_of,
    deployment_of,
    job_of,
    live,
    pass_time,
    run_live,
)

A: Plain = {"tenant": "a"}


def test_a_refusal_of_some_ranks_restarts_workers_and_names_the_foreign_process(
    tmp_path: Path,
) -> None:
    runs: asyncio.Queue[Plain] = asyncio.Queue()
    launches: asyncio.Queue[Plain] = asyncio.Queue()

    async def run(_: Peer, params: Plain) -> None:
        runs.put_nowait(params["command"])

    async def launch(_: Peer, params: Plain) -> None:
        launches.put_nowait(params["command"])

    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await cluster.router("r", {"run": run})
            agent = await cluster.agent("n", {"launch": launch})
            await router.call("submit_job", job_of("a", "j"))
            await router.call("create_deployment", deployment_of(A, "j", workers=2))
            await router.call("submit_operation", barrier_of(A, "j/actor", "o"))
            for incarnation in (1, 2):
                command = await launches.get()
                assert command["incarnation"] == incarnation
                for rank in (0, 1):
                    fields = {"deployment": "j/actor", "incarnation": incarnation, "address": "x"}
                    await agent.call("worker_ready", {**fields, "rank": rank})
                if incarnation == 1:
                    load = await runs.get()
                    full = DeviceMemoryFullError(
                        "rank 1 needs more", rank=1, strangers={"4242": 1 << 40}
                    )
                    await router.call(
                        "operation_failed",
                        {
                            "operation": load["operation"],
                            "token": load["token"],
                            "error": full.to_wire(),
                            "state_intact": False,
                        },
                    )
            (condition,) = [
                each
                for each in (await router.call("conditions", {}))["conditions"]
                if each["code"] == "foreign_memory"
            ]
            assert "n: process 4242, which is no worker, holds" in condition["message"]
            pass_time(10.0)
            assert (await runs.get())["kind"] == "load", "it is tried again"

    run_live(talk)
