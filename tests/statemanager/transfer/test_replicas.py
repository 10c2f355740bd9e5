"""Replicas of published versions on the nodes of their readers, through real daemons."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from plexrl.errors import PermissionDeniedError
from plexrl.statemanager.client.reports import PullReport
from plexrl.statemanager.protocol.connection import connect, exchange
from plexrl.statemanager.protocol.messages import ReplicaArrived, Replicate
from tests.statemanager.conftest import DEADLINE_S, Daemon, StartDaemon, wait_until
from tests.statemanager.weight_sync import SERVING_TCP, Rank, fsdp, tensor_parallel

ACTOR = "job/actor"
INSTANCES = 3


@pytest.fixture
def nodes(start_daemon: StartDaemon, request: pytest.FixtureRequest) -> list[Daemon]:
    """One or more with a trainer's ranks, and the last one with rollouts."""
    return [start_daemon(**SERVING_TCP) for _ in range(getattr(request, "param", 2))]


@pytest.fixture
def trainers(nodes: list[Daemon]) -> Iterator[list[Rank]]:
    """Four ranks, each with a quarter of the rows; small tensors are on all of them."""
    homes = [nodes[rank % (len(nodes) - 1)] for rank in range(4)]
    ranks = [
        Rank(home, ACTOR, rank, fsdp(rank, 4), world_size=4) for rank, home in enumerate(homes)
    ]
    yield ranks
    for rank in ranks:
        rank.close()


@pytest.fixture
def rollouts(nodes: list[Daemon]) -> Iterator[list[Rank]]:
    """Instances with the whole model, on one node."""
    ranks = [
        Rank(nodes[-1], f"job/rollout-{number}", 0, tensor_parallel(0, 1), world_size=1)
        for number in range(INSTANCES)
    ]
    yield ranks
    for rank in ranks:
        rank.close()


def pull(rank: Rank, nodes: list[Daemon], version: int) -> PullReport:
    return rank.client.pull(
        sources=[node.tcp for node in nodes[:-1]],
        source=ACTOR,
        seq=version,
        wants=rank.slices,
        replicate=True,
    )


def pull_all(rollouts: list[Rank], nodes: list[Daemon], version: int) -> list[PullReport]:
    """All pull at the same time."""
    with ThreadPoolExecutor(len(rollouts)) as pool:
        found = list(pool.map(lambda rank: pull(rank, nodes, version), rollouts))
    assert all(rank.holds(version) for rank in rollouts)
    return found


def versions_at(node: Daemon) -> list[dict[str, Any]]:
    """The trainer's published versions at a node, one for each rank."""
    with contextlib.closing(node.agent()) as agent:
        versions = agent.usage()["deployments"].get(ACTOR, {}).get("versions", [])
    return [each for each in versions if each["kind"] == "published"]


def published(node: Daemon) -> set[int]:
    return {int(each["seq"]) for each in versions_at(node)}


@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_a_node_with_several_instances_fetches_each_byte_once(
    nodes: list[Daemon], trainers: list[Rank], rollouts: list[Rank]
) -> None:
    for trainer in trainers:
        trainer.publish(1)
    # The first pull of one instance is direct: it would gain nothing by a replica.
    report = pull(rollouts[0], nodes, 1)
    assert report.bytes_replicated == 0
    assert set(report.bytes_by_source) == {node.tcp for node in nodes[:-1]}
    for rank in rollouts[1:]:
        pull(rank, nodes, 1)
    small_bytes = sum(piece.nbytes for piece in rollouts[0].slices[:2])
    for version in (2, 3, 4):
        for trainer in trainers:
            trainer.publish(version)
        reports = pull_all(rollouts, nodes, version)
        for report in reports:
            assert report.bytes_by_source == {nodes[-1].config.listen: rollouts[0].nbytes}
            assert report.bytes_moved == report.bytes_wanted
        fetched = sum(report.bytes_replicated for report in reports)
        # Once; some tensors are on two nodes.
        assert rollouts[0].nbytes <= fetched <= rollouts[0].nbytes + 2 * small_bytes
    assert published(nodes[-1]) == {3, 4}


def test_a_replica_is_prefetched_as_soon_as_the_version_is_published(
    nodes: list[Daemon], trainers: list[Rank], rollouts: list[Rank]
) -> None:
    for trainer in trainers:
        trainer.publish(1)
    pull_all(rollouts, nodes, 1)
    for trainer in trainers:
        trainer.publish(2)
    with contextlib.closing(nodes[-1].agent()) as agent:
        agent.prefetch(ACTOR, 2, sources=[nodes[0].tcp])
    wait_until(lambda: len([each for each in versions_at(nodes[-1]) if each["seq"] == 2]) == 4)
    for report in pull_all(rollouts, nodes, 2):
        assert report.bytes_replicated == 0
        assert set(report.bytes_by_source) == {nodes[-1].config.listen}


