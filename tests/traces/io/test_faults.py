"""All faults of a file are reported together by line and field; the other rows are readable."""

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError, TraceError
from plexrl.traces import (
    JOBS,
    Problem,
    TraceJob,
    TraceSegment,
    check_trace,
    open_trace,
    read_jobs,
    read_lengths,
    validate,
    write_jobs,
)
from plexrl.traces.io.distinct import DistinctKeys
from plexrl.traces.io.parquet_file import arrow_schema
from tests.examples import examples

WHOLE = TraceJob(
    job_id="whole",
    submit_s=0.0,
    gpus=8,
    tenant="t",
    duration_s=600.0,
    cycles=10,
    rollout_gpus=4,
    node_type="h200",
    model="7B",
    state_bytes=1 << 30,
    period_s=60.0,
    jitter_s=1.0,
    segments=(TraceSegment(function="update", offset_s=40.0, duration_s=10.0),),
    wait_s=0.0,
    outcome="completed",
)

FAULTS: dict[str, tuple[str, ...]] = {
    "job_id": ("", "bad\x07id", "x" * 257),
    "tenant": ("a\x00b",),
    "submit_s": ("", "soon", "nan", "inf", "-1", "1e10", "1_0"),
    "duration_s": ("0", "-5", "long", "nan", "2e9"),
    "cycles": ("0", "1.5", "many", "-3", "9" * 40),
    "gpus": ("", "8.5", "-1", "eight", "10000000"),
    "rollout_gpus": ("-1", "x"),
    "node_type": ("\x1b[31m",),
    "model": ("y" * 300,),
    "state_bytes": ("-1", "1e3", "64GiB", str(1 << 64)),
    "period_s": ("0", "nan", "minute"),
    "jitter_s": ("-0.5", "inf"),
    "segments": ("update", "update:1", "update:0:70", "a b:0:1", "a:0:5;b:4:1", "a:x:1", "a:0:-1"),
    "staleness": ("-1", "1001", "?"),
    "priority": ("0.5", "5000"),
    "slo": ("-0.1", "1", "30%"),
    "wait_s": ("-1", "none"),
    "outcome": ("done",),
}
"""Cells that are wrong, by column."""


