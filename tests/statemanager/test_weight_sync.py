"""Weight sync between layouts, dtypes and nodes, through real daemons."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from plexrl.statemanager.client import PullReport
from tests.statemanager.conftest import Daemon, StartDaemon
from tests.statemanager.weight_sync import Rank, fsdp, serving_tcp, tensor_parallel, whole

ACTOR, ROLLOUT = "job/actor", "job/rollout"


@pytest.fixture
def nodes(start_daemon: StartDaemon, tmp_path: Path) -> list[Daemon]:
    """Two that serve each other over TCP."""
    return [start_daemon(**serving_tcp(tmp_path)) for _ in range(2)]


@pytest.fixture
def trainers(nodes: list[Daemon]) -> Iterator[list[Rank]]:
    """Four ranks, two on a node, each with a quarter of the rows."""
    ranks = [Rank(nodes[rank // 2], ACTOR, rank, fsdp(rank, 4)) for rank in range(4)]
    yield ranks
    for rank in ranks:
        rank.close()


def check(report: PullReport, rank: Rank) -> None:
    """Every byte that was wanted came once."""
    assert report.bytes_moved == report.bytes_wanted == rank.nbytes
    assert sum(report.bytes_by_source.values()) == rank.nbytes


@pytest.mark.parametrize("way", ["shared memory", "tcp"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_two_tensor_parallel_ranks_pull_what_four_fsdp_ranks_published(
    nodes: list[Daemon], trainers: list[Rank], way: str, dtype: str
) -> None:
    sources = [node.config.listen if way == "shared memory" else node.tcp for node in nodes]
    rollouts = [
        Rank(nodes[rank], ROLLOUT, rank, tensor_parallel(rank, 2), dtype=dtype) for rank in range(2)
    ]
    for version in (1, 2, 3):
        for trainer in trainers:
            trainer.publish(version)
        for rollout in rollouts:
            report = rollout.pull(sources, version)
            check(report, rollout)
            assert set(report.bytes_by_source) == set(sources)
            assert rollout.holds(version)
    for rollout in rollouts:
        rollout.close()


def test_replicas_on_two_nodes_share_a_pull(nodes: list[Daemon]) -> None:
    boxes = [(name, whole(name)) for name in ("embed", "experts", "norm", "scale")]
    trainers = [Rank(node, ACTOR, rank, boxes) for rank, node in enumerate(nodes)]
    rollout = Rank(nodes[0], ROLLOUT, 0, boxes)
    for trainer in trainers:
        trainer.publish(1)
    report = rollout.pull([node.tcp for node in nodes], 1)
    check(report, rollout)
    # The two large tensors are within an eighth of each other.
    assert min(report.bytes_by_source.values()) > 0.4 * rollout.nbytes
    assert rollout.holds(1)
    for rank in (*trainers, rollout):
        rank.close()


def test_a_replica_takes_over_from_a_source_that_is_gone(nodes: list[Daemon]) -> None:
    boxes = [(name, whole(name)) for name in ("embed", "experts", "norm", "scale")]
    trainers = [Rank(node, ACTOR, rank, boxes) for rank, node in enumerate(nodes)]
    rollout = Rank(nodes[0], ROLLOUT, 0, boxes)
    for trainer in trainers:
        trainer.publish(1)
    sources = [node.tcp for node in nodes]
    nodes[1].kill()
    report = rollout.pull(sources, 1)
    assert set(report.bytes_by_source) == {sources[0]}
    assert rollout.holds(1)
    for rank in (*trainers, rollout):
        rank.close()
