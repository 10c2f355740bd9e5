"""Pulls that read remote memory, over NIXL's UCX backend; without the package, that it is named."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def trainers(start_daemon: StartDaemon, *, serve_nixl: bool) -> Iterator[list[Rank]]:
    node = start_daemon(serve_nixl=serve_nixl, **SERVING_TCP)
    ranks = [Rank(node, "job/actor", rank, fsdp(rank, 2)) for rank in range(2)]
    for rank in ranks:
        rank.publish(1)
    yield ranks
    for rank in ranks:
        rank.close()


# One daemon for both, because NIXL takes 5 s of processor time to load.
@needs_nixl
def test_slices_are_read_from_the_memory_of_another_node(start_daemon: StartDaemon) -> None:
    with trainers(start_daemon, serve_nixl=True) as ranks:
        node = ranks[0].daemon
        assert node.tcp.startswith("nixl://")
        for dtype, versions in (("F32", (1, 2)), ("BF16", (3, 4))):
            rollout = Rank(node, f"job/rollout-{dtype}", 0, tensor_parallel(1, 2), dtype=dtype)
            for version in versions:
                for rank in ranks:
                    rank.publish(version)
                report = rollout.pull([node.tcp], version)
                assert report.bytes_by_source == {node.tcp: rollout.nbytes}
                assert rollout.holds(version)
            rollout.close()


def test_without_the_package_its_name_is_told(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with trainers(start_daemon, serve_nixl=False) as ranks:
        node = ranks[0].daemon
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
