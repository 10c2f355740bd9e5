"""Specifications are requested once in each scope; assigned runs wait for them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import UnavailableError, UnknownDeploymentError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import tiny_qwen2
from plexrl.router.execution.deployment_specs import DeploymentSpecs, OwnedSpec
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.wire.rpc import Peer

SPEC = DeploymentSpec(
    model=tiny_qwen2("01"),
    kind="train",
    backend="fsdp",
    workers=2,
    parallelism=Parallelism(dp=2),
)

OWNED = OwnedSpec(SPEC, "t")


async def scheduler_at(address: Path, requests: list[dict[str, Any]]) -> asyncio.Server:
    """A scheduler with the deployment `j/a` of tenant `t`, and nothing else."""

    async def hello(peer: Peer, params: dict[str, Any]) -> dict[str, Any]:
        del peer, params
        return {}

    async def get_deployment(peer: Peer, params: dict[str, Any]) -> dict[str, Any]:
        del peer
        requests.append(params)
        seen = params["tenant"] == "t" or params.get("as_operator") is True
        if params["deployment"] != "j/a" or not seen:
            raise UnknownDeploymentError("there is none")
        return {"spec_json": SPEC.to_json(), "tenant": "t"}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Peer(reader, writer, {"hello": hello, "get_deployment": get_deployment}).run()

    return await asyncio.start_unix_server(serve, address)


def test_a_specification_is_requested_once_in_each_scope_and_for_each_incarnation(
    tmp_path: Path,
) -> None:
    async def read() -> list[dict[str, Any]]:
        requests: list[dict[str, Any]] = []
        server = await scheduler_at(tmp_path / "s", requests)
        link = SchedulerLink([f"unix:{tmp_path}/s"], "r", {})
        running = asyncio.create_task(link.run())
        await link.connected.wait()
        specs = DeploymentSpecs(link)
        for _ in range(2):
            assert await specs.read("j/a", "t") == OWNED
            for incarnation in (1, 2):
                assert await specs.await_own("j/a", incarnation) == OWNED
        with pytest.raises(UnknownDeploymentError):
            await specs.read("j/a", "other")
        with pytest.raises(UnknownDeploymentError):
            await specs.await_own("j/b", 1)
        running.cancel()
        server.close()
        return requests

    requests = asyncio.run(read())
    assert requests == [
        {"deployment": "j/a", "tenant": "t"},
        {"deployment": "j/a", "tenant": None, "as_operator": True},
        {"deployment": "j/a", "tenant": None, "as_operator": True},
        {"deployment": "j/a", "tenant": "other"},
        {"deployment": "j/b", "tenant": None, "as_operator": True},
    ]


def test_assigned_work_waits_for_an_unreachable_scheduler(tmp_path: Path) -> None:
    async def wait() -> OwnedSpec:
        link = SchedulerLink([f"unix:{tmp_path}/s"], "r", {})
        specs = DeploymentSpecs(link)
        with pytest.raises(UnavailableError):
            await specs.read("j/a", None)
        waiting = asyncio.create_task(specs.await_own("j/a", 1))
        running = asyncio.create_task(link.run())
        server = await scheduler_at(tmp_path / "s", [])
        async with asyncio.timeout(30):
            found = await waiting
        running.cancel()
        server.close()
        return found

    assert asyncio.run(wait()) == OWNED
