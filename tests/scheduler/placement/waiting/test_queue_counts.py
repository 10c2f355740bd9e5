"""Queue counts agree with a scan of all waiting deployments."""

from hypothesis import given
from hypothesis import strategies as st

from plexrl.ids import DeploymentId
from plexrl.scheduler.placement.waiting.queue_counts import Position, QueueCounts
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster

TYPES = ("", "h", "a")
WAITING = st.lists(
    st.tuples(st.sampled_from(TYPES), st.integers(-2, 2), st.integers(0, 5), st.booleans()),
    min_size=1,
    max_size=30,
)


@given(WAITING)
def test_the_standing_equals_a_scan_of_all_waiting_deployments(
    waiting: list[tuple[str, int, int, bool]],
) -> None:
    counts = QueueCounts()
    everybody = {
        DeploymentId(f"j{index}/actor"): (
            node_type,
            Position(-priority, float(at), index, f"j{index}/actor"),
        )
        for index, (node_type, priority, at, _) in enumerate(waiting)
    }
    for node_type, place in everybody.values():
        counts.add(node_type, place)
    for index, (*_, leaves) in enumerate(waiting):
        if leaves:
            counts.remove(DeploymentId(f"j{index}/actor"))
            del everybody[DeploymentId(f"j{index}/actor")]
    assert len(counts) == len(everybody)
    for name, (node_type, place) in everybody.items():
        rivals = [
            other_place
            for other, (other_type, other_place) in everybody.items()
            if other != name and (node_type == other_type or "" in (node_type, other_type))
        ]
        ahead = sum(rival < place for rival in rivals)
        assert counts.standing(name) == (ahead, len(rivals))


def test_jobs_of_one_moment_get_gpus_in_the_order_of_their_arrival() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(1)
    names = [f"j{number}" for number in range(1, 13)]
    for name in names:
        cluster.job(name)
        cluster.deploy(f"{name}/a", workers=1)
    order = []
    for _ in names:
        deployments = cluster.core._context.state.deployments.values()
        (running,) = [each.job for each in deployments if each.placement.group]
        order.append(running)
        cluster.send(ev.JobFinished(job=running, outcome="completed"))
    assert order == names
