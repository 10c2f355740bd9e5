"""Usage is exact to the journal: a reading of the events and runs alone comes to the same sums."""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plexrl.scheduler.state.messages import commands as cmd
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster

if TYPE_CHECKING:
    from plexrl.scheduler.core.queries.view_types import UsageView

GPUS = {"a/actor": 2, "b/actor": 2, "c/actor": 2, "a/rollout": 1}
MOVES = ("load", "offload", "snapshot")
Row = tuple[str, str]
"""(job, kind of operation)."""


@dataclass(slots=True)
class Run:
    command: cmd.RunOperation
    held: float = 0.0
    """GPU-seconds so far."""


class Metered(FakeCluster):
    """Reads its own journal: who held how many GPUs from when to when."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**changes)
        self.billed: dict[Row, float] = defaultdict(float)
        self.counts: dict[Row, int] = defaultdict(int)
        self._flying: dict[str, dict[tuple[str, int], Run]] = defaultdict(dict)
        self._until = self.now

    def send(self, event: ev.Event) -> list[cmd.Command]:
        for name, runs in self._flying.items():
            for run in runs.values():
                run.held += (self.now - self._until) * GPUS[name] / len(runs)
        self._until = self.now
        if isinstance(event, ev.OperationFinished | ev.OperationFailed):
            for runs in self._flying.values():
                run = runs.pop((event.operation, event.token), None)
                if run is None:
                    continue
                kind = run.command.kind.value
                is_called_off = isinstance(event, ev.OperationFailed) and kind in MOVES
                if not run.command.replay and not is_called_off:
                    self._bill(run)
        if isinstance(event, ev.JobFinished):
            for name in [name for name in self._flying if name.split("/")[0] == event.job]:
                for run in self._flying.pop(name).values():
                    if not run.command.replay:
                        self._bill(run)
        commands = super().send(event)
        for command in commands:
            if isinstance(command, cmd.StopWorkers):
                self._flying[command.deployment].clear()
            elif isinstance(command, cmd.RunOperation):
                key = (command.operation, command.token)
                self._flying[command.deployment].setdefault(key, Run(command))
        return commands

    def _bill(self, run: Run) -> None:
        row = (run.command.job, run.command.kind.value)
        self.billed[row] += run.held
        self.counts[row] += 1

    def fail(self, run: cmd.RunOperation, *, intact: bool) -> None:
        """The workers report that a run has failed."""
        self.runs.remove(run)
        self.send(
            ev.OperationFailed(
                operation=run.operation,
                token=run.token,
                error_json='{"code": "execution_failed", "message": "no"}',
                state_intact=intact,
            )
        )

    def check(self, *, offloads_by_job: bool) -> None:
        """Compare with what the core says, row by row and in sum."""
        rows: dict[Row, UsageView] = {(u["job"], u["kind"]): u for u in self.core.usage(None)}
        mine, theirs = dict(self.billed), {key: u["gpu_seconds"] for key, u in rows.items()}
        if not offloads_by_job:
            for table in (mine, theirs):
                for key in [key for key in table if key[1] == "offload"]:
                    table["*", "offload"] = table.get(("*", "offload"), 0.0) + table.pop(key)
        assert mine.keys() <= theirs.keys()
        for key, seconds in theirs.items():
            assert seconds == pytest.approx(mine.get(key, 0.0), rel=1e-9, abs=1e-9), key
        for key, row in rows.items():
            # An operation that fails before it begins is counted, but it never ran.
            never_ran = row["operations"] - self.counts.get(key, 0)
            assert key[1] == "offload" or 0 <= never_ran <= row["failed"], key
        for tenant in self.core.list_tenants(self.now):
            jobs = self.core.list_jobs(tenant["tenant"], self.now)
            total = sum(job["gpu_seconds"] for job in jobs)
            assert tenant["gpu_seconds"] == pytest.approx(total, rel=1e-9, abs=1e-9)


def metered() -> Metered:
    cluster = Metered(snapshot_operations=4)
    cluster.start_node()
    for tenant in ("t", "u"):
        cluster.send(ev.TenantCreated(tenant=tenant, key_digest=tenant))
    for job, tenant in (("a", "t"), ("b", "u"), ("c", "t")):
        cluster.job(job, tenant=tenant)
        cluster.deploy(f"{job}/actor")
    cluster.deploy("a/rollout", "rollout", workers=1)
    return cluster


steps = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.sampled_from("abc"), st.integers(0, 1)),
        st.tuples(st.just("rollout"), st.sampled_from(("generate", "sync_weights")), st.just(0)),
        st.tuples(st.sampled_from(("run", "fail", "break")), st.just(""), st.integers(0, 3)),
        st.tuples(st.just("time"), st.just(""), st.sampled_from((0, 1, 7, 133))),
        st.tuples(st.just("kill"), st.sampled_from(sorted(GPUS)), st.just(0)),
        st.tuples(st.just("node"), st.just(""), st.just(0)),
        st.tuples(st.just("end"), st.sampled_from("abc"), st.just(0)),
        st.tuples(st.sampled_from(("run", "time")), st.just(""), st.just(1)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(steps)
def test_usage_is_what_an_independent_reading_of_the_journal_says(
    history: list[tuple[str, str, int]],
) -> None:
    cluster = metered()
    ended: set[str] = set()
    for index, (step, what, number) in enumerate(history):
        run = cluster.runs[number % len(cluster.runs)] if cluster.runs else None
        if step == "train" and what not in ended:
            kind = ("forward_backward", "optim_step")[number]
            cluster.submit(f"{what}:{index}", f"{what}/actor", kind)
        elif step == "rollout" and "a" not in ended:
            source = "a/actor" if what == "sync_weights" else None
            cluster.submit(f"r:{index}", "a/rollout", what, source)
        elif step == "run" and run is not None:
            cluster.execute(run)
        elif step == "fail" and run is not None:
            cluster.fail(run, intact=True)
        elif step == "break" and run is not None:
            cluster.kill(run.deployment)
        elif step == "time":
            cluster.pass_time(float(number))
        elif step == "kill":
            cluster.kill(what)
        elif step == "node":
            cluster.lose_node("n")
            cluster.join_node()
        elif step == "end" and what not in ended:
            ended.add(what)
            cluster.send(ev.JobFinished(job=what, outcome="completed"))
            cluster.runs = [r for r in cluster.runs if not r.deployment.startswith(f"{what}/")]
        while cluster.launches:
            cluster.launch(cluster.launches[0])
        cluster.check(offloads_by_job=False)


def test_a_switch_is_billed_to_whoever_wanted_it() -> None:
    cluster = metered()
    cluster.settle()
    for job in ("a", "b", "a", "c"):
        cluster.submit(f"{job}:{cluster.now}", f"{job}/actor", "forward_backward")
        cluster.pass_time(1.0)
        while cluster.runs:
            cluster.pass_time(3.0)
            cluster.execute(cluster.runs[0])
    rows: dict[Row, float] = {
        (u["job"], u["kind"]): u["gpu_seconds"] for u in cluster.core.usage(None)
    }
    offloads = {job: seconds for (job, kind), seconds in rows.items() if kind == "offload"}
    # A holder that pauses keeps its GPUs for as long as a switch would take: until a move has been
    # measured for next to no time, then for 0.05 s.
    assert offloads == pytest.approx({"a": 8.0, "b": 8.0, "c": 7.9}, rel=1e-6)
    assert {job: rows[job, "load"] for job in "abc"} == {"a": 14.0, "b": 6.0, "c": 6.0}


def test_the_load_after_a_workers_death_is_the_jobs_and_the_repeated_run_is_nobodys() -> None:
    cluster = Metered()
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.settle()
    before = {u["kind"]: u["gpu_seconds"] for u in cluster.core.usage(None)}
    cluster.kill("a/actor")
    cluster.launch(cluster.launches[0])
    cluster.submit("a:2", "a/actor", "barrier")
    ran = []
    while cluster.runs:
        ran.append((cluster.runs[0].kind.value, cluster.runs[0].replay))
        cluster.pass_time(5.0)
        cluster.execute(cluster.runs[0])
    assert ran == [("load", False), ("forward_backward", True), ("barrier", False)]
    rows = {u["kind"]: u["gpu_seconds"] for u in cluster.core.usage(None)}
    assert rows == {**before, "load": before["load"] + 10.0, "barrier": 10.0}


def test_the_run_that_ends_a_job_by_its_last_crash_is_billed_to_nobody() -> None:
    cluster = Metered(launch_attempts=1)
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.submit("a:1", "a/actor", "barrier")
    for _ in range(2):
        cluster.launch(cluster.launches[0])
        cluster.execute(cluster.runs[0])
        cluster.pass_time(10.0)
        cluster.kill("a/actor")
    assert cluster.core.job_view("a", cluster.now)["state"] == "FAILED"
    rows = {u["kind"]: u["gpu_seconds"] for u in cluster.core.usage(None)}
    assert rows == {"load": 0.0}
