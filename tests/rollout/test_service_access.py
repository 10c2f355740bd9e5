"""What the rollout service may do with the operator's key, and how much a job may ask of it."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from plexrl.errors import QuotaExceededError
from plexrl.rollout.service.cluster_calls import OperatorAccess
from plexrl.rollout.service.config import RolloutConfig
from plexrl.rollout.service.server import RolloutService
from plexrl.router.execution.rollout_link import RolloutLink
from tests.router.live_router import OPERATOR_KEY, live_router


def config(folder: Path, **settings: Any) -> RolloutConfig:
    (folder / "operator.key").write_text(OPERATOR_KEY)
    return RolloutConfig(
        listen=(f"unix:{folder}/r.sock",),
        routers=("http://127.0.0.1:1",),
        data_dir=str(folder),
        **settings,
    )


def test_a_rotated_key_is_read_again_once_the_former_one_is_revoked(tmp_path: Path) -> None:
    access = OperatorAccess(config(tmp_path))
    with (
        live_router() as router,
        router.client() as operator,
        httpx.Client(base_url=router.url, auth=access) as service,
    ):
        assert service.get("/v1/jobs").status_code == 200
        (former,) = operator.get("/v1/tenants/operator/keys").json()["keys"]
        made = operator.post("/v1/tenants/operator/keys").json()["api_key"]
        with router.client(made) as renewed:
            path = f"/v1/tenants/operator/keys/{former['key']}"
            assert renewed.delete(path).status_code == 204
        assert service.get("/v1/jobs").status_code == 401
        (tmp_path / "operator.key").write_text(made)
        assert service.get("/v1/jobs").status_code == 200
        assert access.key == made


def test_a_job_has_a_bounded_number_of_rollouts(tmp_path: Path) -> None:
    service = RolloutService(config(tmp_path, job_rollouts_max=2))

    def order(job: str, name: str) -> dict[str, Any]:
        return {
            "job": job,
            "name": name,
            "source": "actor",
            "instances": ["r-0"],
            "staleness": 1,
            "prompts": 2,
            "samples": 2,
            "sampling": {"seed": 1},
        }

    async def talk() -> None:
        servers = await service.open()
        link = RolloutLink(f"unix:{tmp_path}/r.sock", None)

        async def create(job: str, name: str) -> None:
            await link.call("create", {"order": order(job, name), "wait_s": 0.0}, timeout_s=20)

        async with asyncio.TaskGroup() as tasks:
            service.start(tasks)
            await create("a", "first")
            await create("a", "second")
            with pytest.raises(QuotaExceededError, match="job 'a' has 2 asynchronous rollouts"):
                await create("a", "third")
            # A rollout that exists is no further one, and each job has its own share.
            await create("a", "first")
            await create("b", "third")
            found = await link.call("list", {"job": "a"}, timeout_s=20)
            assert [each["name"] for each in found["rollouts"]] == ["first", "second"]
            await link.close()
            for server in servers:
                server.close()
            await service.close()

    asyncio.run(talk())
