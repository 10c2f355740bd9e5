"""Nodes that are removed: only without work, and as new nodes if they come back."""

import pytest

from plexrl.errors import ConflictError, NotFoundError
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.recovery.test_relocation import cluster_of, drain, explained, with_jobs


def names(core: SchedulerCore) -> list[str]:
    return [each["node"] for each in core.list_nodes()]


def test_a_drained_node_is_removed_once_its_work_is_elsewhere() -> None:
    cluster = cluster_of()
    with_jobs(cluster, "a")
    cluster.submit("a:0", "a/actor", "forward_backward")
    cluster.settle()
    drain(cluster, "n0")
    with pytest.raises(ConflictError, match="'a/actor'"):
        cluster.core.handle(ev.NodeRemoved(node="n0"), cluster.now)
    assert names(cluster.core) == ["n0", "n1"]
    cluster.pass_time(31.0)
    cluster.settle()
    assert explained(cluster, "a")["nodes"] == ["n1"]
    cluster.send(ev.NodeRemoved(node="n0"))
    assert names(cluster.core) == ["n1"]
    cluster.core.check_invariants()
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.settle()
    assert cluster.state_of("a:1") == "finished"
    restored = SchedulerCore.restore(cluster.config, cluster.core.dump())
    restored.check_invariants()
    assert names(restored) == ["n1"]


def test_a_node_in_use_and_an_unknown_one_are_not_removed() -> None:
    cluster = cluster_of()
    with pytest.raises(ConflictError, match="drain it first"):
        cluster.core.handle(ev.NodeRemoved(node="n0"), cluster.now)
    with pytest.raises(NotFoundError):
        cluster.core.handle(ev.NodeRemoved(node="n7"), cluster.now)
    assert names(cluster.core) == ["n0", "n1"]


def test_a_dead_node_with_the_only_copy_of_a_state_is_not_removed() -> None:
    cluster = cluster_of()
    with_jobs(cluster, "a")
    cluster.submit("a:0", "a/actor", "forward_backward")
    cluster.settle()
    cluster.send(ev.NodeLost(node="n0"))
    with pytest.raises(ConflictError, match="still has state"):
        cluster.core.handle(ev.NodeRemoved(node="n0"), cluster.now)


def test_a_removed_node_that_comes_back_is_a_new_one() -> None:
    cluster = cluster_of()
    drain(cluster, "n0")
    cluster.send(ev.NodeRemoved(node="n0"))
    # Its agent's connection may end after the removal.
    cluster.send(ev.NodeLost(node="n0"))
    assert names(cluster.core) == ["n1"]
    cluster.join_node(2, "n0")
    (found,) = [each for each in cluster.core.list_nodes() if each["node"] == "n0"]
    assert (found["alive"], found["is_draining"]) == (True, False)
    cluster.core.check_invariants()
