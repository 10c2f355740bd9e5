"""One API server for all tests of this folder, and a namespace for each."""

from collections.abc import Iterator

import pytest

from tests.cluster.kubernetes.api_server import Kubernetes, running_kubernetes


@pytest.fixture(scope="session")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    with running_kubernetes(tmp_path_factory.mktemp("kubernetes")) as server:
        yield server


@pytest.fixture
def namespace(kubernetes: Kubernetes) -> Iterator[str]:
    with kubernetes.namespace() as name:
        yield name
