"""A cluster for the clients of the Tinker SDK. What needs the SDK or torch is imported where it is
used, since the messages and the order of requests are also tested without them."""

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded

if TYPE_CHECKING:
    from tests.router.tinker.clients import Tenant


@pytest.fixture(scope="session", autouse=True)
def no_telemetry() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield


@pytest.fixture(autouse=True)
def no_sockets_left() -> Iterator[None]:
    """The SDK leaves the socket of its first request open: it is closed here, with its warning."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of models."""
    from tests.router.tinker.clients import model_folder

    folder = tmp_path_factory.mktemp("models")
    model_folder(folder / "tiny")
    return folder


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    folder = tmp_path_factory.mktemp("tinker")
    running = start_embedded(folder, virtual_gpus=4)
    yield running
    running.close()


@pytest.fixture(scope="session")
def tenant(cluster: EmbeddedCluster, roots: Path) -> "Tenant":
    """A tenant that may load the models."""
    from tests.router.tinker.clients import Tenant

    headers = {"Authorization": f"Bearer {cluster.api_key}"}
    with httpx.Client(base_url=cluster.url, headers=headers, timeout=60) as operator:
        key = operator.post("/v1/tenants", json={"name": "lab"}).json()["api_key"]
        settings = {"model_roots": [str(roots)]}
        operator.patch("/v1/tenants/lab", json=settings).raise_for_status()
    return Tenant(url=cluster.url, key=f"tml-{key}")
