"""Three hosts over TLS: two nodes join, and one trainer's ranks span them."""

import pytest

from tests.hosts.cluster import HostCluster
from tests.hosts.jobs import Jobs
from tests.hosts.network import Network


# `tests/cluster/machines` has ranks on two nodes, `tests/cluster/join` has nodes that joined over
# TLS, and `tests/statemanager/hosts` has nodes on hosts.
@pytest.mark.slow
def test_a_trainer_spans_two_nodes_that_joined_over_tls(three_hosts: Network) -> None:
    cluster = HostCluster(three_hosts, gpus=1)
    assert {node["node"] for node in cluster.ask("nodes") if node["alive"]} == {"a", "b"}
    jobs = Jobs(cluster, {"trainer": 0}, workers=2)
    jobs.begin()
    (group,) = cluster.ask("groups")
    assert {gpu["node"] for gpu in group["gpus"]} == {"a", "b"}
    jobs.end_at({"trainer": 2})
    assert jobs.weights().keys() == {"trainer"}
    cluster.end()
    for node in cluster.nodes:
        assert node.processes("plexrl") == [], "processes outlive the node's supervisor"
