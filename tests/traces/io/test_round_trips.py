"""Written rows are read back exactly in every format; equal rows give equal bytes."""

from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.traces import (
    JOBS,
    ResponseLength,
    TraceJob,
    TraceSegment,
    read_jobs,
    read_lengths,
    validate,
    write_jobs,
    write_lengths,
)
from tests.examples import examples
from tests.traces.strategies import LENGTHS, traces

SUFFIXES = (".csv", ".csv.gz", ".parquet")


@settings(max_examples=examples(30))
@given(traces())
def test_a_trace_comes_back_from_every_format_as_it_was(jobs: list[TraceJob]) -> None:
    with TemporaryDirectory() as folder:
        for suffix in SUFFIXES:
            path = Path(folder) / f"trace{suffix}"
            assert write_jobs(path, jobs) == len(jobs)
            assert list(read_jobs(path)) == jobs
            assert list(read_jobs(path, skip_bad=True)) == jobs


@settings(max_examples=examples(20))
@given(traces())
def test_csv_to_parquet_and_back_is_the_same_file(jobs: list[TraceJob]) -> None:
    with TemporaryDirectory() as folder:
        first, middle, last = (
            Path(folder) / name for name in ("first.csv", "middle.parquet", "last.csv")
        )
        write_jobs(first, jobs)
        write_jobs(middle, read_jobs(first))
        write_jobs(last, read_jobs(middle))
        assert last.read_bytes() == first.read_bytes()


@settings(max_examples=examples(20))
@given(st.lists(LENGTHS, min_size=1, max_size=8))
def test_response_lengths_come_back_as_they_were(rows: list[ResponseLength]) -> None:
    with TemporaryDirectory() as folder:
        for suffix in SUFFIXES:
            path = Path(folder) / f"lengths{suffix}"
            write_lengths(path, rows)
            assert list(read_lengths(path)) == rows


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_rows_are_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    jobs = [TraceJob(job_id="a", submit_s=0.5, gpus=8, duration_s=1.0)]
    one, other = tmp_path / f"one{suffix}", tmp_path / f"other{suffix}"
    write_jobs(one, jobs)
    write_jobs(other, jobs)
    assert one.read_bytes() == other.read_bytes()


