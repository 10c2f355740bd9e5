"""Switch times are predicted from the tier of the state and from measured moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.ids import DeploymentId
from plexrl.scheduler.rules.switch_cost import load_s, offload_s, switch_cost
from plexrl.scheduler.state.demand.estimates import MOVE_BYTES_PER_S, MoveLaw
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd
from plexrl.wire.operations import OperationKind
from tests.scheduler.fake_cluster import FakeCluster

STATE = 10**8
SELDOM = DemandTrace(
    period_s=1000.0, segments=(Segment(offset_s=0.0, duration_s=10.0, slack_s=900.0),)
)


def law_of(moves: list[tuple[float, float]]) -> MoveLaw:
    law = MoveLaw()
    for nbytes, seconds in moves:
        law.observe(nbytes, seconds)
    return law


@given(
    st.floats(0, 5),
    st.floats(1e8, 1e11),
    st.lists(st.integers(1, 400), min_size=2, max_size=20, unique=True),
    st.integers(1, 1000),
)
def test_the_cost_model_finds_the_fixed_cost_and_the_rate(
    fixed_s: float, rate: float, sizes: list[int], asked: int
) -> None:
    sizes = [min(sizes), *sizes, 2 * max(sizes)]
    law = law_of([(size * 1e8, fixed_s + size * 1e8 / rate) for size in sizes])
    assert law.seconds(asked * 1e8) == pytest.approx(
        fixed_s + asked * 1e8 / rate, rel=1e-3, abs=1e-6
    )


@given(st.floats(1e6, 1e12), st.floats(1e-3, 100), st.floats(1e6, 1e12))
def test_moves_of_one_size_predict_others_in_proportion(
    nbytes: float, seconds: float, asked: float
) -> None:
    law = law_of([(nbytes, seconds)] * 3)
    assert law.seconds(nbytes) == pytest.approx(seconds)
    assert law.seconds(asked) == pytest.approx(seconds * asked / nbytes)


@given(
    st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 100)), max_size=30),
    st.floats(0, 1e12),
    st.floats(0, 1e12),
)
def test_the_cost_model_is_never_negative_and_never_decreases(
    moves: list[tuple[float, float]], a: float, b: float
) -> None:
    law = law_of(moves)
    few, many = law.seconds(min(a, b)), law.seconds(max(a, b))
    assert 0.0 <= few <= many + 1e-9 * abs(many)


def test_the_cost_model_forgets_old_measurements() -> None:
    law = law_of([(STATE, 10.0)] * 100 + [(STATE, 1.0)] * 300)
    assert law.seconds(STATE) == pytest.approx(1.0, rel=0.1)


def deploy(cluster: FakeCluster, name: str, state_bytes: int = 1000, *, pace: str = "") -> str:
    """A ready deployment `<name>/actor` of its own job."""
    cluster.job(name)
    cluster.send(
        ev.DeploymentCreated(
            deployment=f"{name}/actor",
            job=name,
            kind="train",
            workers=4,
            state_bytes=state_bytes,
            exclusive=False,
            spec_json="{}",
            trace=SELDOM,
            pace=pace,
        )
    )
    for launch in list(cluster.launches):
        cluster.launch(launch)
    return f"{name}/actor"


def move(
    cluster: FakeCluster, run: cmd.Run, seconds: float, tier: str, before_s: float = 0.0
) -> None:
    """Execute a load or offload with this duration and tier. `before_s`: of its copies during the
    offload before it."""
    cluster.execute(run, report=False)
    cluster.runs.remove(run)
    before = round(STATE * before_s / (before_s + seconds)) if before_s else 0
    moved = ev.StateMoved(
        bytes_moved=STATE, tier=tier, prefetched_bytes=before, prefetch_s=before_s
    )
    cluster.send(
        ev.OperationFinished(
            operation=run.operation, token=run.token, compute_s=seconds, moved=moved
        )
    )


def work(cluster: FakeCluster, deployment: str, index: int, *, tier: str = "host") -> None:
    """One step of a deployment, with a switch if needed."""
    cluster.submit(f"{deployment}-{index}", deployment, "optim_step")
    while cluster.runs:
        run = cluster.runs[0]
        match run.kind:
            case OperationKind.LOAD:
                move(cluster, run, 4.0 if tier == "nvme" else 1.0, tier)
            case OperationKind.OFFLOAD:
                move(cluster, run, 2.0, "host")
            case _:
                cluster.execute(run)
    cluster.pass_time(60.0)


def predicted(cluster: FakeCluster, deployment: str) -> tuple[float, float]:
    """(load, offload) in seconds."""
    view = cluster.core.deployment_view(deployment, cluster.now)
    return view["load_s"], view["offload_s"]


@pytest.fixture
def cluster() -> FakeCluster:
    found = FakeCluster(ordering="fifo-bursts", policy="pack")
    found.start_node()
    return found


def test_without_measured_moves_the_default_is_cautious(cluster: FakeCluster) -> None:
    first = deploy(cluster, "a", 10**8)
    assert predicted(cluster, first) == (10**8 / MOVE_BYTES_PER_S,) * 2


def test_the_load_that_builds_a_model_is_not_measured(cluster: FakeCluster) -> None:
    first = deploy(cluster, "a", 10**8)
    cluster.submit("a:1", first, "forward")
    (build,) = cluster.runs
    cluster.execute(build, report=False)
    cluster.runs.remove(build)
    cluster.send(ev.OperationFinished(operation=build.operation, token=build.token, compute_s=90.0))
    assert predicted(cluster, first) == (10**8 / MOVE_BYTES_PER_S,) * 2


def test_a_newcomer_is_predicted_by_the_moves_of_others(cluster: FakeCluster) -> None:
    first, second = deploy(cluster, "a", STATE), deploy(cluster, "b", STATE)
    for index in range(3):
        work(cluster, first, index)
        work(cluster, second, index)
    newcomer = deploy(cluster, "c", STATE // 2)
    load_s, offload_s = predicted(cluster, newcomer)
    assert load_s == pytest.approx(0.5)
    assert offload_s == pytest.approx(1.0)


def test_paced_moves_teach_nothing_of_moves_that_are_real(cluster: FakeCluster) -> None:
    paced = [deploy(cluster, name, STATE, pace="h800:qwen2.5-72b@1") for name in ("a", "b")]
    for index in range(3):
        for each in paced:
            work(cluster, each, index)
    assert predicted(cluster, paced[0]) == pytest.approx((1.0, 2.0)), "its own moves"
    cluster.restart_scheduler(restored=True)
    work(cluster, paced[0], 3)
    newcomer = deploy(cluster, "c", STATE)
    assert predicted(cluster, newcomer) == (STATE / MOVE_BYTES_PER_S,) * 2
    assert cluster.core.deployment_view(DeploymentId(paced[0]), cluster.now)["pace"]


def test_a_deployment_without_gpus_is_predicted_on_the_nodes_of_the_candidate_group() -> None:
    """Its state would be on four nodes, which move in parallel."""
    cluster = FakeCluster(policy="spread")
    for number in range(4):
        cluster.join_node(2, f"n{number}", node_type="h200")
    cluster.join_router()
    placed, waiting = deploy_on(cluster, "a", 8), deploy_on(cluster, "b", 8)
    context = cluster.core._context
    group = context.state.group_of(context.state.deployment(placed))
    assert group is not None
    newcomer = context.state.deployment(waiting)
    assert newcomer.placement.group is None
    assert load_s(context.state, newcomer, group.gpus) == STATE / 4 / MOVE_BYTES_PER_S
    context.state.move_laws["load/host/h200"] = law_of([(STATE, 2.0)])
    assert load_s(context.state, newcomer, group.gpus) == pytest.approx(0.5)
    assert offload_s(context.state, newcomer, group.gpus) == pytest.approx(0.5), "as the way there"
    context.state.move_laws["offload/host/h200"] = law_of([(STATE, 4.0)])
    assert offload_s(context.state, newcomer, group.gpus) == pytest.approx(1.0)


def deploy_on(cluster: FakeCluster, name: str, workers: int) -> DeploymentId:
    cluster.job(name)
    cluster.send(
        ev.DeploymentCreated(
            deployment=f"{name}/actor",
            job=name,
            kind="train",
            workers=workers,
            state_bytes=STATE,
            exclusive=False,
            spec_json="{}",
        )
    )
    return DeploymentId(f"{name}/actor")


def test_spilled_state_makes_the_load_slower_until_it_is_back(
    cluster: FakeCluster,
) -> None:
    first, second = deploy(cluster, "a", STATE), deploy(cluster, "b", STATE)
    work(cluster, first, 0)
    work(cluster, second, 0)
    spilled = ev.StateResidency(deployment=first, host_bytes=0, nvme_bytes=STATE)
    cluster.send(ev.StateReported(node="n", states=(spilled,)))
    work(cluster, first, 1, tier="nvme")
    work(cluster, second, 1)
    assert predicted(cluster, first)[0] == pytest.approx(1.0)
    cluster.send(ev.StateReported(node="n", states=(spilled,)))
    assert predicted(cluster, first)[0] == pytest.approx(4.0)
    back = ev.StateResidency(deployment=first, host_bytes=STATE, nvme_bytes=0)
    cluster.send(ev.StateReported(node="n", states=(back,)))
    assert predicted(cluster, first)[0] == pytest.approx(1.0)


def test_a_report_of_a_node_that_the_deployment_is_not_on_changes_nothing(
    cluster: FakeCluster,
) -> None:
    first = deploy(cluster, "a", STATE)
    spilled = ev.StateResidency(deployment=first, host_bytes=0, nvme_bytes=STATE)
    cluster.send(ev.StateReported(node="elsewhere", states=(spilled,)))
    unknown = ev.StateResidency(deployment="x/actor", host_bytes=0, nvme_bytes=STATE)
    cluster.send(ev.StateReported(node="n", states=(unknown,)))
    assert cluster.core.deployment_view(first, cluster.now)["nvme_bytes"] == 0


def test_measured_moves_survive_a_restart(cluster: FakeCluster) -> None:
    first, second = deploy(cluster, "a", STATE), deploy(cluster, "b", STATE)
    work(cluster, first, 0)
    work(cluster, second, 0)
    spilled = ev.StateResidency(deployment=first, host_bytes=0, nvme_bytes=STATE)
    cluster.send(ev.StateReported(node="n", states=(spilled,)))
    before = [predicted(cluster, name) for name in (first, second)]
    cluster.restart_scheduler(restored=True)
    assert [predicted(cluster, name) for name in (first, second)] == before


def test_an_offload_names_the_state_that_is_loaded_next(cluster: FakeCluster) -> None:
    first, second = deploy(cluster, "a"), deploy(cluster, "b")
    work(cluster, first, 0)
    cluster.submit("b:0", second, "optim_step")
    (offload,) = cluster.runs
    assert (offload.kind, offload.successor) == (OperationKind.OFFLOAD, None), "it has no state"
    work(cluster, second, 1)
    cluster.submit("a:1", first, "optim_step")
    (offload,) = cluster.runs
    assert (offload.deployment, offload.successor, offload.successor_seq) == (second, first, 1)


def test_a_switch_costs_less_than_its_moves_when_they_overlap(cluster: FakeCluster) -> None:
    first, second = deploy(cluster, "a", STATE), deploy(cluster, "b", STATE)

    def switch(index: int, before_s: float) -> None:
        """To the other one: an offload of 2 s, and a load of 4 s in all."""
        deployment = (first, second)[index % 2]
        cluster.submit(f"{deployment}-{index}", deployment, "optim_step")
        while cluster.runs:
            run = cluster.runs[0]
            if run.kind is OperationKind.LOAD and run.seq:
                move(cluster, run, 4.0 - before_s, "host", before_s)
            elif run.kind is OperationKind.OFFLOAD:
                move(cluster, run, 2.0, "host")
            else:
                cluster.execute(run)
        cluster.pass_time(60.0)

    def cost() -> float:
        state = cluster.core._context.state
        (group,) = state.groups.values()
        away = next(each for each in (first, second) if each != group.holder)
        return switch_cost(state, group, state.deployments[DeploymentId(away)])

    for index in range(20):
        switch(index, 0.0)
    assert cost() == pytest.approx(6.0)
    for index in range(20, 80):
        switch(index, 1.0)
    assert cost() == pytest.approx(5.0, rel=1e-4), "a quarter of the load takes place before"
    assert predicted(cluster, first) == pytest.approx((4.0, 2.0))
    for index in range(80, 140):
        switch(index, 3.0)
    assert cost() == pytest.approx(4.0, rel=1e-4), "no more than the offload takes is hidden"
