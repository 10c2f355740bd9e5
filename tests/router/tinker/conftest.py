"""A cluster for the clients of the Tinker SDK. What needs the SDK or torch is imported where it is
used, since the messages and the order of requests are also tested without them."""

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded

if TYPE_CHECKING:
    from tests.router.tinker.clients import Tenant
    from tests.router.tinker.load_balancer import LoadBalancer


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
    from tests.router.tinker.clients import add_tenant

    return add_tenant(cluster, roots, cluster.url)


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """A cluster with two routers."""
    running = start_embedded(tmp_path_factory.mktemp("routers"), virtual_gpus=4, routers=2)
    yield running
    running.close()


@pytest.fixture(scope="module")
def balancer(routers: EmbeddedCluster) -> "Iterator[tuple[str, LoadBalancer]]":
    """Its load balancer, which gives each request to the next router, and the URL of that."""
    from tests.router.tinker.load_balancer import balanced

    with balanced(routers.url.split(",")) as found:
        yield found


@pytest.fixture(scope="module")
def lab(routers: EmbeddedCluster, balancer: "tuple[str, LoadBalancer]", roots: Path) -> "Tenant":
    """A tenant whose requests go through the load balancer."""
    from tests.router.tinker.clients import add_tenant

    return add_tenant(routers, roots, balancer[0])
