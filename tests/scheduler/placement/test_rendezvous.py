"""Ranks of several machines meet at a port of rank 0's node that no other ranks use."""

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from plexrl.errors import CapacityError, InvalidRequestError
from plexrl.scheduler.operations.held.holding import held_view
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

PORTS = (7000, 7003)


def networked(nodes: int = 2, *, fabric: str = "trusted", **fields: object) -> FakeCluster:
    """A cluster whose nodes are machines of 4 GPUs each."""
    cluster = FakeCluster()
    join(cluster, nodes, fabric=fabric, **fields)
    cluster.join_router()
    return cluster


def join(cluster: FakeCluster, nodes: int, **fields: object) -> None:
    for index in range(nodes):
        machine = {"host": f"10.0.0.{index}", "ports": PORTS, **fields}
        cluster.join_node(node=f"n{index}", **machine)


def start(cluster: FakeCluster, job: str, workers: int, **fields: object) -> None:
    cluster.job(job)
    cluster.deploy(f"{job}/a", workers=workers, **fields)


def test_ranks_of_two_machines_meet_at_a_port_and_at_another_one_next_time() -> None:
    cluster = networked()
    start(cluster, "j", 8)
    (first,) = cluster.launches
    assert first.rendezvous == "10.0.0.0:7000"
    cluster.settle()
    cluster.kill("j/a")
    (second,) = cluster.launches
    assert (second.incarnation, second.rendezvous) == (first.incarnation + 1, "10.0.0.0:7001")


def test_an_ipv6_host_is_written_in_brackets() -> None:
    cluster = networked(2, host="fd00::1")
    start(cluster, "j", 8)
    assert cluster.launches[0].rendezvous == "[fd00::1]:7000"


@pytest.mark.parametrize("fabric", ["", "trusted"])
def test_ranks_of_one_machine_meet_at_a_file(fabric: str) -> None:
    cluster = networked(fabric=fabric)
    start(cluster, "j", 4)
    assert cluster.launches[0].rendezvous == ""


def test_nodes_of_the_schedulers_machine_need_no_port() -> None:
    cluster = FakeCluster()
    cluster.join_node(node="n0")
    cluster.join_node(node="n1")
    start(cluster, "j", 8)
    assert len({rank.node for rank in cluster.launches[0].ranks}) == 2
    assert cluster.launches[0].rendezvous == ""


def test_a_group_over_nodes_that_do_not_trust_their_network_is_refused_with_the_reason() -> None:
    cluster = networked(fabric="")
    cluster.job("j")
    with pytest.raises(CapacityError, match="fabric = 'trusted'"):
        cluster.deploy("j/a", workers=8)


def test_trusted_nodes_do_not_share_a_group_with_others() -> None:
    cluster = FakeCluster()
    cluster.join_node(node="local")
    join(cluster, 1, fabric="trusted")
    cluster.join_node(node="alone", host="10.0.0.9", ports=PORTS)
    cluster.job("j")
    with pytest.raises(CapacityError):
        cluster.deploy("j/a", workers=5)
    cluster.join_node(node="n1", host="10.0.0.1", ports=PORTS, fabric="trusted")
    cluster.deploy("j/a", workers=5)
    assert {rank.node for rank in cluster.launches[0].ranks} == {"n0", "n1"}


def test_explain_says_how_the_nodes_of_a_group_lie_to_each_other() -> None:
    def topology(*blocks: str) -> str:
        cluster = FakeCluster()
        for index, block in enumerate(blocks):
            cluster.join_node(node=f"n{index}", block=block)
        start(cluster, "j", 4 * len(blocks))
        (view,) = cluster.core.explain_job("j", cluster.now)["deployments"]
        return str(view["topology"])

    assert topology("") == "1 node, without a block"
    assert topology("row1/rack3", "row1/rack3") == "2 nodes in row1/rack3"
    found = topology("row1/rack10", "row1/rack9", "row1/rack9")
    assert found == "3 nodes in 2 blocks of row1 (row1/rack9, row1/rack10)"
    assert topology("row1/a", "row2/a") == "2 nodes in 2 blocks of several parts (row1/a, row2/a)"


def test_a_group_leaves_a_node_whose_network_is_not_trusted_any_more() -> None:
    cluster = networked(3)
    start(cluster, "j", 8)
    cluster.submit("o1", "j/a", "optim_step")
    cluster.settle()
    cluster.nodes["n1"] = replace(cluster.nodes["n1"], fabric="")
    cluster.join_node(node="n1")
    cluster.submit("o2", "j/a", "optim_step")
    cluster.settle()
    assert cluster.state_of("o2") == "finished"
    view = cluster.core.deployment_view("j/a", cluster.now)
    assert {rank["node"] for rank in view["ranks"]} == {"n0", "n2"}


def test_a_group_with_no_other_nodes_waits_until_its_network_is_trusted_again() -> None:
    cluster = networked(2)
    start(cluster, "j", 8)
    cluster.settle()
    trusted = cluster.nodes["n1"]
    cluster.nodes["n1"] = replace(trusted, fabric="")
    cluster.join_node(node="n1")
    cluster.submit("o", "j/a", "optim_step")
    cluster.settle()
    assert cluster.launches == []
    assert cluster.state_of("o") == "pending"
    cluster.nodes["n1"] = trusted
    cluster.join_node(node="n1")
    cluster.settle()
    assert cluster.state_of("o") == "finished"


