"""`plexrl traces`: output for people and for programs; the docs page lists the schema."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plexrl.cli.app import app, run_command
from plexrl.errors import InvalidRequestError, TraceError
from plexrl.traces import JOBS, LENGTHS, read_jobs, read_lengths
from plexrl.traces.convert.wandb_runs import METRICS
from plexrl.traces.formats import FORMATS

DOCS = Path(__file__).parents[3] / "docs" / "traces.md"


def told(*arguments: str | Path, code: int = 0) -> Any:
    """The JSON output of the command."""
    found = CliRunner().invoke(app, ["traces", *map(str, arguments), "--json"])
    assert found.exit_code == code, found.output
    return json.loads(found.stdout)


def test_a_trace_is_generated_validated_described_and_converted(tmp_path: Path) -> None:
    made, table = tmp_path / "made.csv", tmp_path / "made.parquet"
    assert told("generate", made, "--jobs", "40", "--seed", "3")["rows"] == 40
    assert told("validate", made)["good"] == 40
    assert told("convert", made, table)["rows"] == 40
    assert list(read_jobs(table)) == list(read_jobs(made))
    found = told("describe", table, "--gpus", "2048")
    assert found["jobs"] == 40
    assert found["offered_load"] > 0
    again = tmp_path / "again.csv"
    told("convert", table, again)
    assert again.read_bytes() == made.read_bytes()
    follows = tmp_path / "follows.csv"
    assert told("generate", follows, "--fit", made, "--days", "1", "--no-profiles")["rows"] > 0
    laws = told("describe", made, "--fit")["laws"]
    assert laws[0]["of"] == "gaps"
    assert all(0 <= law["distance"] <= 1 for law in laws)


def test_lengths_are_generated_and_described(tmp_path: Path) -> None:
    made, second = tmp_path / "lengths.csv", tmp_path / "second.csv"
    assert told("generate", made, "--lengths", "20", "--samples", "3")["rows"] == 60
    assert len({row.group for row in read_lengths(made)}) == 20
    assert told("describe", made)["grouped"] == 60
    assert told("generate", second, "--lengths", "5", "--fit", made)["rows"] == 40


def test_faults_are_told_as_lines_that_an_editor_follows(tmp_path: Path) -> None:
    path, out = tmp_path / "bad.csv", tmp_path / "out.csv"
    path.write_text("job_id,submit_s,gpus,duration_s\na,0,8,60\nb,x,0,60\nc,5,1,60\na,6,1,60\n")
    found = CliRunner().invoke(app, ["traces", "validate", str(path)])
    assert found.exit_code == 1
    assert found.stdout.splitlines()[:2] == [
        f"{path}:3: submit_s is not a number: 'x'",
        f"{path}:5: job_id is repeated from an earlier row: 'a'",
    ]
    report = told("validate", path, code=1)
    assert (report["good"], report["bad_lines"], report["faults"]) == (2, 2, 2)
    assert report["problems"][0] == {
        "line": 3,
        "field": "submit_s",
        "message": "is not a number: 'x'",
    }
    kept = CliRunner().invoke(app, ["traces", "convert", str(path), str(out), "--skip-bad"])
    assert kept.exit_code == 0
    assert f"{path}:3: submit_s" in kept.stderr
    assert [job.job_id for job in read_jobs(out)] == ["a", "c"]


def test_a_bad_trace_is_one_message_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "bad.csv", tmp_path / "out.csv"
    path.write_text("job_id,submit_s,gpus,duration_s\na,0,8,60\nb,-1,1,60\n")
    monkeypatch.setattr(sys, "argv", ["plexrl", "traces", "convert", str(path), str(out)])
    assert run_command(lambda: app(standalone_mode=False)) == 1
    printed = capsys.readouterr().err
    assert f"{path}: line 3: submit_s must be at least 0: -1.0" in printed.splitlines()
    assert not out.exists()


def test_a_run_export_becomes_a_trace(tmp_path: Path) -> None:
    path, out = tmp_path / "history.csv", tmp_path / "run.csv"
    path.write_text("timing_s/gen,timing_s/update_actor,mine\n" + "70,30,5\n" * 4)
    arguments = ["--from", "wandb", "--gpus", "16", "--metric", "mine=sync"]
    assert told("convert", path, out, *arguments)["rows"] == 1
    [job] = read_jobs(out)
    assert (job.gpus, job.period_s, job.cycles) == (16, 105.0, 3)
    assert [segment.function for segment in job.segments] == ["update", "sync"]


def test_a_public_trace_is_shaped_for_a_simulation(tmp_path: Path) -> None:
    path, out = tmp_path / "philly.csv", tmp_path / "shaped.csv"
    path.write_text(
        "job_id,tenant,submit_time,submit_s,duration_s,gpus\n"
        "c,t,2017-09-04T10:31:41,60,9999999,32\na,t,2017-09-04T10:30:41,0,9000,8\n"
        "b,t,2017-09-04T10:31:11,30,9000,16\nd,t,2017-09-04T10:31:41,60,,16\n"
    )
    shape = ["--compress", "6", "--cap-days", "14", "--min-gpus", "16", "--profiles"]
    told_of = told("convert", path, out, *shape, "--skip-bad")
    assert told_of["rows"] == 2
    jobs = list(read_jobs(out))
    assert [(job.job_id, job.submit_s, job.model) for job in jobs] == [
        ("b", 0.0, "30B"),
        ("c", 5.0, "235B"),
    ], "the clock starts at the first job that is kept"
    assert all(job.cycles and job.segments for job in jobs)
    assert jobs[1].service_s == pytest.approx(14 * 86_400, rel=0.01)
    assert told("describe", "bundled:azure-conversation")["responses"] == 19_366


def test_the_clock_starts_at_the_first_kept_job_unless_a_whole_trace_is_copied(
    tmp_path: Path,
) -> None:
    path, out = tmp_path / "trace.csv", tmp_path / "out.csv"
    path.write_text("job_id,submit_s,gpus,duration_s\na,50,1,9\nb,70,8,9\nc,90,8,x\nd,95,8,9\n")
    told("convert", path, out, "--skip-bad", "--min-gpus", "2")
    assert [job.submit_s for job in read_jobs(out)] == [0.0, 25.0]
    told("convert", path, out, "--skip-bad", "--start-day", str(15 / 86_400))
    assert [(job.job_id, job.submit_s) for job in read_jobs(out)] == [("b", 0.0), ("d", 25.0)]
    told("convert", path, out, "--skip-bad")
    assert [job.submit_s for job in read_jobs(out)] == [0.0, 20.0, 45.0]
    path.write_text(path.read_text().replace("x", "9"))
    told("convert", path, out)
    assert [job.submit_s for job in read_jobs(out)] == [50.0, 70.0, 90.0, 95.0]
    assert told("describe", path)["arrivals_s"] == 45.0


JOBS_CSV = "job_id,submit_s,gpus,duration_s\na,0,8,60\n"
LENGTHS_CSV = "output_tokens\n5\n"

WITHOUT_EFFECT: dict[str, tuple[str, list[str]]] = {
    "shaping a table of lengths": (LENGTHS_CSV, ["convert", "IN", "OUT", "--min-gpus", "8"]),
    "a W&B option without W&B": (JOBS_CSV, ["convert", "IN", "OUT", "--gpus", "8"]),
    "shaping a W&B export": (JOBS_CSV, ["convert", "IN", "OUT", "--from", "wandb", "--backlog"]),
    "a seed of nothing": (JOBS_CSV, ["convert", "IN", "OUT", "--seed", "3"]),
    "requests of jobs": (JOBS_CSV, ["convert", "IN", "OUT", "--requests", "3"]),
    "faster arrivals of a backlog": (
        JOBS_CSV,
        ["convert", "IN", "OUT", "--backlog", "--compress", "2"],
    ),
    "the load of lengths": (LENGTHS_CSV, ["describe", "IN", "--gpus", "8"]),
    "jobs beside lengths": ("", ["generate", "OUT", "--lengths", "3", "--jobs", "2"]),
    "lengths' options of jobs": ("", ["generate", "OUT", "--jobs", "2", "--samples", "4"]),
    "arrivals of a fitted trace": (
        JOBS_CSV,
        ["generate", "OUT", "--jobs", "2", "--fit", "IN", "--jobs-per-day", "3"],
    ),
}


@pytest.mark.parametrize("case", WITHOUT_EFFECT)
def test_an_option_without_effect_is_refused(tmp_path: Path, case: str) -> None:
    text, arguments = WITHOUT_EFFECT[case]
    path, out = tmp_path / "in.csv", tmp_path / "out.csv"
    path.write_text(text)
    places = {"IN": str(path), "OUT": str(out)}
    found = CliRunner().invoke(app, ["traces", *(places.get(each, each) for each in arguments)])
    assert isinstance(found.exception, InvalidRequestError)
    assert "would have no effect" in found.exception.message
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "IN", "OUT", "--compress", "nan"],
        ["convert", "IN", "OUT", "--cap-days", "0"],
        ["convert", "IN", "OUT", "--min-duration", "-5"],
        ["convert", "IN", "IN"],
        ["convert", "IN", "FOLDER"],
        ["convert", "IN", "FOLDER/missing/out.csv"],
        ["convert", "IN", "out.xlsx"],
        ["generate", "OUT", "--days", "0"],
        ["generate", "OUT", "--days", "20000"],
        ["generate", "FOLDER/missing/out.csv", "--jobs", "3"],
    ],
)
def test_what_cannot_be_written_or_meant_is_refused_before_anything_is_read(
    tmp_path: Path, arguments: list[str]
) -> None:
    path, folder = tmp_path / "in.csv", tmp_path / "folder.csv"
    # Its bad row would be told first if it were read.
    path.write_text(JOBS_CSV + "b,x,1,1\n")
    folder.mkdir()
    places = {"IN": path, "OUT": tmp_path / "out.csv", "FOLDER": folder}
    given = [
        str(places.get(each.partition("/")[0], each)) + "".join(each.partition("/")[1:])
        for each in arguments
    ]
    found = CliRunner().invoke(app, ["traces", *given])
    assert isinstance(found.exception, InvalidRequestError)
    assert not isinstance(found.exception, TraceError)


def test_people_get_tables(tmp_path: Path) -> None:
    made = tmp_path / "made.csv"
    shown = CliRunner().invoke(app, ["traces", "generate", str(made), "--jobs", "5"])
    assert "exponential" in shown.stdout
    found = CliRunner().invoke(app, ["traces", "describe", str(made), "--gpus", "64", "--fit"])
    for word in ("GPU-hours", "offered load", "period_s", "Sizes", "distance"):
        assert word in found.stdout
    nothing = CliRunner().invoke(app, ["traces", "generate", str(made)])
    assert nothing.exit_code == 2


def test_the_page_knows_every_column_layout_and_metric() -> None:
    text = DOCS.read_text()
    missing = [
        name
        for name in (*JOBS.names, *LENGTHS.names, *FORMATS, *METRICS)
        if f"`{name}`" not in text
    ]
    assert not missing
