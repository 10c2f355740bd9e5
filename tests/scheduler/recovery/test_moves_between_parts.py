"""A job moves among the groups into which a wider one is divided."""

from plexrl.ids import NodeId
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster


def nodes_of(cluster: FakeCluster, job: str) -> list[NodeId]:
    return cluster.core.explain_job(job, cluster.now)["deployments"][0]["nodes"]


def test_a_job_moves_from_one_part_of_a_wider_job_to_the_other() -> None:
    """The border between both parts goes once nobody needs it, and not before the move."""
    cluster = FakeCluster(policy="spread", anticipation=False)
    for node in ("n0", "n1"):
        cluster.join_node(2, node)
    cluster.join_router()
    trace = DemandTrace(period_s=100.0, segments=(Segment(offset_s=0.0, duration_s=20.0),))
    for job, workers in (("wide", 4), ("small", 2)):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=workers, trace=trace)
    cluster.settle()
    assert nodes_of(cluster, "small") == ["n0"]
    cluster.send(ev.NodeDrainChanged(node="n0", is_draining=True))
    cluster.settle()
    assert nodes_of(cluster, "small") == ["n1"]
    assert nodes_of(cluster, "wide") == ["n0", "n1"]
    for job in ("wide", "small"):
        cluster.submit(f"{job}:1", f"{job}/actor", "optim_step")
    cluster.settle()
    assert [cluster.state_of(f"{job}:1") for job in ("wide", "small")] == ["finished"] * 2
