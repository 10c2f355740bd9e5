"""An operator's page: GPUs by state, lanes, queue, shares, and where the time of a job went."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.ids import DeploymentId, JobId, TenantId
from plexrl.scheduler.accounting.fair_shares import tenant_share
from plexrl.scheduler.admission.order import admission_key
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.fit.feasibility import is_possible
from plexrl.scheduler.placement.waiting.unit_table import ROWS_MIN
from plexrl.scheduler.queries.overview import possible
from plexrl.scheduler.queries.overview.gpu_states import overview
from plexrl.scheduler.queries.overview.job_times import TimesReader
from plexrl.scheduler.queries.overview.lanes import (
    RUNS_PER_STEP,
    LaneBand,
    LanesReader,
    Run,
    merge,
    union,
)
from plexrl.scheduler.queries.overview.queue import page, row
from plexrl.scheduler.queries.overview.shares import Bills
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.records import Deployment
from plexrl.wire.messages.overview_views import (
    BAND_CELLS,
    LANES_MAX,
    SEVERAL_JOBS,
    SPANS_PER_LANE,
    LanesView,
    QueuedView,
    Span,
)
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

T, U = TenantId("t"), TenantId("u")


def two_jobs_on_one_group() -> FakeCluster:
    """Jobs `a` of tenant t and `b` of tenant u share two of four GPUs; `b` has the group."""
    cluster = FakeCluster(policy="pack", residents_max=2)
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


def states(cluster: FakeCluster, tenant: TenantId | None = None) -> dict[str, int]:
    return overview(cluster.core.cluster, tenant, cluster.now)["gpus"]["states"]


def read_lanes(
    cluster: FakeCluster, tenant: TenantId | None = None, seconds: float = 1000.0
) -> LanesView:
    window = cluster.now - seconds, cluster.now
    reader = LanesReader(cluster.core.cluster, tenant, window, 0)
    for _ in reader.steps(lambda: cluster.core.cluster):
        pass
    return reader.view(cluster.core.cluster)


def queue(cluster: FakeCluster, which: str, tenant: TenantId | None = None) -> list[QueuedView]:
    core = cluster.core.cluster
    _, entries = page(core, which, tenant, cluster.now, (0, 100))
    rows = [row(core, entry, cluster.now, sees_all=tenant is None) for entry in entries]
    return [each for each in rows if each is not None]


def test_each_gpu_is_in_one_state() -> None:
    cluster = two_jobs_on_one_group()
    assert states(cluster) == {"idle": 2, "free": 2}
    cluster.submit("a:2", "a/actor", "forward")
    cluster.pass_time(1.0)
    assert states(cluster) == {"switching": 2, "free": 2}
    while cluster.runs and cluster.runs[0].kind != "forward":
        cluster.execute(cluster.runs[0])
    assert states(cluster) == {"computing": 2, "free": 2}
    cluster.join_node(2, "m")
    cluster.send(ev.NodeDrainChanged(node="m", is_draining=True))
    assert states(cluster) == {"computing": 2, "free": 2, "draining": 2}
    cluster.send(ev.NodeLost(node="m"))
    assert states(cluster) == {"computing": 2, "free": 2, "lost": 2}


def test_a_tenant_does_not_see_what_another_tenants_job_does() -> None:
    cluster = two_jobs_on_one_group()
    cluster.submit("b:2", "b/actor", "forward")
    cluster.submit("a:2", "a/actor", "forward")
    assert states(cluster) == {"computing": 2, "free": 2}
    assert states(cluster, U) == {"computing": 2, "free": 2}
    assert states(cluster, T) == {"others": 2, "free": 2}
    assert states(cluster, TenantId("v")) == {"others": 2, "free": 2}
    assert overview(cluster.core.cluster, TenantId("v"), cluster.now)["groups"] == 0


def test_counts_of_what_waits_agree_with_the_lists() -> None:
    cluster = two_jobs_on_one_group()
    cluster.job("c", "t")
    cluster.deploy("c/actor", workers=4)
    cluster.submit("b:2", "b/actor", "forward")
    cluster.submit("a:2", "a/actor", "forward")
    cluster.pass_time(5.0)
    for tenant, waiting, turns in ((None, 1, 1), (T, 1, 1), (U, 0, 0)):
        view = overview(cluster.core.cluster, tenant, cluster.now)
        assert (view["waiting"], view["turns"]) == (waiting, turns)
        assert len(queue(cluster, "gpus", tenant)) == waiting
        assert len(queue(cluster, "turns", tenant)) == turns
        assert (view["waiting_since"] is None) == (waiting == 0)
    (turn,) = queue(cluster, "turns")
    assert (turn["job"], turn["operation"], turn["blocker"]) == ("a", "a:2", "b/actor")
    (own,) = queue(cluster, "turns", T)
    assert own["blocker"] == "another tenant's job"


def test_a_tenant_may_list_more_turns_than_the_table_of_waiting_units_has_rows() -> None:
    count = ROWS_MIN + 6
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(count)
    for index in range(count):
        name = f"j{index:02}"
        cluster.job(name, "t" if index % 2 else "u")
        cluster.deploy(f"{name}/actor", workers=1)
        cluster.submit(f"{name}:1", f"{name}/actor", "forward")
    assert len(queue(cluster, "turns")) == count
    assert len(queue(cluster, "turns", T)) == len(queue(cluster, "turns", U)) == count // 2
    assert queue(cluster, "turns", TenantId("v")) == []


def test_a_deployment_that_the_nodes_cannot_hold_is_in_a_list_of_its_own() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(4)
    cluster.join_node(4, "m")
    cluster.job("a")
    cluster.deploy("a/actor", workers=8)
    cluster.job("b")
    cluster.deploy("b/actor", workers=8)
    cluster.job("c")
    cluster.deploy("c/actor", workers=4)
    cluster.send(ev.NodeDrainChanged(node="m", is_draining=True))
    core = cluster.core.cluster
    never = [each["job"] for each in queue(cluster, "impossible")]
    others = [each["job"] for each in queue(cluster, "gpus")]
    for name in core.queues.waiting:
        job = core.state.deployments[name].job
        assert job in (others if is_possible(core, core.state.deployments[name]) else never)
    assert set(never) <= {"a", "b"}
    assert all(each["rule"] == "impossible" for each in queue(cluster, "impossible"))
    view = overview(core, None, cluster.now)
    assert (view["impossible"], view["waiting"]) == (len(never), len(others))
    assert never
    cluster.end("c/actor")
    view = overview(core, None, cluster.now)
    assert (view["waiting"], view["waiting_since"]) == (0, None)


def test_a_page_of_gangs_asks_once_for_each_need(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(policy="pack")
    cluster.start_node(4)
    for index in range(30):
        cluster.job(f"j{index:02}", gang=2, expected_s=100.0 + index)
        cluster.deploy(f"j{index:02}/actor", workers=2)
        cluster.deploy(f"j{index:02}/other", workers=2)
    assert len(queue(cluster, "gpus")) > 40
    asked = []

    def ask(core: Cluster, deployment: Deployment) -> bool:
        asked.append(deployment.deployment)
        return is_possible(core, deployment)

    monkeypatch.setattr(possible, "is_possible", ask)
    page(cluster.core.cluster, "gpus", None, cluster.now, (0, 10))
    assert len(asked) == 1


def test_nothing_is_impossible_until_the_agents_have_connected_after_a_start() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(4)
    for job in "ab":
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=4)
    cluster.settle()
    assert [each["job"] for each in queue(cluster, "gpus")] == ["b"]

    def counts() -> tuple[int, int]:
        view = overview(cluster.core.cluster, None, cluster.now)
        return view["waiting"], view["impossible"]

    cluster.send(ev.SchedulerStarted())
    assert counts() == (1, 0)
    assert queue(cluster, "impossible") == []
    (waits,) = queue(cluster, "gpus")
    assert (waits["job"], waits["rule"] == "impossible") == ("b", False)
    cluster.send(ev.NodeLost(node="n"))
    assert counts() == (0, 1)
    assert [each["job"] for each in queue(cluster, "impossible")] == ["b"]


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("tuv"), st.integers(1, 4), st.integers(0, 2), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_the_queue_is_in_the_order_of_admission(
    jobs: list[tuple[str, int, int, bool]],
) -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(5)
    for tenant in "tuv":
        cluster.send(ev.TenantCreated(tenant=tenant, key_digest=tenant))
        configured = ev.TenantConfigured(
            tenant=tenant,
            weight=1.0,
            jobs_max=None,
            gpus_max=None,
            gpu_seconds_max=None,
            priority_max=2,
        )
        cluster.send(configured)
    for index, (tenant, workers, priority, has_two) in enumerate(jobs):
        cluster.job(f"j{index}", tenant, priority=priority)
        cluster.deploy(f"j{index}/actor", workers=workers)
        if has_two:
            cluster.deploy(f"j{index}/other", workers=1)
        cluster.pass_time(7.0)
    core = cluster.core.cluster

    def key(name: DeploymentId) -> object:
        tenant = core.state.jobs[core.state.deployments[name].job].tenant
        share = tenant_share(core.holdings, tenant, cluster.now)
        return admission_key(core, core.state.deployments[name], share, cluster.now)

    expected = sorted(
        (name for name in core.queues.waiting if is_possible(core, core.state.deployments[name])),
        key=key,
    )
    total, entries = page(core, "gpus", None, cluster.now, (0, 100))
    # Members of a unit are placed in the order of their sizes.
    job_of = {name: core.state.deployments[name].job for name in expected}
    assert [job_of[name] for _, name in entries] == [job_of[name] for name in expected]
    assert total == len({position for position, _ in entries})
    for tenant in "tuv":
        _, own = page(core, "gpus", TenantId(tenant), cluster.now, (0, 100))
        of_tenant = [
            entry
            for entry in entries
            if core.state.jobs[core.state.deployments[entry[1]].job].tenant == tenant
        ]
        assert own == of_tenant


def test_lanes_show_who_had_the_group_and_what_switches_took() -> None:
    cluster = FakeCluster(policy="pack", residents_max=2)
    cluster.start_node(2)
    for job, tenant in (("a", "t"), ("b", "u")):
        cluster.job(job, tenant)
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    ran_s = 0.0
    for job in ("a", "b"):
        cluster.submit(f"{job}:1", f"{job}/actor", "forward")
        while cluster.state_of(f"{job}:1") != "finished":
            if cluster.runs:
                cluster.now += 20.0
                ran_s += 20.0
                cluster.execute(cluster.runs[0])
            else:
                assert cluster.timer_at is not None
                cluster.pass_time(cluster.timer_at - cluster.now)
    view = read_lanes(cluster)
    (lane,) = view["lanes"]
    names = [view["jobs"][at]["job"] for _, _, at, _ in lane["spans"]]
    shown = [(name, bool(span[3])) for name, span in zip(names, lane["spans"], strict=True)]
    assert ("a", False) in shown
    assert ("b", False) in shown
    assert any(is_switch for _, is_switch in shown)
    busy_s = sum(end - begin for begin, end, _, _ in lane["spans"])
    assert abs(busy_s - ran_s) < 0.01
    own = read_lanes(cluster, U)
    assert {each["job"] for each in own["jobs"]} == {"b"}
    assert read_lanes(cluster, TenantId("v"))["lanes"] == []


def test_what_runs_now_ends_at_the_windows_end() -> None:
    cluster = two_jobs_on_one_group()
    cluster.submit("b:2", "b/actor", "forward")
    cluster.pass_time(30.0)
    (lane,) = read_lanes(cluster, seconds=100.0)["lanes"]
    begin, end, _, is_switch = lane["spans"][-1]
    assert (begin, end, is_switch) == (70.0, 100.0, 0)


def test_a_lane_shows_no_run_of_a_dropped_job_under_its_names_next_owner() -> None:
    cluster = FakeCluster(policy="pack", residents_max=3, ended_jobs=1)
    cluster.start_node(2)
    for job in "abc":
        cluster.job(job, "t")
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "forward")
    while cluster.runs:
        cluster.pass_time(20.0)
        cluster.execute(cluster.runs[0])
    assert [each["job"] for each in read_lanes(cluster)["jobs"]] == ["a"]
    for job in "ab":
        cluster.send(ev.JobFinished(job=job, outcome="completed"))
        cluster.settle()
    cluster.pass_time(10.0)
    cluster.job("a", "u")
    cluster.deploy("a/actor")
    assert read_lanes(cluster)["jobs"] == []
    assert read_lanes(cluster, U)["jobs"] == []


def test_a_window_before_the_history_is_empty_and_says_where_it_begins() -> None:
    cluster = two_jobs_on_one_group()
    cluster.pass_time(500.0)
    view = read_lanes(cluster, seconds=100.0)
    assert view["lanes"][0]["spans"] == []
    assert view["oldest"] is not None
    assert view["oldest"] < view["since"]
    assert read_lanes(FakeCluster())["oldest"] is None


def test_more_groups_than_lanes_are_shown_as_bands() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(LANES_MAX + 6)
    for index in range(LANES_MAX + 6):
        cluster.job(f"j{index:02}")
        cluster.deploy(f"j{index:02}/actor", workers=1)
    cluster.settle()
    cluster.submit("j00:1", "j00/actor", "forward")
    while cluster.runs:
        cluster.pass_time(100.0)
        cluster.execute(cluster.runs[0])
    view = read_lanes(cluster, seconds=200.0)
    assert view["groups"] == LANES_MAX + 6
    assert len(view["lanes"]) == LANES_MAX
    assert sum(band["groups"] for band in view["bands"]) == view["groups"]
    assert len(view["bands"]) <= LANES_MAX
    busy = {band["first"] for band in view["bands"] if band["busy"].strip("0")}
    assert busy == {0}


RUNS = st.lists(
    st.tuples(
        st.floats(0, 1000, width=32),
        st.floats(0.0625, 50, width=32),
        st.sampled_from("abc"),
        st.booleans(),
    ),
    max_size=200,
)


@settings(max_examples=examples(100), deadline=None)
@given(RUNS)
def test_merged_runs_are_few_and_lose_no_busy_time(
    drawn: list[tuple[float, float, str, bool]],
) -> None:
    runs: list[Run] = sorted(
        (begin, min(1000.0, begin + wide), JobId(job), is_switch)
        for begin, wide, job, is_switch in drawn
    )
    least_s = 1000.0 / SPANS_PER_LANE
    numbers = {JobId(name): at for at, name in enumerate("abc")}
    spans: list[Span] = []
    merge(runs, least_s, numbers.__getitem__, spans)
    for begin, end, job, is_switch in runs:
        assert any(
            each[0] <= begin + 1e-3
            and end <= each[1] + 1e-3
            and each[2] in (numbers[job], SEVERAL_JOBS)
            and (each[2] == SEVERAL_JOBS or each[3] in (0, int(is_switch)))
            for each in spans
        )
    shorts = [each for each in spans if each[1] - each[0] < least_s]
    assert len(shorts) <= 2 * SPANS_PER_LANE + len(spans) - len(shorts) + 1
    assert all(a[1] <= b[0] for a, b in zip(union(runs), union(runs)[1:], strict=False))


@settings(max_examples=examples(30), deadline=None)
@given(RUNS, st.integers(1, 50))
def test_runs_in_parts_give_the_same_lane_and_band(
    drawn: list[tuple[float, float, str, bool]], size: int
) -> None:
    runs: list[Run] = sorted(
        (begin, min(1000.0, begin + wide), JobId(job), is_switch)
        for begin, wide, job, is_switch in drawn
    )
    numbers = {JobId(name): at for at, name in enumerate("abc")}
    found = []
    for step in (size, len(runs) + 1):
        spans: list[Span] = []
        band, covered = LaneBand(0, 1000.0 / BAND_CELLS), 0.0
        band.enter(2)
        for at in range(0, len(runs), step):
            merge(runs[at : at + step], 3.0, numbers.__getitem__, spans)
            covered = band.add(runs[at : at + step], 2, covered)
        found.append((spans, [round(each, 6) for each in band.busy]))
    assert found[0] == found[1]
    busy_s = sum(end - begin for begin, end in union(runs))
    assert abs(sum(found[0][1]) * 1000.0 / BAND_CELLS / 2 - busy_s) < 0.01


def test_a_group_that_had_the_whole_history_is_read_in_short_steps() -> None:
    cluster = two_jobs_on_one_group()
    reader = LanesReader(cluster.core.cluster, None, (0.0, cluster.now), 0)
    (group,) = cluster.core.cluster.state.groups
    reader.runs[group] = [(0.01 * at, 0.01 * at + 0.005, JobId("a"), False) for at in range(50_000)]
    assert sum(1 for _ in reader.steps(lambda: cluster.core.cluster)) >= 50_000 // RUNS_PER_STEP


def test_an_endless_row_of_short_runs_stays_a_bounded_answer() -> None:
    runs: list[Run] = [
        (0.01 * at, 0.01 * at + 0.005, JobId("ab"[at % 2]), False) for at in range(100_000)
    ]
    spans: list[Span] = []
    merge(runs, 1000.0 / SPANS_PER_LANE, {JobId("a"): 0, JobId("b"): 1}.__getitem__, spans)
    assert len(spans) <= 2 * SPANS_PER_LANE
    assert {span[2] for span in spans} == {SEVERAL_JOBS}


def test_shares_add_up_and_a_tenant_sees_itself() -> None:
    cluster = two_jobs_on_one_group()
    for tenant, weight in (("t", 1.0), ("u", 3.0)):
        cluster.send(ev.TenantCreated(tenant=tenant, key_digest=tenant))
        configured = ev.TenantConfigured(
            tenant=tenant, weight=weight, jobs_max=None, gpus_max=8, gpu_seconds_max=None
        )
        cluster.send(configured)
    core = cluster.core.cluster
    bills = Bills()
    bills.add(core.state.jobs.values())
    rows = {each["tenant"]: each for each in bills.views(core, None, cluster.now)}
    assert (rows[T]["due"], rows[U]["due"]) == (0.25, 0.75)
    assert sum(each["held"] for each in rows.values()) == 1.0
    assert rows[T]["gpus_max"] == 8
    operations = sum(
        row.operations for job in core.state.jobs.values() for row in job.usage.values()
    )
    assert sum(each["operations"] for each in rows.values()) == operations
    used = [row for job in core.state.jobs.values() for row in job.usage.values()]
    remembered = sum(each["remembered_gpu_seconds"] for each in rows.values())
    assert remembered == sum(row.gpu_seconds for row in used) > 0.0
    assert [each["tenant"] for each in bills.views(core, U, cluster.now)] == [U]


def test_the_times_of_a_job_are_sums_over_its_operations() -> None:
    cluster = two_jobs_on_one_group()
    cluster.submit("a:2", "a/actor", "forward")
    cluster.settle()
    state = cluster.core.cluster.state
    reader = TimesReader(state, state.jobs[JobId("a")])
    for _ in reader.steps(lambda: cluster.core.cluster):
        pass
    rows = {(each["deployment"], each["kind"]): each for each in reader.view()["rows"]}
    logged = [
        operation
        for operation in (state.operations[name] for name in state.finished.values())
        if operation.deployment == "a/actor"
    ]
    assert sum(each["operations"] for each in rows.values()) == len(logged)
    forward = [each for each in logged if each.kind == "forward"]
    found = rows[DeploymentId("a/actor"), "forward"]
    assert found["queue_s"] == sum(each.queue_s or 0.0 for each in forward)
    assert found["switch_s"] == sum(each.switch_s for each in forward)
    assert found["compute_s"] == sum(each.compute_s or 0.0 for each in forward)
