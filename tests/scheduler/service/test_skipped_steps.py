"""Events that trigger a bug in the core: nothing changes, and replays skip the failing step.

The tests damage the state through a snapshot.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plexrl.errors import SchedulerFaultError
from plexrl.ids import JobId, OperationId
from plexrl.scheduler.core.advance import EVENT, Fault
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.service.journal.recovery import Restored, restore
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from plexrl.scheduler.service.shell import Clock, Shell
from plexrl.scheduler.service.skipped_steps import NONE_SKIPPED, STEPS_MAX, SkippedSteps
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.records import UsageRow
from plexrl.wire.messages.cluster_views import BrokerView
from plexrl.wire.operations import OperationKind, OperationState
from tests.scheduler.fake_cluster import FakeCluster

WAIT_S = 30.0
TTL_S = 3600.0


class StillClock(Clock):
    """A clock that stands still, so that no timer comes due."""

    def __init__(self, now: float) -> None:
        self._now = now

    def now(self) -> float:
        return self._now


Spoil = Callable[[SchedulerCore], None]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[SqlJournal]:
    made = SqlJournal(str(tmp_path / "journal.sqlite"))
    made.acquire("test", TTL_S)
    yield made
    made.close()


def ready_cluster() -> FakeCluster:
    """Two jobs with a group each; `a` runs the load of a checkpoint."""
    cluster = FakeCluster(policy="isolated")
    cluster.start_node()
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    cluster.submit("o", "a/actor", "load_checkpoint", deadline_s=50.0)
    cluster.execute(cluster.runs[0])
    return cluster


def without_a_group(core: SchedulerCore) -> None:
    """Every access to the group of `a` fails."""
    state = core._context.state
    del state.groups[next(iter(state.groups))]


def with_an_unknown_operation(core: SchedulerCore) -> None:
    """The group step of `b`, which is due, fails on its queue."""
    context = core._context
    for name, each in context.state.deployments.items():
        if name == "b/actor":
            each.work.queue.append(OperationId("nobody's"))
            context.effects.timers.insert(0, (1.0, timers.group_step(each.placement.group)))


def with_a_misplaced_operation(core: SchedulerCore) -> None:
    """Handling the expired deadline of an operation fails."""
    context = core._context
    operation = context.state.operations[OperationId("o")]
    operation.state, operation.deadline_at = OperationState.PENDING, 1.0
    context.effects.timers.insert(0, (1.0, timers.deadline(OperationId("o"))))


def with_a_damaged_log(core: SchedulerCore) -> None:
    """Handling the end of the run on `a` fails; restarting its workers does not."""
    for name, each in core._context.state.deployments.items():
        if name == "a/actor":
            each.work.replay.log.append(OperationId("nobody's"))


def with_an_endless_sum(core: SchedulerCore) -> None:
    """The state cannot be encoded."""
    usage = core._context.state.jobs[JobId("a")].usage
    usage[OperationKind.BARRIER] = UsageRow(tokens=1 << 70)


def spoiled(journal: SqlJournal, spoil: Spoil) -> tuple[FakeCluster, Restored]:
    """A core with a damaged state, restored from a journal with the same damage."""
    cluster = ready_cluster()
    position = journal.append(cluster.journal)
    damaged = SchedulerCore.restore(cluster.config, cluster.core.dump())
    spoil(damaged)
    journal.write_snapshot(position, cluster.now, damaged.dump())
    restored = restore(cluster.config, journal)
    assert restored.position == restored.snapshot_position == position
    return cluster, restored


def shell_of(journal: SqlJournal, restored: Restored, snapshot_events: int = 50_000) -> Shell:
    return Shell(
        restored.core,
        journal,
        StillClock(restored.at),
        position=restored.position,
        snapshot_position=restored.snapshot_position,
        snapshot_events=snapshot_events,
        skipped=restored.skipped,
    )


async def told(shell: Shell, *events: ev.Event) -> list[BaseException | None]:
    """The answers to `events`, sent at the same time."""
    running = asyncio.create_task(shell.run())
    async with asyncio.timeout(WAIT_S):
        answers = await asyncio.gather(
            *(shell.request(event) for event in events), return_exceptions=True
        )
        # Once this is answered, so is whatever was reported instead.
        await shell.report(ev.TenantCreated(tenant="last", key_digest="last"))
    running.cancel()
    await asyncio.wait({running})
    await shell.save()
    return answers


def submitted(deployment: str, operation: str) -> ev.OperationSubmitted:
    return ev.OperationSubmitted(
        operation=operation,
        deployment=deployment,
        kind=OperationKind.FORWARD,
        params=None,
    )


def tenant(name: str) -> ev.TenantCreated:
    return ev.TenantCreated(tenant=name, key_digest=name)


def test_an_event_that_fails_halfway_is_not_a_refusal(journal: SqlJournal) -> None:
    cluster, restored = spoiled(journal, without_a_group)
    with pytest.raises(Fault) as caught:
        restored.core.handle(submitted("a/actor", "x"), cluster.now)
    assert caught.value.step == EVENT
    assert isinstance(caught.value.error, KeyError)


def test_the_sender_of_a_failing_event_gets_an_error_and_nothing_changes(
    journal: SqlJournal, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, restored = spoiled(journal, without_a_group)
    shell = shell_of(journal, restored)
    events = tenant("t1"), submitted("a/actor", "x"), tenant("t2")
    answers = asyncio.run(told(shell, *events))
    assert answers[0] is answers[2] is None
    assert isinstance(answers[1], SchedulerFaultError)
    assert shell.core.tenants() == ["t1", "t2", "last"]
    assert shell.faults()["steps_set_aside"] == 1
    assert "OperationSubmitted" in str(shell.faults()["newest_set_aside"])
    assert [each["code"] for each in shell.fault_conditions.view()] == ["scheduler_fault"]
    assert [each.levelno for each in caplog.records].count(logging.CRITICAL) == 1
    caplog.clear()
    again = restore(cluster.config, journal)
    assert again.core.dump() == shell.core.dump()
    assert again.skipped.view()["steps_set_aside"] == 1
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("spoil", "step"),
    [(with_an_unknown_operation, "group g2"), (with_a_misplaced_operation, "timer deadline:o")],
)
def test_only_the_failing_step_of_an_event_is_skipped(
    journal: SqlJournal, spoil: Spoil, step: str
) -> None:
    cluster, restored = spoiled(journal, spoil)
    shell = shell_of(journal, restored)
    assert asyncio.run(told(shell, tenant("t1"), submitted("a/actor", "y"))) == [None, None]
    assert shell.core.tenants() == ["t1", "last"]
    assert shell.core.operation_view(OperationId("y"), 0.0)["state"] == "pending"
    assert journal.skipped_steps() == {restored.position + 1: {step}}
    assert restore(cluster.config, journal).core.dump() == shell.core.dump()


def test_a_failing_report_restarts_the_workers(journal: SqlJournal) -> None:
    cluster, restored = spoiled(journal, with_a_damaged_log)
    shell = shell_of(journal, restored)
    (run,) = cluster.runs
    finished = ev.OperationFinished(operation=run.operation, token=run.token, compute_s=1.0)
    (answer,) = asyncio.run(told(shell, finished))
    assert isinstance(answer, SchedulerFaultError)
    error = shell.core.operation_view("o", 0.0)["error"]
    assert error is not None
    assert error["code"] == "scheduler_fault"
    assert shell.core.deployment_view("a/actor", 0.0)["state"] == "recovering"


def test_a_journal_with_a_failing_event_can_be_read(journal: SqlJournal) -> None:
    cluster, restored = spoiled(journal, without_a_group)
    events = [tenant("t1"), submitted("a/actor", "x"), tenant("t2")]
    journal.append([(event, cluster.now) for event in events])
    for _ in range(2):
        found = restore(cluster.config, journal)
        assert found.position == restored.position + 3
        assert found.core.tenants() == ["t1", "t2"]
        assert found.skipped.view()["steps_set_aside"] == 1
        assert journal.skipped_steps() == {restored.position + 2: {EVENT}}


def test_operators_are_told_of_no_faults_and_of_the_events_broker(journal: SqlJournal) -> None:
    cluster = ready_cluster()
    journal.append(cluster.journal)
    shell = shell_of(journal, restore(cluster.config, journal))
    faultless = {**NONE_SKIPPED, "snapshot_error": "", "events": None}
    assert shell.faults() == faultless
    status = BrokerView(connected=True, error="", sent=3, queued=2, dropped=1)
    shell.event_status = lambda: status
    assert shell.faults() == {**faultless, "events": status}


def test_a_state_that_cannot_be_encoded_does_not_end_the_service(
    journal: SqlJournal, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = ready_cluster()
    journal.append(cluster.journal)
    restored = restore(cluster.config, journal)
    with_an_endless_sum(restored.core)
    shell = shell_of(journal, restored, snapshot_events=1)
    assert asyncio.run(told(shell, tenant("t1"), tenant("t2"))) == [None, None]
    assert "OverflowError" in str(shell.faults()["snapshot_error"])
    assert "cannot be encoded" in caplog.text
    assert journal.snapshot() is None
    restored.core._context.state.jobs[JobId("a")].usage.clear()
    assert asyncio.run(told(shell_of(journal, restored, 1), tenant("t3"))) == [None]
    assert journal.snapshot() is not None


def test_an_event_of_which_too_many_steps_fail_is_skipped_as_a_whole(journal: SqlJournal) -> None:
    skipped = SkippedSteps(journal)
    event = ev.JobFinished(job="a", outcome="completed")
    for number in range(STEPS_MAX):
        skipped.add(7, event, Fault(f"step {number}", ValueError("bad")))
    assert len(skipped.steps(7)) == STEPS_MAX
    assert EVENT not in skipped.steps(7)
    skipped.add(7, event, Fault("one more", ValueError("bad")))
    assert skipped.steps(7) - {EVENT} == {f"step {number}" for number in range(STEPS_MAX)}
    assert SkippedSteps(journal).steps(7) == skipped.steps(7)
