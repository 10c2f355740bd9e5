"""Simulated hosts for tests; without rights to make namespaces these tests are skipped."""

from collections.abc import Iterator

import pytest

from tests.hosts.network import Network, hosts, why_impossible


@pytest.fixture(scope="session")
def _namespaces() -> None:
    reason = why_impossible()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def three_hosts(_namespaces: None) -> Iterator[Network]:
    """The hosts `head`, `a` and `b`."""
    with hosts("head", "a", "b") as network:
        yield network