def test_a_waiting_group_is_explained_by_the_networks_that_are_not_trusted() -> None:
    cluster = networked(2)
    cluster.join_node(node="alone", host="10.0.0.9", ports=PORTS)
    start(cluster, "j", 8)
    cluster.settle()
    start(cluster, "k", 5, exclusive=True)
    (view,) = cluster.core.explain_job("k", cluster.now)["deployments"]
    assert view["attempts"]
    cluster.send(ev.NodeDrainChanged(node="n1", is_draining=True))
    summary = cluster.core.explain_job("k", cluster.now)["summary"]
    assert "groups do not span alone" in summary


def test_a_node_without_a_free_port_delays_the_launch_until_there_is_one() -> None:
    cluster = networked(2, ports=(7000, 7000))
    start(cluster, "j", 8)
    start(cluster, "k", 8)
    (launch,) = cluster.launches
    cluster.launch(launch)
    cluster.pass_time(10.0)
    assert cluster.launches == []
    assert cluster.core.deployment_view("k/a", cluster.now)["state"] == "launching"
    cluster.submit("o", "k/a", "forward")
    (condition,) = held_view(cluster.core.cluster.state, sees_all=True)
    assert "7000 to 7000 of node 'n0'" in condition["message"]
    cluster.send(ev.JobFinished(job="j", outcome="completed"))
    cluster.settle()
    assert cluster.state_of("o") == "finished"


@pytest.mark.parametrize("ports", [(0, 5), (9, 8), (70_000, 70_001), (-1, 4)])
def test_an_impossible_range_of_ports_is_refused(ports: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError, match="ports of node"):
        networked(1, ports=ports)


@dataclass
class Meetings:
    """A slow account of who meets where, from the commands alone."""

    live: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Incarnation and rendezvous of each WPG whose processes were not stopped."""
    launched: int = 0

    def take(self, commands: list[cmd.Command]) -> None:
        for command in commands:
            if isinstance(command, cmd.StopWorkers):
                found = self.live.get(command.deployment)
                if found is not None and found[0] <= command.incarnation:
                    del self.live[command.deployment]
            elif isinstance(command, cmd.LaunchWorkers):
                nodes = {rank.node for rank in command.ranks}
                assert bool(command.rendezvous) == (len(nodes) > 1)
                self.live[command.deployment] = command.incarnation, command.rendezvous
                if not command.rendezvous:
                    continue
                self.launched += 1
                host, port = command.rendezvous.split(":")
                assert host == "10.0.0." + command.ranks[0].node.removeprefix("n")
                assert PORTS[0] <= int(port) <= PORTS[1]
                others = [
                    rendezvous
                    for name, (_, rendezvous) in self.live.items()
                    if name != command.deployment
                ]
                assert command.rendezvous not in others, f"{command} meets at another WPG's port"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "kill", "end", "settle", "lose", "join", "restart"]),
        st.integers(0, 5),
        st.sampled_from([2, 5, 6, 8]),
    ),
    min_size=5,
    max_size=40,
)


def settle_but_for_ports(cluster: FakeCluster) -> None:
    """As `settle`, but a start that waits until another WPG leaves its port is retried a few times
    only."""
    for _ in range(20):
        while cluster.launches or cluster.migrations or cluster.runs:
            if cluster.launches:
                cluster.launch(cluster.launches[0])
            elif cluster.migrations:
                cluster.migrate(cluster.migrations[0])
            else:
                cluster.execute(cluster.runs[0])
        if cluster.timer_at is None or cluster.timer_at >= cluster.now + 100:
            return
        cluster.pass_time(cluster.timer_at - cluster.now)


@settings(max_examples=examples(120), deadline=None)
@given(STEPS)
@example(
    # The fifth WPG that spans two nodes waits for one of the four ports.
    [*[("start", 0, 5)] * 5, ("settle", 0, 2), ("end", 1, 2), ("settle", 0, 2)]
)
def test_no_two_live_wpgs_of_a_node_share_a_port(steps: list[tuple[str, int, int]]) -> None:
    cluster, meetings = networked(4), Meetings()
    taking = cluster.take

    def take(commands: list[cmd.Command]) -> None:
        meetings.take(commands)
        taking(commands)

    cluster.take = take  # type: ignore[method-assign]
    jobs = 0
    for what, which, workers in steps:
        names = sorted(meetings.live)
        if what == "start":
            jobs += 1
            start(cluster, f"j{jobs}", workers)
        elif what == "kill" and names:
            cluster.kill(names[which % len(names)])
        elif what == "end" and names:
            job = names[which % len(names)].split("/")[0]
            cluster.send(ev.JobFinished(job=job, outcome="completed"))
        elif what == "settle":
            settle_but_for_ports(cluster)
        elif what == "lose":
            cluster.lose_node(f"n{which % 4}")
        elif what == "join":
            cluster.join_node(node=f"n{which % 4}")
        elif what == "restart":
            cluster.restart_scheduler(restored=which % 2 == 0)
