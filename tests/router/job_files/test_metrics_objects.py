"""Metrics in an object store: rows of several routers, numbered without gaps, and pages of them."""

import json
import threading
from collections.abc import Iterator

import pytest

from plexrl.errors import PayloadTooLargeError, QuotaExceededError
from plexrl.router.job_files.metrics_objects import MetricsObjects
from plexrl.router.job_files.record_store import JobKey
from plexrl.storage.object_store import ObjectStore
from tests.moto_server import moto_server
from tests.s3_server import BUCKET

PAGE_ROWS = 10
JOB = JobKey("t", "j/ob")


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    with moto_server() as found:
        yield found


@pytest.fixture
def store(
    environment: dict[str, str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectStore]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    opened = ObjectStore(f"s3://{BUCKET}/{request.node.name}")
    yield opened
    opened.close()


def log_of(store: ObjectStore, router: str, job_bytes_max: int = 1 << 20) -> MetricsObjects:
    return MetricsObjects(
        store, router, row_bytes_max=200, job_bytes_max=job_bytes_max, page_rows=PAGE_ROWS
    )


def rows(log: MetricsObjects, after: int = 0) -> list[tuple[int, int]]:
    found = json.loads(log.page(JOB, after))["rows"]
    return [(row["index"], row["step"]) for row in found]


def test_rows_of_two_routers_are_one_sequence(store: ObjectStore) -> None:
    one, two = log_of(store, "one"), log_of(store, "two")
    for step in range(2 * PAGE_ROWS + 5):
        (one, two)[step // 3 % 2].append(JOB, step, {"loss": 1.0})
    expected = [(step + 1, step) for step in range(2 * PAGE_ROWS + 5)]
    for log in (one, two, log_of(store, "three")):
        assert rows(log) == expected
        assert rows(log, 7) == expected[7:]
        assert rows(log, PAGE_ROWS) == expected[PAGE_ROWS:]
        assert rows(log, len(expected)) == []
    one.close()
    two.close()


def test_full_pages_replace_their_rows(store: ObjectStore) -> None:
    log = log_of(store, "one")
    for step in range(PAGE_ROWS):
        log.append(JOB, step, {})
    log.close()  # Not before a page that is being written.
    log = log_of(store, "one")
    for step in range(PAGE_ROWS, 2 * PAGE_ROWS + 1):
        log.append(JOB, step, {})
    log._pages.shutdown()
    names = [each.key.split("/", 3)[3] for each in store.find("metrics")]
    assert names == ["pages/000000000", "pages/000000001", f"rows/{2 * PAGE_ROWS + 1:012d}"]
    assert [index for index, _ in rows(log_of(store, "two"))] == list(range(1, 2 * PAGE_ROWS + 2))


def test_a_router_that_knows_an_old_end_appends_after_the_pages_of_another(
    store: ObjectStore,
) -> None:
    old, other = log_of(store, "old"), log_of(store, "other")
    old.append(JOB, 0, {})
    for step in range(1, PAGE_ROWS + 2):
        other.append(JOB, step, {})
    other._pages.shutdown()
    old.append(JOB, 99, {})
    expected = [*range(PAGE_ROWS + 2), 99]
    assert [step for _, step in rows(old)] == expected
    assert rows(log_of(store, "new")) == [(i + 1, step) for i, step in enumerate(expected)]


def test_routers_that_append_at_once_lose_no_row(store: ObjectStore) -> None:
    logs = [log_of(store, str(number)) for number in range(4)]

    def append(number: int) -> None:
        for step in range(12):
            logs[number].append(JOB, 100 * number + step, {})

    threads = [threading.Thread(target=append, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log._pages.shutdown()
    found = rows(log_of(store, "new"))
    assert [index for index, _ in found] == list(range(1, 49))
    for number in range(4):
        steps = [step for _, step in found if step // 100 == number]
        assert steps == [100 * number + step for step in range(12)]


def test_bounds_hold_for_the_rows_of_all_routers(store: ObjectStore) -> None:
    one, two = log_of(store, "one", 400), log_of(store, "two", 400)
    with pytest.raises(PayloadTooLargeError):
        one.append(JOB, 0, {f"value{number}": 1.0 for number in range(50)})
    for step in range(6):
        (one, two)[step % 2].append(JOB, step, {})
    for log in (one, two):
        with pytest.raises(QuotaExceededError, match="400"):
            log.append(JOB, 6, {"loss": 1.0, "reward": 1.0, "length": 1.0})
    kept = rows(one)
    assert len(kept) == 6
    with pytest.raises(QuotaExceededError):
        log_of(store, "new", 400).append(JOB, 1, {"loss": 1.0, "reward": 1.0, "length": 1.0})
    assert rows(two) == kept


def test_the_server_of_these_tests_has_conditional_writes(store: ObjectStore) -> None:
    assert store.has_conditional_writes("probe")


def test_rows_of_an_earlier_version_stay_with_their_job_and_go_to_no_other(
    store: ObjectStore,
) -> None:
    log = log_of(store, "one")
    # Its jobs are below the folder that had the rows of a job of this name.
    namesake = JobKey(JOB.job, "rows")
    log.append(namesake, 9, {})
    for step in range(PAGE_ROWS + 3):
        log.append(JOB, step, {})
    log.close()
    log = log_of(store, "one")
    log._write_pages(JOB)
    begun = json.loads(log.page(JOB, 0))["rows"][0]["time"]
    for each in store.find("metrics/t"):
        store.write(each.key.replace("metrics/t/", "metrics/"), store.read(each.key))
        store.delete([each.key])
    later = JOB._replace(tenant="later")
    log.take_over(later, begun + 3600.0)
    assert json.loads(log.page(later, 0))["rows"] == []
    for router in ("one", "two"):
        log = log_of(store, router)
        log.take_over(JOB, begun - 1.0)
        assert [index for index, _ in rows(log)] == list(range(1, PAGE_ROWS + 4))
    log.append(JOB, PAGE_ROWS + 3, {})
    assert rows(log)[-1] == (PAGE_ROWS + 4, PAGE_ROWS + 3)
    assert [row["step"] for row in json.loads(log.page(namesake, 0))["rows"]] == [9]
