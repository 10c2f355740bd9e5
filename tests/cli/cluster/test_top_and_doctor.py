"""`plexrl top` and `plexrl doctor` on a cluster that has jobs, and on an empty one."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from plexrl.cli.cluster.observe.doctor import REMEDIES, doctor
from plexrl.cli.cluster.observe.status import problems
from plexrl.cli.terminal.context import Access
from tests.docs.pages import ROOT
from tests.router.dashboard.conftest import router_of
from tests.router.dashboard.fleet import SMALL
from tests.router.live_router import OPERATOR_KEY, LiveRouter, live_router

WAIT_S = 60


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRouter]:
    with router_of(SMALL, tmp_path_factory.mktemp("f")) as found:
        yield found


def environment(router: LiveRouter) -> dict[str, str]:
    return {**os.environ, "PLEXRL_URL": router.url, "PLEXRL_API_KEY": OPERATOR_KEY}


def run(router: LiveRouter, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "plexrl.cli.app", *arguments]
    return subprocess.run(
        command, env=environment(router), capture_output=True, text=True, timeout=WAIT_S
    )


def test_top_reads_well_in_a_file(fleet: LiveRouter) -> None:
    found = run(fleet, "top", "--rows", "3")
    assert found.returncode == 0, found.stderr
    assert "\x1b" not in found.stdout
    assert f"{8 * SMALL.nodes} GPUs on {SMALL.nodes} nodes: █ computing" in found.stdout
    assert "Wait for their turn" in found.stdout
    rows = [line for line in found.stdout.splitlines() if re.match(r"\d+\s\s", line)]
    assert len(rows) == 6


def test_top_as_json_is_one_look(fleet: LiveRouter) -> None:
    found = json.loads(run(fleet, "top", "--json", "--rows", "2").stdout)
    assert found.keys() == {"overview", "turns", "gpus"}
    assert len(found["turns"]) == 2
    assert found["overview"]["jobs_live"] == SMALL.jobs


def test_top_at_a_terminal_is_refreshed_until_it_is_interrupted(fleet: LiveRouter) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "plexrl.cli.app", "top", "--interval", "1"]
    process = subprocess.Popen(
        command, env={**environment(fleet), "TERM": "xterm"}, stdout=theirs, stdin=theirs
    )
    os.close(theirs)
    shown, end = b"", time.monotonic() + WAIT_S
    while shown.count(b"GPUs on") < 2 and time.monotonic() < end:
        shown += os.read(ours, 65536)
    process.send_signal(2)
    assert process.wait(WAIT_S) == 0
    os.close(ours)
    assert shown.count(b"GPUs on") >= 2
    assert b"Traceback" not in shown


def test_top_goes_on_after_looks_that_fail() -> None:
    ours, theirs = pty.openpty()
    with live_router() as router:
        command = [sys.executable, "-m", "plexrl.cli.app", "top", "--interval", "1"]
        process = subprocess.Popen(
            command, env={**environment(router), "TERM": "xterm"}, stdout=theirs, stdin=theirs
        )
        os.close(theirs)
        await_shown(ours, b"GPUs on")
    await_shown(ours, b"not refreshed since")
    assert process.poll() is None
    process.send_signal(2)
    assert process.wait(WAIT_S) == 0
    os.close(ours)


def await_shown(terminal: int, text: bytes) -> None:
    shown, end = b"", time.monotonic() + WAIT_S
    while text not in shown:
        assert time.monotonic() < end, shown
        shown += os.read(terminal, 65536)


def test_status_and_doctor_name_the_same_problems() -> None:
    found: Any = {
        "conditions": [{"code": "storage_full", "since": 1.0, "message": "on n"}],
        "parts": {"router": {"down_since": 2.0, "stuck_since": None}},
        "deployments_impossible": 3,
        "snapshot_error": "no space",
        "events": {"connected": False, "error": ""},
    }
    codes = [problem.code for problem in problems(found)]
    assert codes == ["storage_full", "part", "impossible", "snapshot_error", "event_broker"]
    assert set(codes) <= set(REMEDIES)


def test_top_at_a_terminal_that_cannot_be_redrawn_is_one_look(fleet: LiveRouter) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "plexrl.cli.app", "top", "--interval", "1", "--rows", "1"]
    process = subprocess.Popen(
        command, env={**environment(fleet), "TERM": "dumb"}, stdout=theirs, stdin=theirs
    )
    try:
        assert process.wait(WAIT_S) == 0
        assert b"GPUs on" in os.read(ours, 65536)
    finally:
        process.kill()
        os.close(theirs)
        os.close(ours)


def test_doctor_names_what_is_wrong_with_a_remedy(fleet: LiveRouter) -> None:
    found = run(fleet, "doctor", "--json")
    assert found.returncode == 1
    findings = {each["code"]: each for each in json.loads(found.stdout)}
    assert findings["impossible"]["is_wrong"]
    assert all(each["remedy"] for each in findings.values())
    text = run(fleet, "doctor")
    assert text.returncode == 1
    assert "mend it: " in text.stdout


class Drained:
    """What a client sees of a cluster that does what it was told."""

    def status(self) -> dict[str, Any]:
        return {"conditions": [], "deployments_impossible": 0}

    def overview(self) -> dict[str, Any]:
        gpus = {"gpus": 16, "states": {"free": 8, "draining": 8}}
        return {"gpus": gpus, "impossible": 0, "waiting": 3}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"node": "n", "is_draining": True, "gpus_reserved": 0}]


def test_doctor_fails_for_no_mere_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Access, "open", lambda _: nullcontext(Drained()))
    doctor(**{each.name: None for each in fields(Access)}, as_json=False)
    shown = capsys.readouterr().out
    assert shown.startswith("Nothing is wrong.")
    assert "hint: free_gpus" in shown
    assert "hint: drained" in shown


def test_doctor_tells_an_empty_cluster_how_to_get_nodes() -> None:
    with live_router() as router:
        found = run(router, "doctor")
    assert found.returncode == 1
    assert "no_gpus: no node has joined" in found.stdout
    # The token is of use on a head with certificates only.
    assert "plexrl node token" in found.stdout
    assert "plexrl up --tls" in found.stdout
    assert "plexrl up --gpus" in found.stdout


def test_doctor_knows_every_documented_condition() -> None:
    page = (ROOT / "docs" / "health.md").read_text()
    table = page.split("| code | meaning |")[1].split("\n\n")[0]
    documented = {
        code
        for line in table.splitlines()
        for code in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    }
    assert documented <= set(REMEDIES), documented - set(REMEDIES)


def test_remedies_name_commands_that_exist(tmp_path: Path) -> None:
    del tmp_path
    known = run_help()
    for remedy in REMEDIES.values():
        for command in re.findall(r"`plexrl ([\w-]+)", remedy):
            assert command in known, remedy


def run_help() -> str:
    command = [sys.executable, "-m", "plexrl.cli.app", "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
