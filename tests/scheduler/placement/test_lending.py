"""Rollouts that lend their GPUs while they have nothing to run."""

from plexrl.ids import DeploymentId
from tests.scheduler.fake_cluster import FakeCluster


def full_cluster(*, lends: bool) -> FakeCluster:
    """Two rollouts have all GPUs of the only node."""
    cluster = FakeCluster()
    cluster.start_node(gpus=4)
    cluster.job("a")
    for name in ("a/r0", "a/r1"):
        cluster.deploy(name, kind="rollout", workers=2, lends=lends)
    cluster.job("b")
    cluster.deploy("b/actor")
    cluster.settle()
    return cluster


def group_of(cluster: FakeCluster, name: str) -> str | None:
    return cluster.core.deployment_view(DeploymentId(name), cluster.now)["group"]


def test_a_trainer_joins_a_rollout_that_lends_its_gpus_and_no_other_one() -> None:
    lending, usual = full_cluster(lends=True), full_cluster(lends=False)
    assert group_of(lending, "b/actor") in (group_of(lending, "a/r0"), group_of(lending, "a/r1"))
    assert group_of(usual, "b/actor") is None


def test_lending_rollouts_have_gpus_of_their_own() -> None:
    cluster = FakeCluster()
    cluster.start_node(gpus=8)
    cluster.job("a")
    cluster.deploy("a/actor")
    for name in ("a/r0", "a/r1"):
        cluster.deploy(name, kind="rollout", workers=2, lends=True)
    cluster.settle()
    assert len({group_of(cluster, each) for each in ("a/actor", "a/r0", "a/r1")}) == 3


def test_a_rollout_and_a_borrower_run_in_turns() -> None:
    cluster = full_cluster(lends=True)
    lender = next(
        x for x in ("a/r0", "a/r1") if group_of(cluster, x) == group_of(cluster, "b/actor")
    )
    for number in range(3):
        cluster.submit(f"generate{number}", lender, "generate")
        cluster.submit(f"step{number}", "b/actor", "forward_backward")
        cluster.settle()
        assert cluster.state_of(f"generate{number}") == "finished"
        assert cluster.state_of(f"step{number}") == "finished"


def test_the_same_rollout_may_be_created_again_with_the_same_settings() -> None:
    cluster = full_cluster(lends=True)
    before = group_of(cluster, "a/r0")
    cluster.deploy("a/r0", kind="rollout", workers=2, lends=True)
    assert group_of(cluster, "a/r0") == before
