"""The page after `kill -9` of the scheduler, and the page of what is left on disk."""

import hashlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.dashboard.agents import connected, greetings
from tests.router.dashboard.browser import Tab, needs_browser
from tests.router.dashboard.fleet import SETTINGS, SMALL, build, write_journal
from tests.router.dashboard.test_page import SHOWN, enter
from tests.router.live_router import OPERATOR_KEY, LiveRouter, _process
from tests.scheduler.scheduler_process import SchedulerProcess

LANES = {"seconds": 7200.0, "until_s": 600.0}
ROOT = Path(__file__).parents[3]


class Killable:
    """A router, and a scheduler that is killed and started again on its journal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "fleet.sqlite"
        now = time.time()
        self.core = build(SMALL, now).core
        write_journal(self.journal, self.core, now)
        self.scheduler = self.start()

    def start(self) -> SchedulerProcess:
        self.scheduler = SchedulerProcess(
            self.folder,
            "s",
            str(self.journal),
            **SETTINGS,
            operator_key_digest=hashlib.sha256(OPERATOR_KEY.encode()).hexdigest(),
        )
        self.scheduler.wait_ready()
        return self.scheduler

    def kill(self) -> None:
        self.scheduler.send(signal.SIGKILL)
        self.scheduler.wait_end()
        self.scheduler.close()


@contextmanager
def killable(folder: Path) -> Iterator[tuple[Killable, LiveRouter]]:
    cluster = Killable(folder)
    config = {
        "router": "router0",
        "scheduler": [f"unix:{folder}/s.sock"],
        "host": "127.0.0.1",
        "port": 0,
        "data_dir": str(folder / "data"),
    }
    try:
        with _process(folder, "router", config) as (router, ready):
            yield cluster, LiveRouter(ready["port"], folder / "router.log", router.pid)
    finally:
        cluster.scheduler.close()


def who_ran_where(view: dict[str, Any]) -> set[tuple[str, str, int]]:
    """(group, job, kind) of all spans of the lanes."""
    jobs = [job["job"] for job in view["jobs"]]
    return {
        (lane["group"], jobs[at], kind)
        for lane in view["lanes"]
        for _, _, at, kind in lane["spans"]
        if at >= 0
    }


@needs_browser
def test_the_page_reopens_with_its_lanes_after_the_scheduler_was_killed(
    tmp_path: Path, tab: Tab
) -> None:
    with killable(tmp_path) as (cluster, router), router.client() as client:
        before = client.get("/v1/lanes", params=LANES).raise_for_status().json()
        enter(tab, router)
        tab.wait_for(SHOWN)
        cluster.kill()
        tab.wait_for("document.querySelector('#health .condition')")
        cluster.start()
        with connected(f"unix:{tmp_path}/s.sock", greetings(cluster.core)):
            tab.wait_for("document.querySelector('.good')")
            tab.evaluate("location.reload()")
            tab.wait_for(SHOWN)
            after = client.get("/v1/lanes", params=LANES).raise_for_status().json()
    assert len(who_ran_where(before)) > SMALL.jobs // 2
    assert who_ran_where(after) == who_ran_where(before)
    assert after["oldest"] == before["oldest"]


@contextmanager
def stored_page(*arguments: str) -> Iterator[tuple[httpx.Client, list[str]]]:
    """`plexrl dashboard` with these arguments: a client with the page's key, and what it said."""
    process = subprocess.Popen(
        [sys.executable, "-m", "plexrl", "dashboard", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline().strip() for _ in range(3)]
        found = re.fullmatch(r"page:\s+(http://127\.0\.0\.1:\d+)/dashboard", lines[1])
        assert found is not None, lines
        headers = {"Authorization": f"Bearer {lines[2].removeprefix('key:').strip()}"}
        with httpx.Client(base_url=found[1], headers=headers, timeout=30.0) as client:
            yield client, lines
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30.0) == 0
        process.stdout.close()


def test_a_journal_is_shown_without_a_cluster_and_not_changed(tmp_path: Path) -> None:
    journal, now = tmp_path / "journal.sqlite", time.time() - 5000.0
    write_journal(journal, build(SMALL, now).core, now)
    before = journal.read_bytes()
    with stored_page("--from", str(tmp_path)) as (client, _):
        overview = client.get("/v1/overview").raise_for_status().json()
        assert overview["now"] == now
        assert overview["gpus"]["gpus"] == 8 * SMALL.nodes
        (held,) = [each for each in overview["conditions"] if each["code"] == "unavailable"]
        assert "no cluster runs here" in held["message"]
        lanes = client.get("/v1/lanes", params={"seconds": 7200}).json()
        assert len(who_ran_where(lanes)) > SMALL.jobs // 2
        assert client.get("/v1/queue").json()["total"] > 0
        assert client.get("/v1/shares").json()["tenants"]
        assert "<title>" in client.get("/dashboard").text
        refused = client.post("/v1/jobs", json={"job": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        anonymous = httpx.get(f"{client.base_url}/v1/overview")
        assert anonymous.status_code == 401
    assert journal.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.sqlite"]


def test_the_demo_has_jobs_that_run_and_jobs_that_wait() -> None:
    with stored_page("--demo") as (client, lines):
        overview = client.get("/v1/overview").raise_for_status().json()
        assert overview["gpus"]["states"]["computing"] > 0
        assert overview["waiting"] > 0
        lanes = client.get("/v1/lanes", params={"seconds": 3600}).json()
        assert {kind for _, _, kind in who_ran_where(lanes)} >= {0, 1}
        assert "nothing runs here" in lines[0]


@pytest.mark.parametrize("arguments", [(), ("--demo", "--from", "x"), ("--from", "/nowhere")])
def test_a_page_of_nothing_is_refused(arguments: tuple[str, ...]) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "plexrl", "dashboard", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert found.returncode != 0
    assert "--from" in found.stderr or "no journal" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "journal.sqlite"
    wrong.write_text("not a database, but long enough to be looked at" * 40)
    command = [sys.executable, "-m", "plexrl", "dashboard", "--from", str(wrong)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode != 0
    assert "cannot be read as a journal" in found.stderr
