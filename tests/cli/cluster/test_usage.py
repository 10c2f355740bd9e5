"""`plexrl usage` adds up the use of jobs, and apart from it that of paced ones."""

import pytest

from plexrl.cli.cluster.observe.usage import By, add_up
from plexrl.scheduler.queries.views import usage_view
from tests.scheduler.fake_cluster import FakeCluster


def test_usage_of_a_paced_job_says_so() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(4)
    for name, pace in (("real", ""), ("paced", "h800:qwen2.5-7b")):
        cluster.job(name)
        cluster.deploy(f"{name}/a", workers=2, pace=pace)
        cluster.submit(f"{name}:1", f"{name}/a", "optim_step")
    for launch in list(cluster.launches):
        cluster.launch(launch)
    while cluster.runs:
        cluster.pass_time(5.0)
        cluster.execute(cluster.runs[0])
    rows = usage_view(cluster.core._context.state, None)
    assert {(row["name"], row["paced"]) for row in rows} == {("real", False), ("paced", True)}
    (total,) = add_up([row for row in rows if row["kind"] == "optim_step"], By.KIND)
    assert total.paced_gpu_hours == pytest.approx(20.0 / 3600)
    assert total.gpu_hours == pytest.approx(40.0 / 3600)
