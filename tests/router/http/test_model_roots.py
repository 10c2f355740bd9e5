"""Over HTTP: an operator lists the directories below which a tenant may load models."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from plexrl.model.spec import tiny_qwen2
from tests.router.live_router import LiveRouter, live_router


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three directories with a model each; the router's root is the first."""
    folder = tmp_path_factory.mktemp("models")
    made = tiny_qwen2("01")
    for name in ("everyones", "tenants", "private"):
        (folder / name / "model").mkdir(parents=True)
        config = {**made.config, "model_type": made.architecture}
        (folder / name / "model" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def router(roots: Path) -> Iterator[LiveRouter]:
    with live_router(model_roots=[f"{roots}/everyones"]) as live:
        yield live


@contextmanager
def tenant_with_job(router: LiveRouter, name: str) -> Iterator[httpx.Client]:
    with router.client() as operator:
        key = operator.post("/v1/tenants", json={"name": name}).json()["api_key"]
    with router.client(key) as client:
        client.post("/v1/jobs", json={"job": f"job-{name}", "name": "j"}).raise_for_status()
        yield client


def deploy(client: httpx.Client, job: str, name: str, path: str) -> httpx.Response:
    body = {"name": name, "kind": "forward", "model": {"path": path}}
    return client.post(f"/v1/jobs/{job}/deployments", json=body)


def test_a_tenant_loads_models_below_its_roots_only(router: LiveRouter, roots: Path) -> None:
    with tenant_with_job(router, "a") as client, router.client() as operator:
        # The model may be loaded; what is refused is a deployment without any node.
        assert deploy(client, "job-a", "d0", f"{roots}/everyones/model").status_code == 503
        refused = [
            deploy(client, "job-a", "d1", f"{roots}/{way}/model") for way in ("tenants", "nothing")
        ]
        assert [each.status_code for each in refused] == [404, 404]
        assert refused[0].text.replace("tenants/model", "nothing/model") == refused[1].text
        settings = {"model_roots": [f"{roots}/tenants"]}
        changed = operator.patch("/v1/tenants/a", json=settings)
        assert changed.json()["model_roots"] == settings["model_roots"]
        assert deploy(client, "job-a", "d1", f"{roots}/tenants/model").status_code == 503
        assert deploy(client, "job-a", "d2", f"{roots}/private/model").status_code == 404
        # Another setting leaves the roots as they are.
        assert operator.patch("/v1/tenants/a", json={"weight": 2.0}).json()["model_roots"]


@pytest.mark.parametrize("root", ["models", "", "/a\nb", "none"])
def test_a_root_is_an_absolute_path(router: LiveRouter, root: str) -> None:
    with router.client() as operator:
        operator.post("/v1/tenants", json={"name": "c"})
        answer = operator.patch("/v1/tenants/c", json={"model_roots": [root]})
    assert answer.status_code == 400
    assert "model_roots" in answer.json()["error"]["message"]
