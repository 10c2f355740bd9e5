"""The audit log has one line for each request that may change something."""

import asyncio
import errno
import io
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from plexrl.process.folders.rotated_log import FILES, RotatedLog
from plexrl.router.observe.audit_log import (
    FOLDER,
    KINDS,
    METHOD_MAX,
    PATH_MAX,
    AuditLog,
    read_audit,
)
from plexrl.router.services.access_table import ROWS
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
        folder = router.log.parent / "data" / "audit"
        texts = {kind: (folder / f"router0.{kind}.log").read_text() for kind in KINDS}
        assert folder.stat().st_mode & 0o777 == 0o700
        assert key not in "".join(texts.values())
        with router.client() as operator:
            shown = operator.get("/v1/audit", params={"outcome": "refused"}).json()["lines"]
            assert [line["status"] for line in shown] == [401, 403]
            filters = ({"tenant": "a"}, {"target": "nodes"}, {"limit": 1}, {"hours": 1e-9})
            counts = [
                len(operator.get("/v1/audit", params=each).json()["lines"]) for each in filters
            ]
    lines = [json.loads(line) for kind in KINDS for line in texts[kind].splitlines()]
    assert counts == [2, 1, 1, 0]
    seen = [(each["tenant"], each["method"], each["path"], each["status"]) for each in lines]
    assert seen == [
        ("operator", "POST", "/v1/tenants", 201),
        ("a", "POST", "/v1/jobs", 201),
        ("a", "DELETE", "/v1/nodes/n", 403),
        (None, "POST", "/v1/jobs", 401),
    ]
    assert [each["outcome"] for each in lines] == ["done", "done", "refused", "refused"]
    assert [each["role"] for each in lines] == ["operator", "admin", "admin", None]
    assert [each["action"] for each in lines] == [
        *("POST /v1/tenants", "POST /v1/jobs", "DELETE /v1/nodes/{node}", None)
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


def test_a_durable_line_is_in_the_file_or_its_loss_is_an_error(tmp_path: Path) -> None:
    log = RotatedLog(tmp_path / "log", 4000)
    log.handle_durably(record("line"))
    assert (tmp_path / "log").read_text() == "line\n"
    log.close()
    log.stream = FullDisk()  # type: ignore[assignment]
    with pytest.raises(OSError, match="no space"):
        log.handle_durably(record("line"))


def test_a_slow_disk_holds_up_no_other_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RotatedLog(tmp_path / "log", 4000)
    is_syncing, may_end = threading.Event(), threading.Event()

    def slow_sync(_: int) -> None:
        is_syncing.set()
        assert may_end.wait(60)

    monkeypatch.setattr(os, "fsync", slow_sync)
    durable = threading.Thread(target=log.handle_durably, args=(record("durable"),))
    durable.start()
    assert is_syncing.wait(60)
    other = threading.Thread(target=log.handle, args=(record("other"),))
    other.start()
    other.join(10)
    was_held_up = other.is_alive()
    may_end.set()
    durable.join()
    other.join()
    log.close()
    assert not was_held_up
    assert (tmp_path / "log").read_text() == "durable\nother\n"


def test_a_line_after_one_that_was_cut_is_whole_and_a_long_path_is_cut(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "r.strangers.log").write_text('{"at": "00')

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 401, "headers": []})

    async def run() -> None:
        async def drop(*_: Any) -> Any:
            return None

        log = AuditLog(
            refuse, data_dir=tmp_path, router="r", bytes_max=1 << 20, error_response=drop_error
        )
        scope = {"type": "http", "method": "M" * 9000, "path": "/é" * 9000, "client": None}
        await log({**scope, "state": {}}, drop, drop)
        for each in log._logs.values():
            each.close()

    async def drop_error(*_: Any) -> Any:
        raise AssertionError

    asyncio.run(run())
    (line,) = read_audit(tmp_path, lambda _: True, 100)
    assert (len(line["path"]), len(line["method"])) == (PATH_MAX, METHOD_MAX)


def test_lines_of_all_logs_are_read_newest_first_and_broken_ones_left_out(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    at = 0
    for name in ("r.tenants.log.2", "r.tenants.log.1", "r.tenants.log", "s.operators.log"):
        lines = [json.dumps({"at": f"{at + index:03}"}) for index in range(3)]
        (folder / name).write_text("\n".join([*lines, '{"at": "00']))
        at += 3
    found = [line["at"] for line in read_audit(tmp_path, lambda _: True, 100)]
    assert found == [f"{index:03}" for index in reversed(range(12))]
    assert [line["at"] for line in read_audit(tmp_path, lambda line: line["at"] < "007", 2)] == [
        *("006", "005")
    ]


def test_an_administrative_change_is_not_acknowledged_without_its_line() -> None:
    with live_router() as router, router.client() as operator:
        folder = router.log.parent / "data" / "audit"
        log = folder / "router0.operators.log"
        operator.post("/v1/tenants", json={"name": "a"}).raise_for_status()
        # Each line rotates the log, into a folder in its way.
        log.write_text(" " * (300 << 20))
        for number in range(1, FILES):
            (folder / f"{log.name}.{number}").mkdir()
            (folder / f"{log.name}.{number}" / "in the way").touch()
        answer = operator.post("/v1/tenants", json={"name": "b"})
        assert answer.status_code == 503
        assert "audit log" in answer.json()["error"]["message"]
        assert "api_key" not in answer.text
        assert operator.post("/v1/jobs", json={"job": "j", "name": "j"}).status_code == 201


def test_each_change_of_a_key_is_administrative() -> None:
    changes = [rule for row, rule in ROWS.items() if "/keys" in row and rule.changes]
    assert len(changes) == 4
    assert all(rule.is_administrative for rule in changes)


class FullDisk(io.StringIO):
    """A file without space."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, f"no space for {text}")


def record(text: str) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": text})
