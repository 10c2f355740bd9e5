"""Lanes: who had the GPUs of each group, over a window of time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.ids import DeploymentId, GroupId, JobId, TenantId
from plexrl.scheduler.queries.overview.lanes import RUNS_PER_STEP, LanesReader
from plexrl.scheduler.queries.overview.runs import GroupRun, RunGroup, RunJob
from plexrl.scheduler.queries.overview.spans import LaneBand, Run, merge, uncovered, union
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages.overview_views import (
    BAND_CELLS,
    LANES_MAX,
    SEVERAL_JOBS,
    SPANS_PER_LANE,
    STORED,
    WORK,
    LanesView,
    Span,
)
from tests.examples import examples
from tests.scheduler.dispatch.test_spanning import two_trainings
from tests.scheduler.dispatch.test_stored_steps import cluster_with_gradients
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.queries.shared_group import two_jobs_on_one_group

T, U = TenantId("t"), TenantId("u")


def read_lanes(
    cluster: FakeCluster, tenant: TenantId | None = None, seconds: float = 1000.0
) -> LanesView:
    window = cluster.now - seconds, cluster.now
    reader = LanesReader(cluster.core.cluster, tenant, window, 0)
    for _ in (*reader.read_memory(lambda: cluster.core.cluster), *reader.steps()):
        pass
    return reader.view()


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


def test_a_group_that_is_gone_keeps_its_runs_behind_those_that_exist() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(2)
    cluster.job("a", "t")
    cluster.deploy("a/actor")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "forward")
    while cluster.runs:
        cluster.pass_time(20.0)
        cluster.execute(cluster.runs[0])
    (before,) = read_lanes(cluster)["lanes"]
    cluster.send(ev.JobFinished(job="a", outcome="completed"))
    cluster.settle()
    cluster.job("b", "u")
    cluster.deploy("b/actor")
    cluster.settle()
    new, gone = read_lanes(cluster)["lanes"]
    assert (new["is_gone"], gone["is_gone"]) == (False, True)
    assert (gone["group"], gone["gpus"], gone["members"]) == (before["group"], 2, 0)
    assert [span[2:] for span in gone["spans"]][: len(before["spans"])]
    assert [lane["group"] for lane in read_lanes(cluster, T)["lanes"]] == [gone["group"]]
    assert [lane["group"] for lane in read_lanes(cluster, U)["lanes"]] == [new["group"]]


def test_runs_from_the_archive_end_where_the_history_in_memory_begins() -> None:
    cluster = two_jobs_on_one_group()
    window = cluster.now - 1000.0, cluster.now
    reader = LanesReader(cluster.core.cluster, None, window, 0)
    for _ in reader.read_memory(lambda: cluster.core.cluster):
        pass
    since = reader.memory_since
    assert since is not None
    assert reader.earlier == (window[0], since)
    about = RunGroup(GroupId("old"), 8, "h200")
    long_run = GroupRun(since - 100.0, since + 50.0, run_job("z"), WORK, about)
    for _ in reader.add_earlier([long_run], [(since - 200.0, since)]):
        pass
    for _ in reader.steps():
        pass
    view = reader.view()
    (old,) = [lane for lane in view["lanes"] if lane["is_gone"]]
    (span,) = old["spans"]
    assert (old["gpus"], old["node_type"]) == (8, "h200")
    assert span[1] == round(since - window[0], 3)
    assert view["oldest"] == since - 200.0
    assert view["gaps"] == [(0.0, round(since - 200.0 - window[0], 3))]


def test_what_left_the_memory_before_it_was_read_is_a_gap() -> None:
    cluster = two_jobs_on_one_group(history=4)
    window = cluster.now - 1000.0, cluster.now
    reader = LanesReader(cluster.core.cluster, None, window, 0)
    before = reader.memory_since
    cluster.submit("a:2", "a/actor", "forward")
    cluster.settle()
    for _ in reader.read_memory(lambda: cluster.core.cluster):
        pass
    state = cluster.core.cluster.state
    ended = [state.operations[name].finished_at for _, name in sorted(state.finished.items())]
    assert before is not None
    assert ended[0] is not None
    assert ended[0] > before
    # The archive is asked for what was not read.
    assert reader.earlier == (window[0], ended[0])
    (gap,) = reader.view()["gaps"]
    assert gap == (0.0, round(ended[0] - window[0], 3))


@pytest.mark.parametrize(
    ("covered", "gaps"),
    [
        ([], [(0.0, 10.0)]),
        ([(3.0, 6.0)], [(0.0, 3.0), (6.0, 10.0)]),
        ([(8.0, 20.0), (-5.0, 2.0), (1.0, 4.0)], [(4.0, 8.0)]),
        ([(0.0, 10.0)], []),
        ([(11.0, 12.0)], [(0.0, 10.0)]),
        ([(-3.0, -1.0)], [(0.0, 10.0)]),
    ],
)
def test_gaps_are_what_no_interval_covers(
    covered: list[tuple[float, float]], gaps: list[tuple[float, float]]
) -> None:
    moved = [(begin + 100.0, end + 100.0) for begin, end in covered]
    assert uncovered(moved, 100.0, 110.0) == gaps


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


def run_job(name: str) -> RunJob:
    return RunJob(JobId(name), "", T)


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
        (begin, min(1000.0, begin + wide), run_job(job), int(is_switch))
        for begin, wide, job, is_switch in drawn
    )
    least_s = 1000.0 / SPANS_PER_LANE
    numbers: dict[RunJob | None, int] = {run_job(name): at for at, name in enumerate("abc")}
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
        (begin, min(1000.0, begin + wide), run_job(job), int(is_switch))
        for begin, wide, job, is_switch in drawn
    )
    numbers: dict[RunJob | None, int] = {run_job(name): at for at, name in enumerate("abc")}
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
    (group,) = reader.groups.values()
    group.runs = [(0.01 * at, 0.01 * at + 0.005, run_job("a"), WORK) for at in range(50_000)]
    assert sum(1 for _ in reader.steps()) >= 50_000 // RUNS_PER_STEP


def test_an_endless_row_of_short_runs_stays_a_bounded_answer() -> None:
    runs: list[Run] = [
        (0.01 * at, 0.01 * at + 0.005, run_job("ab"[at % 2]), WORK) for at in range(100_000)
    ]
    numbers: dict[RunJob | None, int] = {run_job("a"): 0, run_job("b"): 1}
    spans: list[Span] = []
    merge(runs, 1000.0 / SPANS_PER_LANE, numbers.__getitem__, spans)
    assert len(spans) <= 2 * SPANS_PER_LANE
    assert {span[2] for span in spans} == {SEVERAL_JOBS}


def test_a_stored_run_is_drawn_as_such_and_makes_no_gpu_busy() -> None:
    cluster = cluster_with_gradients()
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.pass_time(50.0)
    (step,) = [run for run in cluster.runs if run.operation == "a:2"]
    cluster.execute(step)
    view = read_lanes(cluster)
    (lane,) = view["lanes"]
    stored = [span for span in lane["spans"] if span[3] == STORED]
    assert [view["jobs"][span[2]]["job"] for span in stored] == ["a"]
    assert sum(end - begin for begin, end, _, _ in stored) >= 50.0


def test_a_run_over_several_groups_is_on_each_of_them() -> None:
    cluster = two_trainings()
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.run_until("a:1")
    cluster.pass_time(20.0)
    cluster.execute(cluster.runs[0])
    groups = cluster.core.cluster.state.deployments[DeploymentId("a/actor")].placement.groups
    assert len(groups) == 3
    view = read_lanes(cluster)
    shown = {
        lane["group"]
        for lane in view["lanes"]
        if any(view["jobs"][span[2]]["job"] == "a" and span[3] == WORK for span in lane["spans"])
    }
    assert shown >= set(groups)
