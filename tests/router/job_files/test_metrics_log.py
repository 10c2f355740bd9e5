"""Metrics of a job are kept in order, and are bounded."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import PayloadTooLargeError, QuotaExceededError
from plexrl.router.job_files import metrics_log
from plexrl.router.job_files.metrics_log import MetricsFiles
from plexrl.router.job_files.record_store import JobKey
from plexrl.wire.parameter_checks import check_identifier

ROW_BYTES_MAX, JOB_BYTES_MAX = 200, 1000
JOB = JobKey("t", "j/ob")


@pytest.fixture
def log(tmp_path: Path) -> MetricsFiles:
    return MetricsFiles(tmp_path / "m", row_bytes_max=ROW_BYTES_MAX, job_bytes_max=JOB_BYTES_MAX)


def rows(log: MetricsFiles, after: int = 0) -> list[tuple[int, int, dict[str, float]]]:
    found = json.loads(log.page(JOB, after))["rows"]
    return [(row["index"], row["step"], row["values"]) for row in found]


def test_rows_are_read_after_the_given_index(log: MetricsFiles) -> None:
    assert rows(log) == []
    log.append(JOB, 7, {"loss": 1.5})
    log.append(JOB, 8, {})
    assert rows(log) == [(1, 7, {"loss": 1.5}), (2, 8, {})]
    assert rows(log, after=1) == [(2, 8, {})]
    assert rows(log, after=2) == []


@given(st.dictionaries(st.text(max_size=5), st.floats(-1e9, 1e9), max_size=3))
def test_any_names_and_numbers_survive_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, float]
) -> None:
    folder = tmp_path_factory.mktemp("metrics")
    log = MetricsFiles(folder, row_bytes_max=10_000, job_bytes_max=10_000)
    log.append(JOB, -1, values)
    assert rows(log) == [(1, -1, values)]


def test_a_row_that_is_too_large_is_refused_and_not_kept(log: MetricsFiles) -> None:
    with pytest.raises(PayloadTooLargeError, match="fewer values"):
        log.append(JOB, 1, {f"value{index}": 1.0 for index in range(50)})
    assert rows(log) == []


def test_a_jobs_metrics_are_bounded_and_earlier_rows_stay(
    log: MetricsFiles, tmp_path: Path
) -> None:
    def flood() -> None:
        for step in range(1000):
            log.append(JOB, step, {"loss": 1.0})

    with pytest.raises(QuotaExceededError, match="metrics_job_bytes_max"):
        flood()
    kept = rows(log)
    assert 10 < len(kept) < 100
    [file] = tmp_path.rglob("*.jsonl")
    row_bytes = len(file.read_bytes().splitlines(keepends=True)[-1])
    assert JOB_BYTES_MAX - row_bytes < file.stat().st_size <= JOB_BYTES_MAX
    log.append(JOB._replace(tenant="another"), 0, {"loss": 1.0})
    assert rows(log) == kept


def test_non_finite_numbers_are_stored_as_texts(log: MetricsFiles) -> None:
    log.append(JOB, 1, {"loss": math.nan, "up": math.inf, "down": -math.inf, "reward": 0.5})
    kept = {"loss": "NaN", "up": "Infinity", "down": "-Infinity", "reward": 0.5}
    assert json.loads(log.page(JOB, 0), parse_constant=pytest.fail)["rows"][0]["values"] == kept


def test_many_rows_come_in_pages(tmp_path: Path) -> None:
    log = MetricsFiles(tmp_path, row_bytes_max=1 << 20, job_bytes_max=1 << 30)
    padding = {"x" * 300_000: 1.0}
    for step in range(10):
        log.append(JOB, step, padding)
    first = rows(log)
    assert len(first) * 300_000 < metrics_log.PAGE_BYTES + 300_100
    found, after = list(first), first[-1][0]
    while page := rows(log, after):
        found += page
        after = page[-1][0]
    assert [step for _, step, _ in found] == list(range(10))


def test_a_page_begins_where_the_one_before_ended_without_reading_the_file_again(
    log: MetricsFiles, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        log.append(JOB, step, {})
    assert [index for index, _, _ in rows(log)] == [1, 2, 3]
    (file,) = tmp_path.rglob("*.jsonl")
    earlier, last = file.read_bytes().rsplit(b"\n", 2)[:2]
    file.write_bytes(earlier.replace(b"\n", b" ") + b"\n" + last + b"\n")
    log.append(JOB, 2, {})
    log.append(JOB, 3, {})
    found = json.loads(log.page(JOB, 3))["rows"]
    assert [(row["index"], row["step"], row.get("rewinds_from")) for row in found] == [
        (4, 2, 3),
        (5, 3, None),
    ]
    assert rows(log, after=5) == []


def test_a_row_that_a_power_cut_left_in_part_does_not_damage_the_next_one(
    log: MetricsFiles, tmp_path: Path
) -> None:
    log.append(JOB, 1, {"loss": 1.0})
    (file,) = tmp_path.rglob("*.jsonl")
    with file.open("ab") as opened:
        opened.write(b'{"step": 2, "ti')
    assert rows(log) == [(1, 1, {"loss": 1.0})]
    log.append(JOB, 3, {"loss": 3.0})
    assert rows(log) == [(1, 1, {"loss": 1.0}), (2, 3, {"loss": 3.0})]


def test_rows_of_an_earlier_version_stay_with_their_job_and_go_to_no_other(
    log: MetricsFiles, tmp_path: Path
) -> None:
    for step in range(3):
        log.append(JOB, step, {})
    begun = json.loads(log.page(JOB, 0))["rows"][0]["time"]
    [new] = tmp_path.rglob("*.jsonl")
    new.rename(tmp_path / "m/metrics/j%2Fob.jsonl")
    log = MetricsFiles(tmp_path / "m", row_bytes_max=ROW_BYTES_MAX, job_bytes_max=JOB_BYTES_MAX)
    later = JOB._replace(tenant="later")
    log.take_over(later, begun + 3600.0)
    assert json.loads(log.page(later, 0))["rows"] == []
    for _ in range(2):
        log.take_over(JOB, begun - 1.0)
    log.append(JOB, 3, {})
    assert [row[:2] for row in rows(log)] == [(1, 0), (2, 1), (3, 2), (4, 3)]


def test_a_job_may_have_any_id_that_is_accepted(log: MetricsFiles) -> None:
    job = JobKey("t", f"a{':' * 199}")
    check_identifier("job", job.job)
    log.take_over(job, 0.0)
    log.append(job, 1, {})
    assert len(json.loads(log.page(job, 0))["rows"]) == 1