def has_arrived(rank: Rank, nodes: list[Daemon], version: int) -> bool:
    sources = [node.tcp for node in nodes[:-1]]
    return rank.client.has_arrived(sources=sources, source=ACTOR, seq=version, wants=rank.slices)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_one_instance_waits_only_for_the_copy_of_what_was_fetched_beside(
    nodes: list[Daemon], trainers: list[Rank], dtype: str
) -> None:
    """Also if it wants half of the bytes."""
    rank = Rank(nodes[-1], "job/rollout", 0, tensor_parallel(0, 1), dtype=dtype, world_size=1)
    for version in (1, 2):
        for trainer in trainers:
            trainer.publish(version)
        wait_until(partial(has_arrived, rank, nodes, version))
        report = pull(rank, nodes, version)
        assert set(report.bytes_by_source) == {nodes[-1].config.listen}
        assert report.bytes_replicated == 0
        assert report.transfer_s > 0
        assert dtype != "F32" or rank.holds(version)
    rank.close()


def test_what_costs_much_more_than_a_pull_is_not_fetched_beside(
    nodes: list[Daemon], trainers: list[Rank]
) -> None:
    """A quarter of the bytes is wanted."""
    rank = Rank(nodes[-1], "job/rollout", 0, tensor_parallel(0, 2), dtype="BF16", world_size=2)
    for trainer in trainers:
        trainer.publish(1)
    wait_until(lambda: has_arrived(rank, nodes, 1))
    report = pull(rank, nodes, 1)
    assert set(report.bytes_by_source) == {nodes[0].tcp}
    assert report.transfer_s == 0
    assert not published(nodes[-1])
    rank.close()


def test_a_version_that_cannot_be_fetched_is_not_waited_for(
    nodes: list[Daemon], trainers: list[Rank], rollouts: list[Rank]
) -> None:
    for trainer in trainers:
        trainer.publish(1)
    wait_until(lambda: has_arrived(rollouts[0], nodes, 7))
    assert pull(rollouts[0], nodes, 1).bytes_moved


def test_instances_that_want_less_than_the_version_pull_directly(
    nodes: list[Daemon], trainers: list[Rank]
) -> None:
    halves = [
        Rank(nodes[-1], "job/rollout", rank, tensor_parallel(rank, 2), dtype="BF16", world_size=2)
        for rank in range(2)
    ]
    for version in (1, 2):
        for trainer in trainers:
            trainer.publish(version)
        for report in pull_all(halves, nodes, version):
            assert report.bytes_replicated == 0
    assert not published(nodes[-1])
    for rank in halves:
        rank.close()


def test_a_replica_that_is_gone_is_no_loss(
    nodes: list[Daemon], trainers: list[Rank], rollouts: list[Rank]
) -> None:
    for trainer in trainers:
        trainer.publish(1)
    for _ in range(2):
        pull_all(rollouts, nodes, 1)
    assert published(nodes[-1]) == {1}
    with contextlib.closing(nodes[-1].agent()) as agent:
        agent.release(ACTOR)
    pull_all(rollouts, nodes, 1)
    assert published(nodes[-1]) == {1}


def test_a_source_that_is_away_during_the_fetch_is_awaited(
    nodes: list[Daemon], trainers: list[Rank], rollouts: list[Rank]
) -> None:
    for trainer in trainers:
        trainer.publish(1)
    for _ in range(2):
        pull_all(rollouts, nodes, 1)
    for trainer in trainers:
        trainer.publish(2)
    source = nodes[0]
    # At the same address.
    source.config = source.with_config(serve_tcp=source.tcp.removeprefix("tcp://"))
    source.kill()
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(pull_all, rollouts, nodes, 2)
        source.start()
        pulled.result(DEADLINE_S)


@pytest.mark.parametrize("kind", [Replicate, ReplicaArrived])
def test_a_worker_of_another_job_gets_no_replica(
    nodes: list[Daemon], trainers: list[Rank], kind: type[Replicate] | type[ReplicaArrived]
) -> None:
    for trainer in trainers:
        trainer.publish(1)
    ticket = nodes[-1].worker_ticket("other/rollout", 0, 1)
    request = kind(source=ACTOR, seq=1, addresses=(nodes[0].tcp,), nbytes=1 << 30)
    with (
        connect(nodes[-1].config.listen, DEADLINE_S, ticket) as channel,
        pytest.raises(PermissionDeniedError),
    ):
        exchange(channel, request)
    assert not published(nodes[-1])
