"""GPU time is metered while a run is in flight."""

from plexrl.ids import DeploymentId
from plexrl.scheduler.accounting.usage import meter
from plexrl.scheduler.queries.views import usage_view
from tests.scheduler.fake_cluster import FakeCluster


def test_a_move_that_is_looked_at_several_times_is_billed_whole() -> None:
    cluster = FakeCluster()
    cluster.start_node(2)
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.submit("a:s", "a/actor", "optim_step")
    cluster.launch(cluster.launches[0])
    (load,) = cluster.runs
    state = cluster.core._context.state
    for seconds in (1.0, 2.0):
        cluster.now += seconds
        meter(state, state.deployments[DeploymentId("a/actor")], cluster.now)
    assert state.operations[load.operation].gpu_seconds == 2 * 3.0


def test_tokens_of_completed_operations_add_up() -> None:
    cluster = FakeCluster()
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/actor")
    for index, tokens in enumerate((100, 0, 50)):
        cluster.submit(f"a:{index}", "a/actor", "forward_backward", tokens=tokens)
    cluster.settle()
    (row,) = [
        each
        for each in usage_view(cluster.core.cluster.state, None)
        if each["kind"] == "forward_backward"
    ]
    assert (row["operations"], row["tokens"]) == (3, 150)
