"""A restarted scheduler decides as if it had never stopped."""

import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from plexrl.errors import ExecutionError, InvalidRequestError, PlexRLError, StorageError
from plexrl.ids import DeploymentId
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.core.snapshot import encode
from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.queries.views import operation_log
from plexrl.scheduler.rules.config import (
    LATER_SETTINGS,
    PROCESS_SETTINGS,
    core_settings,
    with_core_settings,
)
from plexrl.scheduler.service.journal.recovery import restore
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages.calls import ListOperations
from plexrl.scheduler.state.records import State
from plexrl.wire import messages as cmd
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster, config

TTL_S = 3600.0
DEPLOYMENTS = ("a/actor", "b/actor", "a/rollout", "gone/actor")
KINDS = ("forward_backward", "optim_step", "forward", "barrier", "generate", "sync_weights")


class RecordedCluster(FakeCluster):
    """Records the commands of each event; none for a refused one."""

    def __init__(self) -> None:
        self.answers: list[list[cmd.Command]] = []
        super().__init__()

    def send(self, event: ev.Event) -> list[cmd.Command]:
        try:
            self.answers.append(super().send(event))
        except PlexRLError:
            self.answers.append([])
        return self.answers[-1]

    def step(self, choice: int) -> None:
        """Send one of the possible events, by number."""
        rest, what = divmod(choice, 12)
        name = DEPLOYMENTS[rest % len(DEPLOYMENTS)]
        match what:
            case 0 | 1 | 2:
                kind = KINDS[rest // len(DEPLOYMENTS) % len(KINDS)]
                source = "a/actor" if kind == "sync_weights" else None
                self.submit(f"o{rest % 97}", name, kind, source)
            case 3 | 4 if self.runs:
                self.execute(self.runs[rest % len(self.runs)], report=rest % 5 > 0)
            case 5 | 6 if self.launches:
                self.launch(self.launches[rest % len(self.launches)])
            case 7:
                self.kill(name)
            case 8:
                self.send(ev.OperationCancelled(operation=f"o{rest % 97}"))
            case 9 if self.runs:
                self.fail(self.runs[rest % len(self.runs)], intact=rest % 2 == 0)
            case 10 if rest % 4 == 0:
                self.send(started(policy=("pack", "isolated")[rest // 4 % 2]))
            case _:
                self.pass_time((0.01, 0.1, 5.0, 100.0)[rest % 4])

    def fail(self, run: cmd.Run, *, intact: bool) -> None:
        """A run fails."""
        self.runs.remove(run)
        self.send(
            ev.OperationFailed(
                operation=run.operation,
                token=run.token,
                error=ExecutionError("no").to_wire(),
                state_intact=intact,
            )
        )


def started(**changes: object) -> ev.SchedulerStarted:
    return ev.SchedulerStarted(settings=core_settings(config(**changes)))


def history(choices: list[int]) -> RecordedCluster:
    """A cluster with two jobs after the events `choices`."""
    cluster = RecordedCluster()
    cluster.start_node()
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor")
    cluster.deploy("a/rollout", "rollout", workers=1)
    for choice in choices:
        cluster.step(choice)
    return cluster


def answer(core: SchedulerCore, event: ev.Event, at: float) -> list[cmd.Command]:
    try:
        return core.handle(event, at)
    except PlexRLError:
        return []


def views(core: SchedulerCore, now: float) -> dict[str, Any]:
    """All views of a core."""
    log = operation_log(core.cluster, None, ListOperations(), now)
    operations = {row["operation"]: core.operation_view(row["operation"], now) for row in log}
    return {
        "jobs": core.list_jobs(None, now),
        "groups": core.list_groups(now),
        "nodes": core.list_nodes(),
        "log": log,
        "operations": operations,
        "status": core.status(now),
        "tenants": core.tenants(),
    }


@pytest.fixture(scope="module")
def empty_journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal file to copy, because creating the tables takes longer than any test here."""
    path = tmp_path_factory.mktemp("journal") / "empty.sqlite"
    SqlJournal(str(path)).close()
    return path


@pytest.fixture
def journal(empty_journal: Path, tmp_path: Path) -> Iterator[SqlJournal]:
    """A new journal with an acquired lease."""
    with closing(open_copy(empty_journal, tmp_path)) as opened:
        yield opened


def open_copy(empty: Path, folder: Path) -> SqlJournal:
    for left in folder.glob("journal.sqlite*"):
        left.unlink()
    path = shutil.copy(empty, folder / "journal.sqlite")
    opened = SqlJournal(str(path))
    opened.acquire("test", TTL_S)
    return opened


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    choices=st.lists(st.integers(0, 1 << 20), min_size=5, max_size=80),
    crash=st.floats(0, 1),
    snapshots=st.lists(st.floats(0, 1), max_size=3),
)
@example(choices=[0, 12, 5, 5, 3, 15, 3], crash=1.0, snapshots=[0.0, 1.0])
def test_after_a_crash_at_any_point_the_decisions_are_the_same(
    empty_journal: Path,
    tmp_path: Path,
    choices: list[int],
    crash: float,
    snapshots: list[float],
) -> None:
    cluster = history(choices)
    crashed_at = round(crash * len(cluster.journal))
    snapshot_at = {round(share * crashed_at) for share in snapshots}
    former = SchedulerCore(cluster.config)
    with closing(open_copy(empty_journal, tmp_path)) as journal:
        for index, (event, at) in enumerate(cluster.journal[:crashed_at], start=1):
            journal.append([(event, at)])
            answer(former, event, at)
            if index in snapshot_at:
                journal.write_snapshot(index, at, former.dump())
                journal.compact()
        restored = restore(cluster.config, journal)
    assert restored.position == crashed_at
    assert restored.snapshot_position == max(snapshot_at - {0}, default=0)
    core = restored.core
    now = cluster.now
    assert views(core, now) == views(former, now)
    assert core.dump() == former.dump()
    rest = zip(cluster.journal[crashed_at:], cluster.answers[crashed_at:], strict=True)
    for (event, at), commands in rest:
        assert answer(core, event, at) == commands
        core.check_invariants()
    assert views(core, now) == views(cluster.core, now)


def write(journal: SqlJournal, cluster: RecordedCluster, *snapshots: int) -> None:
    """Journal a history with snapshots at these positions."""
    core = SchedulerCore(cluster.config)
    for index, (event, at) in enumerate(cluster.journal, start=1):
        journal.append([(event, at)])
        answer(core, event, at)
        if index in snapshots:
            journal.write_snapshot(index, at, core.dump())
            journal.compact()


def test_old_events_are_replayed_under_their_own_settings(journal: SqlJournal) -> None:
    cluster = RecordedCluster()
    cluster.send(started(policy="pack"))
    cluster.start_node()
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor")
    assert len(cluster.core.list_groups(cluster.now)) == 1
    write(journal, cluster, 4)
    other = dataclasses.replace(cluster.config, policy="isolated", residents_max=1)
    core = restore(other, journal).core
    assert views(core, cluster.now) == views(cluster.core, cluster.now)
    answer(core, started(policy="isolated"), cluster.now)
    node = next(event for event, _ in cluster.journal if isinstance(event, ev.NodeJoined))
    answer(core, node, cluster.now)
    submitted = ev.JobSubmitted(
        job="c", tenant="t", name="c", controller_timeout_s=1e6, reattach_timeout_s=1e6
    )
    answer(core, submitted, cluster.now)
    deployment = ev.DeploymentCreated(
        deployment="c/actor",
        job="c",
        kind="train",
        workers=2,
        state_bytes=1000,
        exclusive=False,
        spec_json="{}",
    )
    answer(core, deployment, cluster.now)
    assert len(core.list_groups(cluster.now)) == 2


@pytest.mark.parametrize("to_do", ["newcomers", "cycles_over", "dirty"])
def test_no_snapshot_is_made_inside_an_event(to_do: str) -> None:
    context = Context(config())
    encode(context)
    if to_do == "newcomers":
        context.cluster.queues.waiting.newcomers.append(DeploymentId("j/actor"))
    else:
        setattr(context.effects, to_do, {"j/actor": None})
    with pytest.raises(AssertionError, match="inside an event"):
        encode(context)


def test_core_settings_are_all_except_process_settings() -> None:
    names = {field.name for field in dataclasses.fields(config())}
    assert names > PROCESS_SETTINGS
    assert set(core_settings(config())) == names - PROCESS_SETTINGS
    known = with_core_settings(config(), {"policy": "isolated", "of_a_later_version": 1})
    # What an earlier version wrote was decided without settings that came later.
    assert known == config(policy="isolated", **LATER_SETTINGS)
    with pytest.raises(InvalidRequestError, match="settings in the journal"):
        with_core_settings(config(), {"history": "many"})


def test_a_snapshot_of_an_unknown_format_is_ignored_for_the_events(
    journal: SqlJournal, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = history(list(range(40)))
    write(journal, cluster)
    body = msgspec.msgpack.encode({"version": 99, "settings": {}, "state": "other"})
    journal.write_snapshot(len(cluster.journal), cluster.now, body)
    with pytest.raises(StorageError, match="format 99"):
        SchedulerCore.restore(cluster.config, body)
    with caplog.at_level(logging.ERROR):
        restored = restore(cluster.config, journal)
    assert "is ignored" in caplog.text
    assert restored.snapshot_position == 0
    assert restored.core.dump() == cluster.core.dump()


def test_a_snapshot_that_is_cut_short_costs_only_time(journal: SqlJournal) -> None:
    cluster = history(list(range(40)))
    write(journal, cluster, 5, 10, 15)
    newest = journal.snapshot()
    assert newest is not None
    position, at, body = newest
    journal.write_snapshot(position, at, body[: len(body) // 2])
    restored = restore(cluster.config, journal)
    assert restored.snapshot_position == 10
    assert restored.core.dump() == cluster.core.dump()


def test_forgotten_events_without_a_snapshot_are_an_error(journal: SqlJournal) -> None:
    cluster = history(list(range(40)))
    write(journal, cluster, 5, 10)
    for position in (5, 10):
        journal.write_snapshot(position, 0.0, b"no snapshot")
    with pytest.raises(StorageError, match="holds no events 1 to 5"):
        restore(cluster.config, journal)


def test_a_failure_that_an_earlier_version_could_not_read_fails_the_operation() -> None:
    cluster = RecordedCluster()
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.settle()
    cluster.submit("o1", "a/actor", "forward")
    while cluster.runs[0].kind.value != "forward":
        cluster.execute(cluster.runs[0])
    run = cluster.runs.pop()
    line = {"type": "OperationFailed", "operation": "o1", "token": run.token, "state_intact": True}
    cluster.send(ev.CODEC.decode(json.dumps({**line, "error_json": "{no JSON"})))
    assert cluster.state_of("o1") == "failed"
    assert cluster.error_of("o1")["code"] == "execution_failed"


@pytest.mark.parametrize("seconds", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_json_cannot_carry_is_refused(seconds: float) -> None:
    event = ev.OperationFinished(operation="o", token=1, compute_s=seconds)
    with pytest.raises(InvalidRequestError, match="compute_s"):
        ev.CODEC.check(event)
    with pytest.raises(InvalidRequestError, match="finite"):
        ev.CODEC.encode(event)


OF_THE_FIRST_VERSION = {("Node", "alive"), ("Tenant", "weight"), ("Job", "attached")}
"""In every snapshot there is, so that no reader of one needs their defaults."""


def test_missing_fields_of_an_older_snapshot_read_the_same_in_compiled_records() -> None:
    """msgspec makes a record without its constructor, and takes the zeros in a compiled one for
    given values: a new number must mean nothing when it is zero."""
    records: set[type] = set()
    _find_records(State, records)
    assert len(records) > 10
    for record in records:
        kinds = get_type_hints(record)
        for field in dataclasses.fields(record):
            if kinds[field.name] in (int, float, bool) and field.default:
                known = field.default is dataclasses.MISSING
                assert known or (record.__name__, field.name) in OF_THE_FIRST_VERSION


def _find_records(hint: Any, found: set[type]) -> None:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and hint not in found:
        found.add(hint)
        for kind in get_type_hints(hint).values():
            _find_records(kind, found)
    for part in get_args(hint):
        _find_records(part, found)
