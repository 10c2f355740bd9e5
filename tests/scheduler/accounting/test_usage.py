"""Usage is exact to the journal: a reading of the events and runs alone comes to the same sums."""

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plexrl.errors import PlexRLError, QuotaExceededError
from plexrl.ids import DeploymentId
from plexrl.scheduler.queries.views import usage_view
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd
from plexrl.wire.messages.cluster_views import UsageView
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

if TYPE_CHECKING:
    from plexrl.wire.messages.cluster_views import UsageView


GPUS = {"a/actor": 2, "b/actor": 2, "c/actor": 2, "a/rollout": 1, "d/batch": 2}
MOVES = ("load", "offload", "snapshot")
SWITCHES = ("load", "offload")
CONDITIONS = ("storage_full", "unavailable")
ENDINGS = ev.JobFinished | ev.DeploymentEnded | ev.DeploymentRelaid
"""What a controller does; all else that stops workers is a fault of the cluster."""
OWNERS = {"a": "t", "b": "u", "d": "v"}
"""The first job of each tenant."""
Row = tuple[str, str]
"""(job, kind of operation)."""


@dataclass(slots=True)
class Run:
    command: cmd.Run
    held: float = 0.0
    """GPU-seconds so far."""


class Metered(FakeCluster):
    """Reads its own journal: who held how many GPUs from when to when."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**changes)
        self.billed: dict[Row, float] = defaultdict(float)
        self.begun: dict[Row, set[str]] = defaultdict(set)
        """Operations of which a run began."""
        self.ended: dict[Row, set[str]] = defaultdict(set)
        """Operations whose last run was billed."""
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
                if not run.command.replay and _is_worth_something(run.command, event):
                    self._bill(run)
                    if isinstance(event, ev.OperationFailed) or not event.unfinished_rows:
                        self.ended[self._row(run)].add(run.command.operation)
        commands = super().send(event)
        for command in (*commands, *self._unsent()):
            if isinstance(command, cmd.StopWorkers):
                job = self.core.job_view(command.deployment.split("/")[0], self.now)
                is_billed = isinstance(event, ENDINGS) or job["state"] == "FAILED"
                for run in self._flying.pop(command.deployment, {}).values():
                    if is_billed and not run.command.replay:
                        self._bill(run)
            elif isinstance(command, cmd.Run):
                key = (command.operation, command.token)
                run = self._flying[command.deployment].setdefault(key, Run(command))
                self.begun[self._row(run)].add(command.operation)
        return commands

    def _unsent(self) -> list[cmd.Run]:
        """Runs that have begun while no router is there: they hold their GPUs until one comes."""
        if self.has_router:
            return []
        found: list[cmd.Run] = []
        for each in self.core._context.state.deployments.values():
            found += each.work.running.values()
            found += [each.wpg.moving] if each.wpg.moving is not None else []
        return found

    def _row(self, run: Run) -> Row:
        return run.command.job, run.command.kind.value

    def _bill(self, run: Run) -> None:
        self.billed[self._row(run)] += run.held

    def under_way(self, *, moves: bool) -> float:
        """GPU-seconds of the runs that may be billed later, with or without moves."""
        held = 0.0
        for name, runs in self._flying.items():
            for run in runs.values():
                if not run.command.replay and (moves or run.command.kind.value not in MOVES):
                    held += run.held + (self.now - self._until) * GPUS[name] / len(runs)
        return held

    def fail(self, run: cmd.Run, *, intact: bool, code: str = "execution_failed") -> None:
        """The workers report that a run has failed."""
        self.runs.remove(run)
        self.send(
            ev.OperationFailed(
                operation=run.operation,
                token=run.token,
                error={"code": code, "message": "no", "details": {}},
                state_intact=intact,
            )
        )

    def check(self) -> None:
        """Compare with what the core says, row by row and in sum."""
        rows: dict[Row, UsageView] = {
            (u["job"], u["kind"]): u for u in usage_view(self.core.cluster.state, None)
        }
        mine, theirs = dict(self.billed), {key: u["gpu_seconds"] for key, u in rows.items()}
        # Who pays for a switch depends on what the core decides next.
        for table in (mine, theirs):
            for key in [key for key in table if key[1] in SWITCHES]:
                table["*", key[1]] = table.get(("*", key[1]), 0.0) + table.pop(key)
        assert mine.keys() <= theirs.keys()
        for key, seconds in theirs.items():
            assert seconds == pytest.approx(mine.get(key, 0.0), rel=1e-9, abs=1e-9), key
        for key, row in rows.items():
            # An operation that fails before it begins is counted, but it never ran.
            if key[1] not in SWITCHES:
                most = len(self.begun[key]) + row["failed"]
                assert len(self.ended[key]) <= row["operations"] <= most, key
        # Budgets see what runs; a switch only while its payer is on the group.
        used = sum(tenant["gpu_seconds"] for tenant in self.core.list_tenants(self.now))
        billed = sum(self.billed.values())
        slack = 1e-9 * max(1.0, used)
        assert billed + self.under_way(moves=False) <= used + slack
        assert used <= billed + self.under_way(moves=True) + slack
        for job, tenant in OWNERS.items():
            owner = next(e for e in self.core.list_tenants(self.now) if e["tenant"] == tenant)
            mine_now = sum(seconds for (name, kind), seconds in mine.items() if name == job)
            assert owner["gpu_seconds"] >= mine_now * (1 - 1e-9), tenant


def _is_worth_something(run: cmd.Run, event: ev.OperationFinished | ev.OperationFailed) -> bool:
    """Whether a run that ends with this report is billed: the cluster did not make it worthless."""
    if isinstance(event, ev.OperationFinished):
        return True
    code = event.error["code"]
    if run.kind.value in MOVES:
        # It cannot be built as the tenant described it.
        return run.kind.value == "load" and code == "invalid_request"
    return code not in CONDITIONS


def metered(**changes: object) -> Metered:
    cluster = Metered(snapshot_operations=4, **changes)
    cluster.start_node()
    for tenant in ("t", "u", "v"):
        cluster.send(ev.TenantCreated(tenant=tenant, key_digest=tenant))
    for job, tenant in (("a", "t"), ("b", "u"), ("c", "t")):
        cluster.job(job, tenant=tenant)
        cluster.deploy(f"{job}/actor")
    cluster.deploy("a/rollout", "rollout", workers=1)
    cluster.job("d", tenant="v")
    cluster.deploy("d/batch", "rollout", preemptible=True)
    return cluster


def _step(name: str, *values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, Any, Any]]:
    what, number = (*values, st.just(0))[:2] if values else (st.just(""), st.just(0))
    return st.tuples(st.just(name), what, number)


_run = st.integers(0, 3)
_actor = st.sampled_from("abc")
_deadline = st.sampled_from((None, None, 5.0, 200.0))
steps = st.lists(
    st.one_of(
        _step("forward_backward", _actor),
        _step("optim_step", _actor),
        _step("generate", st.sampled_from(("a/rollout", "d/batch")), _deadline),
        _step("generate", st.just("d/batch"), _deadline),
        _step("sync_weights"),
        _step("run", _run),
        _step("run", _run),
        _step("fail", st.sampled_from(("execution_failed", "invalid_request")), _run),
        _step("fail", st.sampled_from(CONDITIONS), _run),
        _step("break", _run),
        _step("time", st.sampled_from((0, 1, 7, 133))),
        _step("time", st.just(1)),
        _step("cancel", _run),
        _step("relayout", st.sampled_from(("a/rollout", "d/batch")), st.integers(0, 1)),
        _step("kill", st.sampled_from(sorted(GPUS))),
        _step("node"),
        _step("answer", _run),
        _step("report again", _run),
        _step("router", st.sampled_from(("lost", "back", "replaced"))),
        _step("end deployment", st.sampled_from(("a/rollout", "d/batch"))),
        _step("end job", st.sampled_from("abcd"), st.sampled_from(("completed", "cancelled"))),
    ),
    max_size=60,
)


class Steps:
    """Does to a cluster what a history says."""

    def __init__(self, cluster: Metered) -> None:
        self.cluster = cluster
        self.accepted: list[str] = []

    def take(self, step: str, what: Any, number: Any) -> None:
        cluster = self.cluster
        if step in ("run", "break", "answer"):
            number = what
        run = None
        if cluster.runs and isinstance(number, int):
            run = cluster.runs[number % len(cluster.runs)]
        match step:
            case "forward_backward" | "optim_step":
                self._submit(f"{what}/actor", step)
            case "generate":
                self._submit(what, step, deadline_s=number)
            case "sync_weights":
                self._submit("a/rollout", step, source="a/actor")
            case "run" if run is not None:
                cluster.execute(run)
            case "fail" if run is not None and what != "invalid_request":
                cluster.fail(run, intact=True, code=what)
            case "fail" if run is not None and run.kind.value == "load":
                cluster.fail(run, intact=True, code=what)
            case "break" if run is not None:
                cluster.kill(run.deployment)
            case "answer" if run is not None:
                # The router dies before it has reported the end of the run.
                cluster.execute(run, report=False)
                self.take("router", "replaced", 0)
            case "report again":
                # A router that was replaced has been slow.
                ends = ev.OperationFinished | ev.OperationFailed
                if reports := [each for each, _ in cluster.journal if isinstance(each, ends)]:
                    cluster.send(reports[-1 - what % len(reports)])
            case "router":
                if what != "back":
                    cluster.lose_router()
                if what != "lost":
                    cluster.join_router()
            case "time":
                cluster.pass_time(float(what))
            case "cancel" if self.accepted:
                with suppress(PlexRLError):
                    cluster.send(ev.OperationCancelled(operation=self.accepted[-1 - what :][0]))
            case "relayout":
                with suppress(PlexRLError):
                    cluster.relayout(what, str(number))
            case "kill":
                cluster.kill(what)
            case "node":
                cluster.lose_node("n")
                cluster.join_node()
            case "end deployment":
                with suppress(PlexRLError):
                    cluster.end(what)
            case "end job":
                with suppress(PlexRLError):
                    cluster.send(ev.JobFinished(job=what, outcome=number))
        live = {
            name
            for name in GPUS
            if cluster.core.deployment_view(DeploymentId(name), cluster.now)["state"] != "stopped"
        }
        cluster.runs = [
            run
            for run in cluster.runs
            if run.deployment in live and not cluster.is_out_of_date(run)
        ]
        while cluster.launches:
            cluster.launch(cluster.launches[0])

    def _submit(self, deployment: str, kind: str, **fields: Any) -> None:
        operation = f"{deployment}:{len(self.accepted)}"
        with suppress(PlexRLError):
            self.cluster.submit(operation, deployment, kind, **fields)
            self.accepted.append(operation)


@settings(
    max_examples=examples(200), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(steps)
def test_usage_is_what_an_independent_reading_of_the_journal_says(
    history: list[tuple[str, Any, Any]],
) -> None:
    cluster = metered()
    does = Steps(cluster)
    for step in history:
        does.take(*step)
        cluster.check()


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
        (u["job"], u["kind"]): u["gpu_seconds"]
        for u in usage_view(cluster.core.cluster.state, None)
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
    before = {u["kind"]: u["gpu_seconds"] for u in usage_view(cluster.core.cluster.state, None)}
    cluster.kill("a/actor")
    cluster.launch(cluster.launches[0])
    cluster.submit("a:2", "a/actor", "barrier")
    ran = []
    while cluster.runs:
        ran.append((cluster.runs[0].kind.value, cluster.runs[0].replay))
        cluster.pass_time(5.0)
        cluster.execute(cluster.runs[0])
    assert ran == [("load", False), ("forward_backward", True), ("barrier", False)]
    rows = {u["kind"]: u["gpu_seconds"] for u in usage_view(cluster.core.cluster.state, None)}
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
    rows = {u["kind"]: u["gpu_seconds"] for u in usage_view(cluster.core.cluster.state, None)}
    assert rows == {"load": 0.0}


def _interrupted_filler() -> tuple[FakeCluster, str]:
    """A filler's generation of 1800 s on two GPUs, which waits because a member wants the group."""
    cluster = FakeCluster()
    cluster.start_node()
    for tenant in ("t", "v"):
        cluster.send(ev.TenantCreated(tenant=tenant, key_digest=tenant))
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.job("d", tenant="v")
    cluster.deploy("d/batch", "rollout", preemptible=True)
    cluster.settle()
    cluster.submit("d:1", "d/batch", "generate", deadline_s=1e5)
    _execute(cluster, "load")
    cluster.pass_time(1800.0)
    cluster.submit("a:1", "a/actor", "forward_backward")
    _execute(cluster, "generate")
    assert cluster.state_of("d:1") == "pending"
    return cluster, "d:1"


