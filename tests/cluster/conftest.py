"""A real cluster of real processes, shared by the tests of this folder and its sub-folders."""

from collections.abc import Iterator

import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    running = start_embedded(folder, virtual_gpus=8)
    yield running
    running.close()


@pytest.fixture
def cluster(embedded: EmbeddedCluster) -> Iterator[plexrl.Cluster]:
    with plexrl.connect(embedded.url, embedded.api_key) as connected:
        yield connected


@pytest.fixture
def job(cluster: plexrl.Cluster) -> Iterator[plexrl.Job]:
    with cluster.create_job("careless") as made:
        yield made
