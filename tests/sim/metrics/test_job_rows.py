"""Each job of each run has one row, with the run's figures, in every file format."""

import csv
import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plexrl.cli.app import app
from plexrl.errors import InvalidRequestError
from plexrl.sim.engine.simulate import simulate
from plexrl.sim.metrics.collector import Collector
from plexrl.sim.metrics.job_rows import GROUPS_MAX, JobRow
from plexrl.sim.metrics.job_rows_file import (
    BATCH_ROWS,
    RunOfRows,
    column_types,
    row_writer,
    write_job_rows,
)
from plexrl.sim.workload.scenario import Failures, Scenario
from plexrl.traces import TraceJob, write_jobs
from tests.sim.search.test_sweep import BASE, FewJobs

SUMMED = ("cycles", "switches", "busy_gpu_hours", "switch_gpu_hours", "rollout_gpu_hours")


def rows_of(scenario: Scenario) -> tuple[list[JobRow], Any]:
    rows: list[JobRow] = []
    return rows, simulate(scenario, on_job=rows.append)


@pytest.mark.parametrize("policy", ["isolated", "spread+backfill", "pack"])
def test_rows_add_up_to_the_figures_of_their_run(policy: str) -> None:
    rows, result = rows_of(replace(BASE, policy=policy))
    assert len(rows) == result.jobs
    for name in SUMMED:
        assert sum(getattr(row, name) for row in rows) == pytest.approx(getattr(result, name))
    assert max(row.end_s for row in rows) == result.drain_s
    slowdowns = [row.slowdown for row in rows if row.slowdown is not None]
    assert sum(slowdowns) / len(rows) == pytest.approx(result.job_slowdown.mean, abs=1e-12)
    waits = [row.wait_s for row in rows if row.wait_s is not None]
    assert sum(waits) / len(rows) == pytest.approx(result.wait.mean)
    assert all(row.groups for row in rows)


def test_asking_for_rows_changes_no_result() -> None:
    _, result = rows_of(BASE)
    alone = simulate(BASE)
    assert replace(result, speed=alone.speed) == alone


def test_a_job_that_was_given_up_has_a_row_of_what_it_did() -> None:
    broken = replace(
        BASE, failures=Failures(node_mtbf_s=500.0, repair_s=60.0, state_survives=0.0), seed=5
    )
    rows, result = rows_of(broken)
    assert sum(row.outcome == "failed" for row in rows) == result.failed_jobs > 0
    assert sum(row.cycles for row in rows) == result.cycles


def test_a_job_that_never_got_gpus_and_one_that_moved_much() -> None:
    told: list[JobRow] = []
    collector = Collector(BASE, told.append)
    for name in ("never", "moved"):
        job = TraceJob(job_id=name, submit_s=1.0, gpus=8, duration_s=9.0)
        collector.job_submitted(job, 1.0)
    collector.job_ended("never", 5.0, "failed", 0.0)
    collector.job_placed("moved", 2.0)
    for number in range(GROUPS_MAX + 3):
        collector.ran(f"g{number}", "moved", 3600, "run", 2.0, 3.0)
    collector.job_ended("moved", 12.0, "completed", 8.0)
    collector.ran("g0", "moved", 3600, "load", 12.0, 13.0)
    never, moved = told
    assert (never.start_s, never.wait_s, never.run_s, never.slowdown) == (None,) * 4
    assert (never.cycle_slowdown_mean, never.groups) == (None, "")
    assert (moved.wait_s, moved.run_s, moved.slowdown) == (1.0, 10.0, 0.25)
    assert moved.groups.split(";") == [*(f"g{number}" for number in range(GROUPS_MAX)), "…"]
    assert moved.busy_gpu_hours == GROUPS_MAX + 3


def parts(folder: Path, count: int) -> Iterator[RunOfRows]:
    [template] = rows_of(replace(BASE, source=FewJobs(jobs_count=1)))[0]
    for run in range(2):
        part = folder / f"part{run}"
        with row_writer(part) as take:
            for number in range(count):
                take(replace(template, job_id=f"job{number}", wait_s=None if number else 1.5))
        yield RunOfRows(run=run, policy="pack", nodes="4", seed=7, part=part)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_rows_of_all_runs_are_one_table(tmp_path: Path, suffix: str) -> None:
    import pyarrow.parquet

    path, count = tmp_path / f"jobs{suffix}", BATCH_ROWS + 3
    path.write_text("as it was")
    assert write_job_rows(path, parts(tmp_path, count)) == 2 * count
    if suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
        assert table.column_names == list(column_types())
        rows = table.to_pylist()
        absent: Any = None
    else:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if suffix == ".csv.gz" else raw).decode()
        rows = list(csv.DictReader(text.splitlines()))
        assert list(rows[0]) == list(column_types())
        absent = ""
    assert [str(row["run"]) for row in rows] == ["0"] * count + ["1"] * count
    assert float(rows[0]["wait_s"]) == 1.5
    assert rows[1]["wait_s"] == absent
    assert [each.name for each in tmp_path.iterdir() if each.name.endswith(".part")] == []


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trace") / "few.csv"
    write_jobs(path, FewJobs().jobs())
    return str(path)


def simulated(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": "500"})


def test_the_command_writes_rows_beside_its_results(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows_at = out / "jobs.csv"
    asked = ["--nodes", "8", "--policy", "pack", "--sweep", "seed=1,2", "--workers", "2"]
    found = simulated(trace, *asked, "--out", out, "--jobs-out", rows_at)
    assert found.exit_code == 0, found.output
    assert "jobs.csv" in found.stdout
    runs = json.loads((out / "results.json").read_text())["runs"]
    rows = list(csv.DictReader(rows_at.read_text().splitlines()))
    assert len(runs) == 2
    for number, run in enumerate(runs):
        mine = [row for row in rows if row["run"] == str(number)]
        assert len(mine) == run["result"]["jobs"]
        assert {row["policy"] for row in mine} == {run["scenario"]["policy"]}
        assert {row["seed"] for row in mine} == {str(run["scenario"]["seed"])}
        assert sum(int(row["cycles"]) for row in mine) == run["result"]["cycles"]


def test_rows_of_a_search_are_those_of_the_size_that_was_found(trace: str, tmp_path: Path) -> None:
    rows_at = tmp_path / "jobs.csv"
    asked = ["--policy", "pack", "--slo", "wait.p95<=2h", "--max-nodes", "16", "--workers", "1"]
    found = simulated(trace, *asked, "--jobs-out", rows_at, "--json")
    assert found.exit_code == 0, found.output
    [run] = json.loads(found.stdout)["runs"]
    rows = list(csv.DictReader(rows_at.read_text().splitlines()))
    assert len(rows) == run["result"]["jobs"]
    assert {row["nodes"] for row in rows} == {str(run["scenario"]["pools"][0]["nodes"])}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--jobs-out", "jobs.xlsx"],
        ["--jobs-out", "missing/jobs.csv"],
        ["--jobs-out", "jobs.csv", "--ray", "auto"],
    ],
)
def test_where_rows_cannot_be_written_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = simulated("nothing.csv", *arguments)
    assert isinstance(found.exception, InvalidRequestError)
    assert "nothing.csv" not in found.exception.message
