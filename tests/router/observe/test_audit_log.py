"""The audit log has one line for each request that may change something."""

import errno
import io
import json
import logging
from pathlib import Path

import httpx
import pytest

from plexrl.process.folders.rotated_log import FILES, RotatedLog
from plexrl.router.services.authentication import key_digest
from plexrl.scheduler.accounting.tenants import key_id
from tests.router.live_router import OPERATOR_KEY, live_router


def test_who_did_what_from_where_and_the_answer_are_recorded() -> None:
    with live_router() as router:
        with router.client() as operator:
            assert operator.get("/v1/jobs").status_code == 200
            key = operator.post("/v1/tenants", json={"name": "a"}).json()["api_key"]
        with router.client(key) as tenant:
            tenant.post("/v1/jobs", json={"job": "j", "name": "j"}).raise_for_status()
            tenant.post("/v1/jobs/j/heartbeat")
            assert tenant.delete("/v1/nodes/n").status_code == 403
        assert httpx.post(f"{router.url}/v1/jobs", json={}).status_code == 401
        file = router.log.parent / "data" / "audit" / "router0.log"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert key not in file.read_text()
    seen = [(each["tenant"], each["method"], each["path"], each["status"]) for each in lines]
    assert seen == [
        ("operator", "POST", "/v1/tenants", 201),
        ("a", "POST", "/v1/jobs", 201),
        ("a", "DELETE", "/v1/nodes/n", 403),
        (None, "POST", "/v1/jobs", 401),
    ]
    assert lines[0]["key"] == key_id(key_digest(OPERATOR_KEY))
    assert {each["from"] for each in lines} == {"127.0.0.1"}


def test_a_log_is_rotated_and_all_its_files_stay_below_the_bound(tmp_path: Path) -> None:
    log = RotatedLog(tmp_path / "log", 4000)
    for number in range(1000):
        log.handle(record(f"line {number}"))
    log.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == FILES
    assert sum(file.stat().st_size for file in files) <= 4000
    assert (tmp_path / "log").read_text().endswith("line 999\n")


def test_a_log_that_cannot_be_written_complains_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RotatedLog(tmp_path / "log", 4000)
    log.close()
    # `setStream` takes any stream, as the type of `stream` does not say.
    log.stream = FullDisk()  # type: ignore[assignment]
    for _ in range(3):
        log.handle(record("line"))
    assert capsys.readouterr().err.count("cannot be written") == 1


class FullDisk(io.StringIO):
    """A file without space."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, f"no space for {text}")


def record(text: str) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": text})
