"""Pulls that read remote memory, over NIXL's UCX backend; without the package, that it is named."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from plexrl.errors import InvalidRequestError, UnavailableError
from plexrl.statemanager.config import StateManagerConfig
from tests.statemanager.conftest import StartDaemon
from tests.statemanager.weight_sync import SERVING_TCP, Rank, fsdp, tensor_parallel

HAS_NIXL = find_spec("nixl") is not None
needs_nixl = pytest.mark.skipif(
    not HAS_NIXL, reason="the package nixl is not installed: pip install 'plexrl[nixl]'"
)


@pytest.fixture
def trainers(start_daemon: StartDaemon) -> Iterator[list[Rank]]:
    node = start_daemon(serve_nixl=HAS_NIXL, **SERVING_TCP)
    ranks = [Rank(node, "job/actor", rank, fsdp(rank, 2)) for rank in range(2)]
    for rank in ranks:
        rank.publish(1)
    yield ranks
    for rank in ranks:
        rank.close()


@needs_nixl
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_slices_are_read_from_the_memory_of_another_node(trainers: list[Rank], dtype: str) -> None:
    node = trainers[0].daemon
    rollout = Rank(node, "job/rollout", 0, tensor_parallel(1, 2), dtype=dtype)
    for version in (1, 2):
        for trainer in trainers:
            trainer.publish(version)
        report = rollout.pull([node.tcp], version)
        assert report.bytes_by_source == {node.tcp: rollout.nbytes}
        assert node.tcp.startswith("nixl://")
        assert rollout.holds(version)
    rollout.close()


def test_without_the_package_its_name_is_told(
    trainers: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    node = trainers[0].daemon
    rollout = Rank(node, "job/rollout", 0, tensor_parallel(1, 2))
    with pytest.raises(UnavailableError, match="needs the package nixl"):
        rollout.pull([node.tcp.replace("tcp://", "nixl://")], 1)
    rollout.close()


def test_rdma_needs_tcp_to_open_versions_over() -> None:
    with pytest.raises(InvalidRequestError, match="set serve_tcp and fabric"):
        StateManagerConfig(
            node="n",
            listen="s",
            host_dir="h",
            host_bytes=1,
            nvme_dir="n",
            nvme_bytes=1,
            serve_nixl=True,
        )
