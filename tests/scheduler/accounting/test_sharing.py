"""The savings of sharing equal an exact account of the groups; a loss is negative."""

from collections.abc import Mapping

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plexrl.scheduler.accounting.sharing import sharing_view
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd
from plexrl.wire.messages.cluster_views import SharingView
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

WORKERS = 2
JOBS = ("a", "b", "c", "d")


class Watched(FakeCluster):
    """Adds up, from what groups there are between events, what they are in all."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**changes)
        self.existed = self.reserved = 0.0
        self._groups: list[tuple[int, int]] = []
        """(GPUs, members) of each since the last event."""
        self._seen_at = self.now

    def send(self, event: ev.Event) -> list[cmd.Command]:
        passed = self.now - self._seen_at
        self.existed += passed * sum(gpus for gpus, _ in self._groups)
        self.reserved += passed * sum(gpus * members for gpus, members in self._groups)
        commands = super().send(event)
        groups = self.core.list_groups(self.now)
        self._groups = [(len(group["gpus"]), len(group["members"])) for group in groups]
        self._seen_at = self.now
        return commands

    def rows(self) -> Mapping[str, SharingView]:
        self.send(ev.TimerFired())
        return {row["job"]: row for row in sharing_view(self.core.cluster.state, None, self.now)}


def started(gpus: int = 4, **changes: object) -> Watched:
    cluster = Watched(**changes)
    cluster.start_node(gpus)
    return cluster


def add(cluster: FakeCluster, *jobs: str) -> None:
    for job in jobs:
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=WORKERS)
        while cluster.launches:
            cluster.launch(cluster.launches[0])


def work(cluster: FakeCluster, job: str, seconds: float) -> None:
    """One step of the job, which takes that long from when it has the group."""
    name = f"{job}:{cluster.now}:{len(cluster.journal)}"
    cluster.submit(name, f"{job}/actor", "optim_step")
    until_it_runs(cluster, name)
    cluster.pass_time(seconds)
    while cluster.runs:
        cluster.execute(cluster.runs[0])


def until_it_runs(cluster: FakeCluster, operation: str) -> None:
    while not any(run.operation == operation for run in cluster.runs):
        if cluster.runs:
            cluster.execute(cluster.runs[0])
        else:
            cluster.pass_time(0.1)


def check(cluster: Watched) -> Mapping[str, SharingView]:
    rows = cluster.rows()
    for row in rows.values():
        isolated = row["reserved_gpu_seconds"] - row["waited_gpu_seconds"]
        assert row["isolated_gpu_seconds"] == isolated
        assert row["saved_gpu_seconds"] == isolated - row["held_gpu_seconds"]
        assert 0 <= row["waited_gpu_seconds"] <= row["reserved_gpu_seconds"] * (1 + 1e-9)
    held = sum(row["held_gpu_seconds"] for row in rows.values())
    assert held == pytest.approx(cluster.existed, rel=1e-9, abs=1e-6)
    reserved = sum(row["reserved_gpu_seconds"] for row in rows.values())
    assert reserved == pytest.approx(cluster.reserved, rel=1e-9, abs=1e-6)
    return rows


steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(JOBS)),
        st.tuples(st.just("run"), st.sampled_from(JOBS)),
        st.tuples(st.just("run"), st.sampled_from(JOBS)),
        st.tuples(st.just("time"), st.sampled_from(JOBS)),
        st.tuples(st.just("kill"), st.sampled_from(JOBS)),
        st.tuples(st.just("cancel"), st.sampled_from(JOBS)),
        st.tuples(st.just("end"), st.sampled_from(JOBS)),
    ),
    max_size=60,
)


def act(cluster: Watched, step: str, job: str, index: int, over: set[str]) -> None:
    """One thing that can happen; nothing where it cannot."""
    if step == "time":
        cluster.pass_time((0.0, 0.5, 7.0, 130.0)[index % 4])
    elif step == "run" and cluster.runs:
        cluster.execute(cluster.runs[index % len(cluster.runs)])
    elif job in over:
        return
    elif step == "submit":
        cluster.submit(f"{job}:{index}", f"{job}/actor", "optim_step")
    elif step == "kill":
        cluster.kill(f"{job}/actor")
    elif step == "cancel":
        waiting = [o for o in range(index) if _is_pending(cluster, f"{job}:{o}")]
        if waiting:
            cluster.send(ev.OperationCancelled(operation=f"{job}:{waiting[0]}"))
    elif step == "end":
        over.add(job)
        cluster.send(ev.JobFinished(job=job, outcome="completed"))
        cluster.runs = [run for run in cluster.runs if not run.deployment.startswith(f"{job}/")]
    while cluster.launches:
        cluster.launch(cluster.launches[0])


def _is_pending(cluster: FakeCluster, operation: str) -> bool:
    known = any(
        isinstance(event, ev.OperationSubmitted) and event.operation == operation
        for event, _ in cluster.journal
    )
    return known and cluster.state_of(operation) == "pending"


@settings(
    max_examples=examples(80), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(steps, st.sampled_from((2, 4, 6)))
def test_what_is_held_is_the_groups_time_and_saved_is_isolated_less_held(
    history: list[tuple[str, str]], gpus: int
) -> None:
    cluster = started(gpus)
    add(cluster, *JOBS)
    over: set[str] = set()
    for index, (step, job) in enumerate(history):
        act(cluster, step, job, index, over)
        check(cluster)


@settings(
    max_examples=examples(40), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(steps)
def test_a_job_alone_saves_nothing(history: list[tuple[str, str]]) -> None:
    cluster = started()
    add(cluster, "a")
    over: set[str] = set()
    for index, (step, _) in enumerate(history):
        act(cluster, step, "a", index, over)
        for row in check(cluster).values():
            assert row["waited_gpu_seconds"] == 0.0
            assert row["saved_gpu_seconds"] == 0.0


def test_jobs_that_never_want_the_group_at_once_save_one_group() -> None:
    cluster = started(WORKERS)
    add(cluster, "a", "b")
    begin = cluster.now
    for _ in range(5):
        work(cluster, "a", 10.0)
        cluster.pass_time(1.0)
        work(cluster, "b", 10.0)
        cluster.pass_time(1.0)
    rows = check(cluster)
    passed = cluster.now - begin
    assert passed > 100
    for row in rows.values():
        assert row["reserved_gpu_seconds"] == pytest.approx(WORKERS * passed)
        assert row["held_gpu_seconds"] == pytest.approx(WORKERS * passed / 2)
        # A holder that pauses keeps its GPUs for a moment: the other one waits for that.
        assert row["waited_gpu_seconds"] < 0.01 * row["reserved_gpu_seconds"]
        assert row["saved_gpu_seconds"] > 0.48 * WORKERS * passed


def test_jobs_that_always_work_lose_by_sharing_what_their_switches_take() -> None:
    cluster = started(WORKERS)
    add(cluster, "a", "b")
    for step in range(12):
        for job in ("a", "b"):
            cluster.submit(f"{job}:{step}", f"{job}/actor", "optim_step")
        while cluster.runs:
            cluster.pass_time(3.0)
            cluster.execute(cluster.runs[0])
    rows = check(cluster)
    assert sum(row["saved_gpu_seconds"] for row in rows.values()) < 0


def test_a_wait_prolongs_what_the_job_holds_elsewhere_too() -> None:
    cluster = started(WORKERS + 1)
    cluster.job("a")
    cluster.deploy("a/actor", workers=WORKERS)
    cluster.deploy("a/rollout", "rollout", workers=1)
    add(cluster, "b")
    cluster.settle()
    work(cluster, "a", 1.0)
    cluster.pass_time(100.0)
    before = check(cluster)["a"]
    cluster.submit("long", "b/actor", "optim_step")
    until_it_runs(cluster, "long")
    cluster.submit("next", "a/actor", "optim_step")
    cluster.pass_time(50.0)
    until_it_runs(cluster, "next")
    waited = check(cluster)["a"]["waited_gpu_seconds"] - before["waited_gpu_seconds"]
    # The other one's state leaves the GPUs a moment after its work.
    assert waited == pytest.approx((WORKERS + 1) * 50.0, rel=0.01)


def test_waits_of_one_job_at_the_same_time_prolong_it_once() -> None:
    cluster = started(WORKERS)
    cluster.job("a")
    for name in ("actor", "critic"):
        cluster.deploy(f"a/{name}", workers=WORKERS)
    add(cluster, "b")
    cluster.settle()
    cluster.submit("long", "b/actor", "optim_step")
    until_it_runs(cluster, "long")
    cluster.pass_time(1.0)
    before = check(cluster)["a"]["waited_gpu_seconds"]
    for name in ("actor", "critic"):
        cluster.submit(f"a:{name}", f"a/{name}", "optim_step")
    cluster.pass_time(30.0)
    for name in ("actor", "critic"):
        until_it_runs(cluster, f"a:{name}")
    waited = check(cluster)["a"]["waited_gpu_seconds"] - before
    assert waited == pytest.approx(2 * WORKERS * 30.0, rel=0.05)


def test_a_wait_under_way_counts_already_and_not_twice() -> None:
    cluster = started(WORKERS)
    add(cluster, "a", "b")
    cluster.submit("long", "b/actor", "optim_step")
    until_it_runs(cluster, "long")
    cluster.submit("next", "a/actor", "optim_step")
    waited = []
    for _ in range(3):
        cluster.pass_time(20.0)
        waited.append(check(cluster)["a"]["waited_gpu_seconds"])
    assert waited == [WORKERS * 20.0, WORKERS * 40.0, WORKERS * 60.0]
    cluster.send(ev.JobFinished(job="a", outcome="cancelled"))
    assert check(cluster)["a"]["waited_gpu_seconds"] == waited[-1]


def test_what_was_saved_survives_replay_and_snapshot_and_the_jobs_end() -> None:
    cluster = started(WORKERS)
    add(cluster, "a", "b")
    for job in ("a", "b", "a"):
        work(cluster, job, 10.0)
    saved = check(cluster)
    restored = SchedulerCore.restore(cluster.config, cluster.core.dump())
    assert sharing_view(restored.cluster.state, None, cluster.now) == list(saved.values())
    cluster.restart_scheduler(restored=True)
    for job in ("a", "b"):
        cluster.send(ev.JobFinished(job=job, outcome="completed"))
    cluster.pass_time(100.0)
    rows = check(cluster)
    assert {job: row["saved_gpu_seconds"] for job, row in rows.items()} == {
        job: row["saved_gpu_seconds"] for job, row in saved.items()
    }


def test_a_tenant_sees_what_its_own_jobs_saved() -> None:
    cluster = started(WORKERS)
    cluster.job("a", tenant="t")
    cluster.job("b", tenant="u")
    for job in ("a", "b"):
        cluster.deploy(f"{job}/actor", workers=WORKERS)
    cluster.pass_time(10.0)
    assert [row["job"] for row in sharing_view(cluster.core.cluster.state, "u", cluster.now)] == [
        "b"
    ]
    assert [row["job"] for row in sharing_view(cluster.core.cluster.state, None, cluster.now)] == [
        "a",
        "b",
    ]


def test_switches_are_counted_beyond_the_end_of_their_group() -> None:
    cluster = started(WORKERS)
    add(cluster, "a", "b")
    for job in ("a", "b", "a"):
        work(cluster, job, 10.0)
    counted = cluster.core.status(cluster.now)["context_switches"]
    assert counted == sum(group["switches"] for group in cluster.core.list_groups(cluster.now)) > 0
    for job in ("a", "b"):
        cluster.send(ev.JobFinished(job=job, outcome="completed"))
    assert cluster.core.list_groups(cluster.now) == []
    assert cluster.core.status(cluster.now)["context_switches"] == counted
    cluster.restart_scheduler(restored=True)
    assert cluster.core.status(cluster.now)["context_switches"] == counted
