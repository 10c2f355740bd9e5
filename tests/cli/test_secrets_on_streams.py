"""Keys and tokens go to terminals, and elsewhere only where the user asks for it."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plexrl.process.folders.operator_key import operator_key
from plexrl.router.services.authentication import key_digest
from tests.router.live_router import OPERATOR_KEY, LiveRouter, live_router

PLEXRL = (sys.executable, "-m", "plexrl.cli.app")
END_S = 120


def run(router: LiveRouter, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PLEXRL_URL": router.url, "PLEXRL_API_KEY": OPERATOR_KEY}
    return subprocess.run(
        [*PLEXRL, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=END_S,
    )


@pytest.fixture(scope="module")
def router() -> Iterator[LiveRouter]:
    with live_router() as running:
        yield running


def test_a_new_tenants_key_is_printed_to_a_pipe_only_if_asked_for(router: LiveRouter) -> None:
    with router.client() as operator:
        for words in ((), ("--json",)):
            refused = run(router, "tenants", "create", "a", *words)
            assert refused.returncode == 1
            assert "--show-key" in refused.stdout + refused.stderr
        names = [each["tenant"] for each in operator.get("/v1/tenants").json()["tenants"]]
        assert "a" not in names, "nothing is made whose key nobody has seen"
        shown = run(router, "tenants", "create", "a", "--show-key", "--json")
        key = json.loads(shown.stdout)["api_key"]
        assert run(router, "keys", "create", "a").returncode == 1
        (listed,) = operator.get("/v1/tenants/a/keys").json()["keys"]
        assert key_digest(key).startswith(listed["key"])


@pytest.mark.parametrize("words", [(), pytest.param(("--json",), marks=pytest.mark.slow)])
def test_up_names_the_file_of_the_key_where_its_output_may_be_logged(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    output = tmp_path / "output"
    data = tmp_path / "data"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [
                *(*PLEXRL, "up", "--data-dir", str(data), "--nodes", "0"),
                *("--tls", "--join-port", "0", "--scheduler-port", "0", *words),
            ],
            stdout=stream,
            stderr=stream,
        )
    try:
        wait_for_end_of_start(data, process)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(END_S)
    said = output.read_text()
    assert str(data / "operator.key") in said
    assert (data / "operator.key").stat().st_mode & 0o777 == 0o600
    assert operator_key(data) not in said
    if "--json" not in words:
        assert 'export TINKER_API_KEY="tml-$(cat ' in said
        assert "export TINKER_BASE_URL=https://" in said
    assert "PLEXRL_JOIN_TOKEN" not in said
    for log in (data / "logs").rglob("*.log"):
        assert operator_key(data) not in log.read_text(), log


def wait_for_end_of_start(data: Path, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the cluster says that it is up."""
    from tests.cluster.tools import wait_until

    log = data / "logs" / "up.log"
    wait_until(
        lambda: process.poll() is not None or (log.exists() and "is up" in log.read_text()),
        "the cluster did not start",
    )


def test_a_key_is_shown_at_a_terminal(router: LiveRouter) -> None:
    own, theirs = pty.openpty()
    environment = {**os.environ, "PLEXRL_URL": router.url, "PLEXRL_API_KEY": OPERATOR_KEY}
    process = subprocess.Popen(
        [*PLEXRL, "tenants", "create", "b", "--json"], env=environment, stdout=theirs
    )
    os.close(theirs)
    shown = os.read(own, 4096)
    assert process.wait(END_S) == 0
    os.close(own)
    assert json.loads(shown)["api_key"].startswith("plx-")
