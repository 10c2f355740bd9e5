"""A cluster on which two jobs of two workers must share a group."""

from collections.abc import Iterator

import pytest

import plexrl
from plexrl.cluster.embedded.start import start_embedded


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[plexrl.Cluster]:
    running = start_embedded(tmp_path_factory.mktemp("two-gpus"), virtual_gpus=2, policy="pack")
    try:
        with plexrl.connect(running.url, running.api_key) as cluster:
            yield cluster
    finally:
        running.close()