def lines_of(jobs: list[TraceJob]) -> list[list[str]]:
    """The cells of the lines of a trace, its header apart."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        write_jobs(path, jobs)
        return list(csv.reader(io.StringIO(path.read_text())))[1:]


def written(path: Path, rows: list[list[str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([list(JOBS.names), *rows])
    return path


def many(count: int) -> list[TraceJob]:
    return [replace(WHOLE, job_id=f"job{at}", submit_s=float(at)) for at in range(count)]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("jobs.csv", "job_id,submit_s,gpus,duration_s\n", 1),
        ("lengths.csv", "\n\noutput_tokens\n\n", 3),
        ("philly.csv", "timestamp,duration,num_gpus,gpu_time,cluster", 1),
        ("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", 1),
    ],
)
def test_a_file_with_a_header_only_is_refused_by_its_line(
    tmp_path: Path, name: str, text: str, line: int
) -> None:
    path = tmp_path / name
    path.write_text(text)
    source, good = check_trace(path)
    assert good == 0
    assert [each.line for each in source.problems.kept] == [line]
    with pytest.raises(TraceError, match="has a header but no rows"):
        list(open_trace(path).rows)


def test_a_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = tmp_path / "trace.parquet"
    pq.write_table(arrow_schema(JOBS).empty_table(), path)
    with pytest.raises(TraceError, match="has a header but no rows"):
        list(open_trace(path).rows)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_trace_without_rows_is_not_written_and_an_old_one_stays(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"trace{suffix}"
    write_jobs(path, many(1))
    with pytest.raises(InvalidRequestError, match="is not written: no row of jobs is left"):
        write_jobs(path, [])
    assert list(read_jobs(path)) == many(1)


def test_every_column_has_faults_to_inject() -> None:
    assert set(FAULTS) == set(JOBS.names)


@pytest.mark.parametrize(
    ("field", "cell"), [(field, cell) for field, cells in FAULTS.items() for cell in cells]
)
def test_a_wrong_cell_is_told_by_line_and_field(tmp_path: Path, field: str, cell: str) -> None:
    rows = lines_of(many(3))
    rows[1][JOBS.names.index(field)] = cell
    found = validate(written(tmp_path / "trace.csv", rows), JOBS)
    assert [(each.line, each.field) for each in found.problems.kept] == [(3, field)]
    assert found.good == 2


INJECTED = st.sampled_from([(field, cell) for field, cells in FAULTS.items() for cell in cells])


@settings(max_examples=examples(40))
@given(st.dictionaries(st.integers(0, 19), st.lists(INJECTED, min_size=1, max_size=3)))
def test_all_faults_are_told_at_once(injected: dict[int, list[tuple[str, str]]]) -> None:
    rows = lines_of(many(20))
    wanted = set()
    for line, faults in injected.items():
        for field, cell in faults:
            rows[line][JOBS.names.index(field)] = cell
            wanted.add((line + 2, field))
    with TemporaryDirectory() as folder:
        path = written(Path(folder) / "trace.csv", rows)
        found = validate(path, JOBS)
        told = {(each.line, each.field) for each in found.problems.kept}
        # What lies outside its period is told once the columns are right by themselves.
        cross = {(line, field) for line, field in wanted - told if field == "segments"}
        assert told <= wanted
        assert wanted - told == cross
        assert all(any(line == at for line, _ in told) for at, _ in cross)
        assert found.good == 20 - len(injected)
        assert found.problems.bad_lines == len(injected)
        kept = [job.job_id for job in read_jobs(path, skip_bad=True)]
        assert kept == [f"job{at}" for at in range(20) if at not in injected]
        if injected:
            with pytest.raises(TraceError) as error:
                read_jobs(path)
            assert error.value.details["count"] == found.problems.count


CROSS: tuple[tuple[str, Callable[[TraceJob], TraceJob]], ...] = (
    ("duration_s", lambda job: replace(job, duration_s=None, cycles=None)),
    ("period_s", lambda job: replace(job, duration_s=None, period_s=None, segments=())),
    ("period_s", lambda job: replace(job, period_s=None)),
    ("segments", lambda job: replace(job, period_s=45.0)),
    ("gpus", lambda job: replace(job, gpus=0, rollout_gpus=0)),
    ("submit_s", lambda job: replace(job, submit_s=0.0)),
    ("job_id", lambda job: replace(job, job_id="job0")),
)


@pytest.mark.parametrize(("field", "change"), CROSS)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_job_that_is_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, field: str, change: Callable[[TraceJob], TraceJob], suffix: str
) -> None:
    jobs = many(3)
    jobs[2] = change(jobs[2])
    path = tmp_path / f"trace{suffix}"
    path.write_text("as it was")
    with pytest.raises(TraceError) as error:
        write_jobs(path, jobs)
    problems = error.value.details["problems"]
    assert isinstance(problems, list)
    assert [(each["line"], each["field"]) for each in problems] == [(3, field)]
    assert path.read_text() == "as it was"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_line_of_the_wrong_length_spoils_no_other(tmp_path: Path) -> None:
    rows = lines_of(many(5))
    rows[1] = rows[1][:4]
    rows[3].append("more")
    path = written(tmp_path / "trace.csv", rows)
    text = path.read_text().replace("job2,t", 'job2,"t')
    path.write_text(text)
    told: list[Problem] = []
    kept = [job.job_id for job in read_jobs(path, skip_bad=True, on_problem=told.append)]
    assert kept == ["job0", "job4"]
    assert [(each.line, each.field) for each in told] == [(3, "cycles"), (4, ""), (5, "")]
    assert "quote" in told[1].message or "end of" in told[1].message


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(
        b"job_id,submit_s,gpus,duration_s,tenant\na,0,1,5,\xff\xfe\nb,1,1,5,"
        + b"x" * (3 << 20)
        + b"\nc,2,1,5,t\n"
    )
    found = validate(path, JOBS)
    assert [(each.line, each.field) for each in found.problems.kept] == [(2, "tenant"), (3, "")]
    assert found.good == 1


@pytest.mark.parametrize(
    ("header", "fields"),
    [
        ("job_id,submit_s,gpus,tennant", ["tennant"]),
        ("job_id,gpus", ["submit_s"]),
        ("job_id,submit_s,gpus,gpus", ["gpus"]),
        ("", [""]),
    ],
)
def test_a_wrong_header_is_told(tmp_path: Path, header: str, fields: list[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(header + "\n" if header else "")
    found = validate(path, JOBS)
    assert [each.field for each in found.problems.kept] == fields
    if "tennant" in fields:
        assert "did you mean tenant?" in found.problems.kept[0].message


def test_parquet_faults_are_told_by_row(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "job_id": ["a", "b", None, "d"],
        "submit_s": [0.0, 1.0, 2.0, float("nan")],
        "gpus": [8.0, 2.5, 1.0, 1.0],
        "duration_s": [1.0, -1.0, 1.0, 1.0],
        "segments": pa.array([[], [], [], [{"begin": 1.0}]]),
    }
    path = tmp_path / "trace.parquet"
    pq.write_table(pa.table(columns), path)
    told = [(each.line, each.field) for each in validate(path, JOBS).problems.kept]
    assert sorted(told) == [
        (2, "duration_s"),
        (2, "gpus"),
        (3, "job_id"),
        (4, "segments"),
        (4, "submit_s"),
    ]


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_text("no parquet")
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(InvalidRequestError, match="cannot be read as Parquet"):
        read_jobs(broken)
    with pytest.raises(TraceError, match="cannot be read further"):
        read_jobs(cut)
    with pytest.raises(InvalidRequestError, match="No such file"):
        read_jobs(tmp_path / "none.csv")
    with pytest.raises(InvalidRequestError, match=r"named \*\.csv"):
        read_lengths(tmp_path / "trace.xlsx")
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        write_jobs(tmp_path / "nowhere" / "trace.csv", [])


@given(st.lists(st.sampled_from("abcdefgh")), st.integers(0, 5))
@settings(max_examples=examples(30))
def test_keys_are_told_apart_in_memory_and_out_of_it(keys: list[str], in_memory: int) -> None:
    seen: set[str] = set()
    with DistinctKeys(in_memory) as distinct:
        for key in keys:
            assert distinct.add(key) == (key not in seen)
            seen.add(key)