def _execute(cluster: FakeCluster, kind: str) -> None:
    (run,) = [run for run in cluster.runs if run.kind.value == kind]
    cluster.execute(run)


def _generated(cluster: FakeCluster) -> tuple[float, int]:
    """(GPU-seconds, number) of the filler's generations."""
    rows = [
        u
        for u in usage_view(cluster.core.cluster.state, None)
        if (u["job"], u["kind"]) == ("d", "generate")
    ]
    return sum(u["gpu_seconds"] for u in rows), sum(u["operations"] for u in rows)


@pytest.mark.parametrize(
    "end", ["cancel", "deadline", "deployment", "job", "lost workers", "lost workers, cancelled"]
)
def test_what_an_interrupted_generation_held_is_billed_however_its_wait_ends(end: str) -> None:
    cluster, operation = _interrupted_filler()
    assert _generated(cluster) == (3600.0, 0)
    match end:
        case "cancel":
            cluster.send(ev.OperationCancelled(operation=operation))
        case "deadline":
            cluster.pass_time(1e5)
        case "deployment":
            cluster.end("d/batch")
        case "job":
            cluster.send(ev.JobFinished(job="d", outcome="completed"))
        case _:
            for kind in ("offload", "load", "forward_backward", "offload", "load"):
                cluster.pass_time(100.0)
                _execute(cluster, kind)
            assert cluster.state_of(operation) == "running"
            if end.endswith("cancelled"):
                cluster.send(ev.OperationCancelled(operation=operation))
            cluster.pass_time(50.0)
            cluster.kill("d/batch")
            cluster.send(ev.JobFinished(job="d", outcome="cancelled"))
    assert _generated(cluster) == (3600.0, 1)


