"""The five tables of states, and the modules that follow them."""

from enum import StrEnum

import pytest

from plexrl.ids import DeploymentId, GroupId, JobId
from plexrl.scheduler.state import group_lock
from plexrl.scheduler.state.demand.estimates import Estimates
from plexrl.scheduler.state.deployment.demand import Demand
from plexrl.scheduler.state.deployment.placement import Placement
from plexrl.scheduler.state.deployment.spec import RequestedSpec
from plexrl.scheduler.state.machines import (
    job_states,
    operation_states,
    residency_states,
    wpg_states,
)
from plexrl.scheduler.state.machines.job_states import JobState
from plexrl.scheduler.state.machines.lock_states import LockState
from plexrl.scheduler.state.machines.transitions import IllegalTransitionError
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.operations import OperationState
from scripts.state_machines import TABLES
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.recovery.test_relocation import cluster_of

INITIAL: dict[str, StrEnum] = {
    "job": JobState.QUEUED,
    "wpg": WpgState.WAITING,
    "residency": residency_states.Residency.NONE,
    "lock": LockState.FREE,
    "operation": OperationState.PENDING,
}
FINAL: dict[str, set[StrEnum]] = {
    "job": set(job_states.FINAL),
    "wpg": {WpgState.STOPPED},
    "residency": set(),
    "lock": set(),
    "operation": {state for state in OperationState if state.is_final},
}


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_reached_and_only_final_states_are_never_left(name: str) -> None:
    table = TABLES[name]
    reached, new = {INITIAL[name]}, [INITIAL[name]]
    while new:
        state = new.pop()
        for before, _, after in table:
            if before == state and after not in reached:
                reached.add(after)
                new.append(after)
    assert reached == set(type(INITIAL[name]))
    left = {before for before, _, after in table if before != after}
    assert reached - left == FINAL[name]


@pytest.mark.parametrize("name", TABLES)
def test_every_trigger_is_legal_somewhere(name: str) -> None:
    triggers = {trigger for _, trigger, _ in TABLES[name]}
    assert triggers == set(type(next(iter(triggers))))


def test_a_pair_that_the_table_lacks_raises() -> None:
    trigger = job_states.JobTrigger.PLACED
    with pytest.raises(IllegalTransitionError, match="job table has no transition for placed in"):
        job_states.next_state(JobState.FAILED, trigger)
    with pytest.raises(IllegalTransitionError, match="WPG"):
        wpg_states.next_state(WpgState.WAITING, wpg_states.WpgTrigger.CONNECTED)
    with pytest.raises(IllegalTransitionError, match="residency"):
        residency_states.next_residency(
            residency_states.Residency.NONE, residency_states.ResidencyTrigger.LOADED
        )
    with pytest.raises(IllegalTransitionError, match="operation"):
        operation_states.next_state(
            OperationState.FINISHED, operation_states.OperationTrigger.STARTED
        )


def locked_state(**groups_of: tuple[str, ...]) -> State:
    """A state with deployments and their groups, all free."""
    state = State()
    for name, groups in groups_of.items():
        member = Deployment(
            deployment=DeploymentId(name),
            job=JobId(name),
            created_at=0.0,
            spec=RequestedSpec(
                kind="train",
                workers=len(groups),
                state_bytes=1,
                exclusive=False,
                spec_json="{}",
            ),
            placement=Placement(
                groups=tuple(map(GroupId, groups)),
            ),
            demand=Demand(
                estimates=Estimates(state_bytes=1),
            ),
        )
        state.deployments[member.deployment] = member
        for each in member.placement.groups:
            made = Group(group=each, gpus=(), shared=True, serial=len(state.groups) + 1)
            state.groups.setdefault(each, made).members.append(member.deployment)
    return state


def test_the_lock_goes_from_member_to_member_and_each_grant_has_a_new_token() -> None:
    state = locked_state(a=("g",), b=("g",))
    (group,), (a, b) = state.groups.values(), state.deployments.values()
    group_lock.grant(state, a)
    assert (group_lock.lock_state(group), group.token) == (LockState.HELD, 1)
    group_lock.begin_switch(state, b)
    assert group_lock.lock_state(group) is LockState.SWITCHING
    group_lock.hand_over(state, b)
    assert (group.holder, group.incoming) == (b.deployment, None)
    group_lock.begin_switch(state, a)
    group_lock.withdraw(state, a)
    assert (group_lock.lock_state(group), group.holder) == (LockState.HELD, b.deployment)
    group_lock.withdraw(state, b)
    assert group_lock.lock_state(group) is LockState.FREE
    group_lock.grant(state, b)
    assert group.token == 2


