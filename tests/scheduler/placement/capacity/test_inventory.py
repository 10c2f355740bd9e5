"""The nodes that deployments may have to leave are known without a look at all of them."""

import pytest

from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster


def cluster_on_two_nodes() -> FakeCluster:
    """A deployment has all GPUs of `n`; nobody has those of `m`."""
    cluster = FakeCluster()
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/actor", workers=4)
    cluster.settle()
    cluster.join_node(node="m")
    return cluster


def unsettled(cluster: FakeCluster) -> list[str]:
    return [*cluster.core._context.cluster.capacity.inventory.unsettled]


@pytest.mark.parametrize("node", ["n", "m"])
def test_a_node_is_unsettled_for_as_long_as_it_drains(node: str) -> None:
    cluster = cluster_on_two_nodes()
    assert unsettled(cluster) == []
    cluster.send(ev.NodeDrainChanged(node=node, is_draining=True))
    assert unsettled(cluster) == [node]
    cluster.send(ev.NodeDrainChanged(node=node, is_draining=False))
    assert unsettled(cluster) == []


def test_a_node_is_unsettled_from_its_loss_until_it_is_back() -> None:
    cluster = cluster_on_two_nodes()
    cluster.lose_node("m")
    assert unsettled(cluster) == ["m"]
    cluster.join_node(node="m")
    assert unsettled(cluster) == []
