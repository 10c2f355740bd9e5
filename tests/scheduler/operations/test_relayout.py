"""A rollout deployment whose GPUs are divided in another way."""

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.ids import DeploymentId
from plexrl.wire import messages as cmd
from tests.scheduler.fake_cluster import FakeCluster


@pytest.fixture
def cluster() -> FakeCluster:
    made = FakeCluster()
    made.start_node()
    made.job("a")
    made.deploy("a/actor")
    made.deploy("a/rollout", kind="rollout")
    made.settle()
    return made


def test_its_workers_start_again_and_repeat_what_they_ran(cluster: FakeCluster) -> None:
    cluster.submit("a:sync", "a/rollout", "sync_weights", source="a/actor")
    cluster.settle()
    cluster.submit("a:generate", "a/rollout", "generate")
    assert [run.operation for run in cluster.runs] == ["a:generate"]
    before = cluster.core.deployment_view(DeploymentId("a/rollout"), cluster.now)
    sent = cluster.relayout("a/rollout", "{other}")
    (launch,) = (each for each in sent if isinstance(each, cmd.LaunchWorkers))
    assert (launch.spec_json, launch.incarnation) == ("{other}", before["incarnation"] + 1)
    assert [rank.gpu for rank in launch.ranks] == [rank["gpu"] for rank in before["ranks"]]
    cluster.settle()
    assert cluster.state_of("a:generate") == "finished"
    # The controller that comes back creates it with the first layout.
    cluster.deploy("a/rollout", kind="rollout")
    view = cluster.core.deployment_view(DeploymentId("a/rollout"), cluster.now)
    assert view["spec_json"] == "{other}"
    assert not cluster.relayout("a/rollout", "{other}")


def test_a_rollout_that_waits_for_gpus_starts_with_the_new_layout() -> None:
    cluster = FakeCluster()
    cluster.start_node(gpus=4)
    for job in "ba":
        cluster.job(job)
    cluster.deploy("b/rollout", kind="rollout", workers=4)
    cluster.deploy("a/rollout", kind="rollout", workers=4)
    assert not cluster.relayout("a/rollout", "{other}")
    cluster.join_node(4, node="m")
    assert [each.spec_json for each in cluster.launches if each.deployment == "a/rollout"] == [
        "{other}"
    ]


def test_only_a_rollout_has_another_layout(cluster: FakeCluster) -> None:
    with pytest.raises(InvalidRequestError, match="a train deployment"):
        cluster.relayout("a/actor", "{other}")
