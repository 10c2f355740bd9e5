"""A step of a group that is settled would decide nothing, whatever has happened before."""

from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.scheduler.dispatch.group_step import GroupStep
from plexrl.scheduler.dispatch.settled_groups import is_settled
from plexrl.scheduler.state.messages import events as ev
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.random_history import History

STEPS = 60


class Stepped(History):
    """A random history that takes the steps of settled groups all the same."""

    def deliver(self) -> None:
        super().deliver()
        self.step_settled_groups()

    def submit(self) -> None:
        super().submit()
        self.step_settled_groups()

    def step_settled_groups(self) -> None:
        core = self.cluster.core
        context = core._context
        for group in list(context.state.groups.values()):
            if is_settled(context, group):
                before = core.dump()
                GroupStep(context, group, self.cluster.now).advance()
                assert core.dump() == before, f"the step of {group.group} decided something"


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 1 << 30))
def test_the_step_of_a_settled_group_changes_nothing(seed: int) -> None:
    Stepped(seed).run(STEPS)


def shared_group() -> FakeCluster:
    cluster = FakeCluster(policy="pack")
    cluster.start_node()
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.run_until("a:1")
    return cluster


def is_one_settled(cluster: FakeCluster) -> bool:
    context = cluster.core._context
    (group,) = context.state.groups.values()
    return is_settled(context, group)


def test_a_group_is_settled_while_its_trainer_computes_and_while_it_is_offloaded() -> None:
    cluster = shared_group()
    assert is_one_settled(cluster)
    cluster.submit("b:1", "b/actor", "optim_step")
    assert is_one_settled(cluster)
    cluster.execute(cluster.runs[0])
    assert not is_one_settled(cluster)
    cluster.pass_time(60.0)
    assert [run.kind.value for run in cluster.runs] == ["offload"]
    assert is_one_settled(cluster)


def test_a_group_is_not_settled_while_a_checkpoint_is_queued() -> None:
    cluster = shared_group()
    cluster.submit("b:save", "b/actor", "save_checkpoint")
    assert not is_one_settled(cluster)
    cluster.settle()
    cluster.submit("a:2", "a/actor", "optim_step")
    assert cluster.state_of("b:save") == "finished"
    cluster.run_until("a:2")
    assert is_one_settled(cluster)


def test_a_group_is_not_settled_while_a_member_is_to_move() -> None:
    """An offloaded member leaves a drained node while the holder computes."""
    cluster = shared_group()
    cluster.submit("b:1", "b/actor", "optim_step")
    cluster.settle()
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.run_until("a:2")
    cluster.join_node(node="m")
    cluster.send(ev.NodeDrainChanged(node="n", is_draining=True))
    placed = {
        name: each.placement.nodes for name, each in cluster.core._context.state.deployments.items()
    }
    assert placed == {"a/actor": ("n",), "b/actor": ("m",)}
    assert cluster.state_of("a:2") == "running"
    # The holder's own move is planned, and begins between two operations.
    context = cluster.core._context
    (held,) = [group for group in context.state.groups.values() if group.holder == "a/actor"]
    assert not is_settled(context, held)


def test_a_checkpoint_that_waits_elsewhere_unsettles_no_group() -> None:
    cluster = shared_group()
    # Its deployment has no GPUs, so nothing can be saved for long.
    cluster.job("c")
    cluster.deploy("c/actor", workers=4)
    cluster.submit("c:save", "c/actor", "save_checkpoint")
    assert cluster.core._context.effects.for_stored
    assert is_one_settled(cluster)