def test_a_budget_sees_what_an_interrupted_and_a_running_operation_hold() -> None:
    cluster, _ = _interrupted_filler()
    for kind in ("offload", "load", "forward_backward"):
        _execute(cluster, kind)
    cluster.pass_time(1.0)
    for kind in ("offload", "load"):
        _execute(cluster, kind)
    (used,) = [e["gpu_seconds"] for e in cluster.core.list_tenants(0.0) if e["tenant"] == "v"]
    assert used >= 3600.0
    limits = {"jobs_max": None, "gpus_max": None, "gpu_seconds_max": used + 50.0}
    cluster.send(ev.TenantConfigured(tenant="v", weight=1.0, **limits))
    cluster.pass_time(24.0)
    cluster.submit("d:3", "d/batch", "generate")
    cluster.pass_time(1.1)
    with pytest.raises(QuotaExceededError, match=r"of its .* GPU-seconds"):
        cluster.submit("d:4", "d/batch", "generate")
    with pytest.raises(QuotaExceededError):
        cluster.job("e", tenant="v")
    # What a lost worker makes worthless does not count.
    cluster.kill("d/batch")
    cluster.submit("d:4", "d/batch", "generate")


def test_a_run_that_another_layout_cuts_off_is_billed() -> None:
    cluster = FakeCluster()
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/rollout", "rollout")
    cluster.settle()
    cluster.submit("r:1", "a/rollout", "generate")
    _execute(cluster, "load")
    cluster.pass_time(500.0)
    cluster.relayout("a/rollout", "2")
    rows = {u["kind"]: u["gpu_seconds"] for u in usage_view(cluster.core.cluster.state, None)}
    assert rows == {"load": 0.0, "generate": 1000.0}


def test_a_switch_is_not_billed_to_a_later_job_of_the_same_name() -> None:
    cluster = FakeCluster(ended_jobs=1)
    cluster.start_node(gpus=2)
    for tenant in ("t", "u"):
        cluster.send(ev.TenantCreated(tenant=tenant, key_digest=tenant))
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.settle()
    cluster.submit("b:1", "b/actor", "forward_backward")
    cluster.pass_time(60.0)
    assert [run.kind.value for run in cluster.runs] == ["offload"]
    cluster.job("c")
    for job in ("b", "c"):
        cluster.send(ev.JobFinished(job=job, outcome="cancelled"))
    cluster.job("b", tenant="u")
    cluster.deploy("b/actor")
    cluster.pass_time(10.0)
    _execute(cluster, "offload")
    tenants = cluster.core.list_tenants(cluster.now)
    used = {str(each["tenant"]): each["gpu_seconds"] for each in tenants}
    assert used["u"] == 0.0
    assert used["t"] >= 20.0