def test_a_lock_that_is_held_is_not_granted_and_one_that_is_free_is_not_released() -> None:
    state = locked_state(a=("g",), b=("g",))
    (group,), (a, b) = state.groups.values(), state.deployments.values()
    with pytest.raises(IllegalTransitionError):
        group_lock.release(group)
    group_lock.grant(state, a)
    with pytest.raises(IllegalTransitionError):
        group_lock.grant(state, b)
    assert (group.holder, group.token) == (a.deployment, 1)


def test_a_member_of_several_groups_gets_their_locks_at_once_under_one_token() -> None:
    state = locked_state(small=("g1",), large=("g1", "g2"), other=("g2",))
    one, two = state.groups.values()
    small, large, other = state.deployments.values()
    group_lock.grant(state, small)
    group_lock.grant(state, other)
    group_lock.begin_switch(state, large)
    group_lock.vacate(one)
    assert group_lock.lock_state(one) is LockState.AWAITED
    with pytest.raises(IllegalTransitionError):
        group_lock.grant(state, small)
    group_lock.vacate(two)
    group_lock.hand_over(state, large)
    assert one.holder == two.holder == large.deployment
    assert one.token == two.token > 2


def test_a_member_that_leaves_while_it_awaits_frees_all_that_it_had_reserved() -> None:
    state = locked_state(small=("g1",), large=("g1", "g2"))
    one, two = state.groups.values()
    small, large = state.deployments.values()
    group_lock.grant(state, small)
    group_lock.begin_switch(state, large)
    assert group_lock.lock_state(two) is LockState.AWAITED
    group_lock.withdraw(state, large)
    assert (one.holder, one.incoming, two.incoming) == (small.deployment, None, None)
    group_lock.begin_switch(state, large)
    group_lock.withdraw(state, small)
    assert group_lock.lock_state(one) is group_lock.lock_state(two) is LockState.FREE


def job_state(cluster: FakeCluster, job: str) -> str:
    return str(cluster.core.job_view(job, cluster.now)["state"])


def running_alone(**fields: object) -> FakeCluster:
    """Job `a` runs on the only node, and will have to wait for GPUs if that node is lost."""
    cluster = cluster_of(1, **fields)
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.submit("a:0", "a/actor", "forward_backward")
    assert job_state(cluster, "a") == "ADMITTED"
    cluster.settle()
    cluster.submit("a:1", "a/actor", "optim_step", ends_burst=True)
    cluster.settle()
    return cluster


@pytest.mark.parametrize("policy", ["isolated", "pack", "spread"])
def test_a_job_that_loses_its_gpus_is_queued_until_it_has_others(policy: str) -> None:
    cluster = running_alone(policy=policy, node_replace_s=0.0)
    before = job_state(cluster, "a")
    assert before in ("PROFILING", "RUNNING")
    cluster.lose_node("n0")
    assert cluster.core.deployment_view("a/actor", cluster.now)["state"] == "waiting"
    assert job_state(cluster, "a") == "QUEUED"
    cluster.join_node(2, "n1")
    assert job_state(cluster, "a") == "ADMITTED"
    cluster.submit("a:2", "a/actor", "forward_backward")
    cluster.settle()
    assert job_state(cluster, "a") == before


def test_a_job_one_of_whose_deployments_loses_its_gpus_runs_again_when_all_have_some() -> None:
    cluster = cluster_of(1, policy="isolated", node_replace_s=0.0)
    cluster.join_node(2, "n1")
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.deploy("a/rollout", "rollout")
    cluster.submit("a:0", "a/actor", "forward_backward")
    cluster.submit("a:1", "a/actor", "optim_step", ends_burst=True)
    cluster.settle()
    assert job_state(cluster, "a") == "RUNNING"
    (rank, _) = cluster.core._context.state.deployments[DeploymentId("a/rollout")].placement.ranks
    cluster.lose_node(rank.node)
    assert job_state(cluster, "a") == "QUEUED"
    cluster.join_node(2, "n2")
    assert job_state(cluster, "a") == "RUNNING", "its trainer stayed on its GPUs"
