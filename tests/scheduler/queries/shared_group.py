"""A small cluster of two jobs that share a group."""

from tests.scheduler.fake_cluster import FakeCluster


def two_jobs_on_one_group(history: int = 1000) -> FakeCluster:
    """Jobs `a` of tenant t and `b` of tenant u share two of four GPUs; `b` has the group."""
    cluster = FakeCluster(policy="pack", residents_max=2, history=history)
    cluster.start_node(4)
    for job, tenant in (("a", "t"), ("b", "u")):
        cluster.job(job, tenant)
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    for job in ("a", "b"):
        cluster.submit(f"{job}:1", f"{job}/actor", "forward")
        cluster.pass_time(10.0)
        cluster.settle()
    return cluster
