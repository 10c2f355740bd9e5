"""A cluster's history becomes rows that describe each job without other jobs."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from plexrl.traces import TraceJob, read_jobs, record, write_jobs
from plexrl.traces.convert.history import history_of

Plain = dict[str, Any]
START = 1_700_000_000.0


def job_view(name: str, **fields: Any) -> Plain:
    return {
        "job": name,
        "name": name,
        "tenant": "t",
        "priority": 0,
        "state": "COMPLETED",
        "submitted_at": START,
        "ended_at": None,
        "deployments": [
            {"deployment": f"{name}/actor", "kind": "train", "workers": 8, "state_bytes": 100},
            {"deployment": f"{name}/rollout", "kind": "rollout", "workers": 4, "state_bytes": 10},
        ],
        **fields,
    }


def record_rows(views: Iterable[Plain], rows: Iterable[Plain], *, now: float) -> list[TraceJob]:
    history = history_of(views, rows, {"now": now})
    return record(history.jobs, history.operations, history.now)


class LoggedJob:
    """The log of one job: a serial loop, which waits for its group as told."""

    def __init__(self, name: str, start_s: float) -> None:
        self.name = name
        self.now = start_s
        self.rows: list[Plain] = []

    def run(self, kind: str, length_s: float, *, wait_s: float = 0.0, on: str = "actor") -> None:
        submitted_s = self.now
        if wait_s:
            self._row("load", self.now + wait_s / 2, self.now + wait_s / 2, self.now + wait_s, on)
        self._row(kind, submitted_s, submitted_s + wait_s, submitted_s + wait_s + length_s, on)
        self.now = submitted_s + wait_s + length_s

    def _row(self, kind: str, submitted: float, started: float, finished: float, on: str) -> None:
        self.rows.append(
            {
                "index": len(self.rows) + 1,
                "job": self.name,
                "deployment": f"{self.name}/{on}",
                "kind": kind,
                "state": "finished",
                "group": "g1",
                "compute_s": None,
                "tokens": 0,
                "submitted_at": submitted,
                "started_at": started,
                "finished_at": finished,
            }
        )


def grpo(history: LoggedJob, cycles: int, *, wait_s: float) -> None:
    for cycle in range(cycles):
        history.run("generate", 60.0 if cycle else 90.0, on="rollout")
        history.run("forward", 10.0, wait_s=wait_s)
        history.run("forward_backward", 24.0)
        history.run("optim_step", 1.0)
        history.run("publish", 5.0)


@pytest.mark.parametrize("wait_s", [0.0, 13.0])
def test_a_job_is_recorded_as_it_would_be_alone(tmp_path: Path, wait_s: float) -> None:
    history = LoggedJob("a", START + 7.0)
    grpo(history, 6, wait_s=wait_s)
    view = job_view("a", ended_at=history.now)
    [job] = record_rows([view], reversed(history.rows), now=history.now + 1e6)
    assert (job.job_id, job.tenant, job.outcome, job.submit_s) == ("a", "t", "completed", 0.0)
    assert (job.gpus, job.rollout_gpus, job.state_bytes) == (8, 4, 100)
    assert (job.wait_s, job.cycles, job.staleness) == (7.0, 6, 0)
    assert job.period_s == pytest.approx(100.0)
    assert job.jitter_s == pytest.approx(0.0, abs=1e-3)
    assert job.duration_s == pytest.approx(6 * 100.0 + 30.0, rel=1e-6)
    shown = [(each.function, each.offset_s, each.duration_s) for each in job.segments]
    assert [function for function, _, _ in shown] == ["log_prob", "update", "sync"]
    assert [time_s for _, *times in shown for time_s in times] == pytest.approx(
        [0.0, 10.0, 10.0, 25.0, 35.0, 5.0]
    )
    write_jobs(tmp_path / "recorded.csv", [job])
    assert list(read_jobs(tmp_path / "recorded.csv")) == [job]


def test_a_rollout_that_runs_ahead_is_recorded_as_staleness() -> None:
    history = LoggedJob("a", START)
    for _ in range(5):
        history.run("forward_backward", 20.0)
        history.run("optim_step", 5.0)
    ahead = LoggedJob("a", START + 2.0)
    for _ in range(5):
        ahead.run("generate", 25.0, on="rollout")
    [job] = record_rows([job_view("a")], history.rows + ahead.rows, now=history.now)
    assert (job.staleness, job.cycles) == (1, 5)
    assert [segment.function for segment in job.segments] == ["update"]
    assert job.period_s == 25.0


def test_jobs_come_in_order_and_those_that_never_ran_do_not() -> None:
    late, early = LoggedJob("late", START + 50.0), LoggedJob("early", START + 1.0)
    grpo(late, 1, wait_s=0.0)
    grpo(early, 1, wait_s=0.0)
    views = [
        job_view("late", submitted_at=START + 40.0, state="RUNNING"),
        job_view("idle"),
        job_view("early", state="FAILED", ended_at=early.now),
    ]
    found = record_rows(views, late.rows + early.rows, now=late.now + 10.0)
    assert [(job.job_id, job.submit_s) for job in found] == [("early", 0.0), ("late", 40.0)]
    assert [job.outcome for job in found] == ["failed", ""]
    # One cycle has no next one to end it, so its length is not known; what it took is.
    assert [(job.period_s, job.cycles) for job in found] == [(None, None), (None, None)]
    assert found[1].duration_s == pytest.approx(late.now + 10.0 - (START + 50.0))


def test_an_empty_history_is_an_empty_trace() -> None:
    assert record_rows([], [], now=START) == []