def test_ids_that_look_like_formulas_are_escaped_in_csv_and_come_back(tmp_path: Path) -> None:
    ids = ["=1+1", "+1", "-1", "@SUM(A1)", "'=1", "''-x", "'plain", "\uff1d1"]
    jobs = [TraceJob(job_id=each, submit_s=0.0, gpus=1, duration_s=1.0) for each in ids]
    path, columnar = tmp_path / "trace.csv", tmp_path / "trace.parquet"
    write_jobs(path, jobs)
    write_jobs(columnar, read_jobs(path))
    assert list(read_jobs(path)) == list(read_jobs(columnar)) == jobs
    cells = [line.split(",")[0] for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    assert cells == [f"'{each}" for each in ids[:6]] + ["'plain", "'\uff1d1"]


def test_columns_may_be_absent_and_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    path.write_bytes(
        b"\xef\xbb\xbfgpus,duration_s,job_id,submit_s\r\n8.0,60,a,0\r\n\r\n1,5.5,b,1e1"
    )
    assert list(read_jobs(path)) == [
        TraceJob(job_id="a", submit_s=0.0, gpus=8, duration_s=60.0),
        TraceJob(job_id="b", submit_s=10.0, gpus=1, duration_s=5.5),
    ]


def test_what_pandas_makes_of_parquet_is_read(tmp_path: Path) -> None:
    """Whole numbers as floats, NaN for what is absent, integers where we keep floats."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "job_id": ["a", "b"],
        "submit_s": pa.array([0, 5]),
        "gpus": pa.array([8.0, 1.0]),
        "duration_s": pa.array([60.5, float("nan")], from_pandas=False),
        "cycles": pa.array([float("nan"), 3.0], from_pandas=False),
        "period_s": pa.array([None, 2.0]),
    }
    path = tmp_path / "pandas.parquet"
    pq.write_table(pa.table(columns), path)
    assert list(read_jobs(path)) == [
        TraceJob(job_id="a", submit_s=0.0, gpus=8, duration_s=60.5),
        TraceJob(job_id="b", submit_s=5.0, gpus=1, cycles=3, period_s=2.0),
    ]


@pytest.mark.parametrize("unit", ["s", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "Asia/Shanghai"])
def test_dates_decimals_and_numbers_as_text_are_read_from_parquet(
    tmp_path: Path, unit: str, zone: str | None
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    scale = {"s": 1, "us": 10**6, "ns": 10**9}[unit]
    dates = pa.array([1_700_000_000 * scale, 1_700_000_005 * scale], pa.int64())
    columns = {
        "job_id": pa.array([7, 8]),
        "submit_s": dates.cast(pa.timestamp(unit, zone)),
        "gpus": pa.array([Decimal("8.00"), Decimal("1.00")]),
        "duration_s": pa.array([60 * scale, 2 * scale], pa.int64()).cast(pa.duration(unit)),
        "period_s": pa.array(["2.5", ""]),
        "cycles": pa.array(["3", None]),
        "segments": pa.array(["update:0.5:1", None]),
        "jitter_s": pa.array([Decimal("0.25"), None]),
    }
    path = tmp_path / "database.parquet"
    pq.write_table(pa.table(columns), path)
    segment = TraceSegment(function="update", offset_s=0.5, duration_s=1.0)
    assert list(read_jobs(path)) == [
        TraceJob(
            job_id="7",
            submit_s=0.0,
            gpus=8,
            duration_s=60.0,
            cycles=3,
            period_s=2.5,
            segments=(segment,),
            jitter_s=0.25,
        ),
        TraceJob(job_id="8", submit_s=5.0, gpus=1, duration_s=2.0),
    ]


def test_text_decimals_and_dates_that_are_no_number_are_faults_by_field(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "job_id": ["a"],
        "submit_s": ["soon"],
        "gpus": pa.array([Decimal("1.5")]),
        "duration_s": pa.array([1_700_000_000], pa.timestamp("s")),
    }
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.table(columns), path)
    found = validate(path, JOBS).problems.kept
    assert [each.field for each in found] == ["submit_s", "duration_s", "gpus"]


@pytest.mark.parametrize("microseconds", [1 << 60, -(1 << 62)])
def test_dates_beyond_python_s_are_refused(tmp_path: Path, microseconds: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "job_id": ["a"],
        "submit_s": pa.array([microseconds], pa.timestamp("us")),
        "gpus": [1],
        "duration_s": [1.0],
    }
    path = tmp_path / "far.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(InvalidRequestError, match="cannot be read as Parquet"):
        list(read_jobs(path))


def test_dates_count_through_a_change_of_the_clocks(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # 2026-10-25 in Berlin: the hour from 02:00 comes twice.
    dates = pa.array([1_792_888_200, 1_792_891_800], pa.int64())
    columns = {
        "job_id": ["a", "b"],
        "submit_s": dates.cast(pa.timestamp("s", "Europe/Berlin")),
        "gpus": [1, 1],
        "duration_s": [1.0, 1.0],
    }
    path = tmp_path / "autumn.parquet"
    pq.write_table(pa.table(columns), path)
    assert [job.submit_s for job in read_jobs(path)] == [0.0, 3600.0]


def test_parquet_says_which_schema_it_has(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = tmp_path / "trace.parquet"
    write_jobs(path, [TraceJob(job_id="a", submit_s=0.0, gpus=1, duration_s=1.0)])
    schema = pq.read_schema(path)
    assert schema.metadata[b"plexrl"] == b"jobs/1"
    assert tuple(schema.names) == JOBS.names
