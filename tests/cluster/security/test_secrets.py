"""The password of the journal's database is visible neither in `ps` nor to tenants."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from plexrl.cluster.config.options import JOURNAL_VARIABLE
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.process.folders.folders import Folders
from tests.cluster.tools import wait_until
from tests.scheduler.postgres import PostgresServer, server_folder

PASSWORD = "s3cret-of-the-journal"
JOURNAL = "events-of-mine.sqlite"
UP = (sys.executable, "-m", "plexrl.cli.app", "up", "--virtual-gpus", "1", "--json")


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    binaries = server_folder()
    if binaries is None:
        pytest.skip("no PostgreSQL server is installed (initdb was not found)")
    running = PostgresServer(binaries)
    yield running
    running.close()


def with_password(url: str, *, in_query: bool) -> str:
    if in_query:
        return f"{url}&password={PASSWORD}"
    return url.replace("plexrl@", f"plexrl:{PASSWORD}@", 1)


# `test_effective_values_are_valid_toml_without_secrets` and `test_messages_hide_passwords` have the
# other form.
@pytest.mark.parametrize("in_query", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_password_is_in_no_process_argument_response_or_log(
    tmp_path: Path, server: PostgresServer, in_query: bool
) -> None:
    url = with_password(server.database(), in_query=in_query)
    process = subprocess.Popen(
        [*UP, "--data-dir", str(tmp_path)],
        env={**os.environ, JOURNAL_VARIABLE: url},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    endpoint = json.loads(process.stdout.readline())
    is_stopped = False
    try:
        parts = psutil.Process(process.pid).children(recursive=True)
        assert len(parts) >= 4
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                assert PASSWORD.encode() not in path.read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
        for part in parts:
            assert JOURNAL_VARIABLE not in part.environ(), part.cmdline()
        folders = Folders.of(tmp_path)
        for file in folders.run.glob("*.json"):
            assert file.stat().st_mode & 0o77 == 0, file

        key = Path(endpoint["key_file"]).read_text()
        operator = httpx.Client(headers={"Authorization": f"Bearer {key}"})
        created = operator.post(f"{endpoint['url']}/v1/tenants", json={"name": "alice"}, timeout=60)
        tenant = {"Authorization": f"Bearer {created.json()['api_key']}"}
        server.stop()
        is_stopped = True
        body = {"job": "j", "name": "j"}
        answers = [
            httpx.post(f"{endpoint['url']}/v1/jobs", json=body, headers=tenant, timeout=60),
            httpx.get(f"{endpoint['url']}/v1/status", headers=tenant, timeout=60),
            httpx.get(f"{endpoint['url']}/v1/health", timeout=60),
        ]
        assert answers[0].status_code >= 500
        wait_until(
            lambda: "journal_unavailable" in httpx.get(f"{endpoint['url']}/v1/health").text,
            "health does not report that the database is away",
        )
        shown = " ".join(f"{each.text} {each.headers}" for each in answers)
        for secret in (PASSWORD, "postgresql", "journal1", "host="):
            assert secret not in shown
        status = operator.get(f"{endpoint['url']}/v1/status", timeout=60).json()
        operator.close()
        (condition,) = status["conditions"]
        assert condition["code"] == "journal_unavailable"
        assert "does not answer" in condition["message"], "the operator sees the message"
        shown = subprocess.run(
            [sys.executable, "-m", "plexrl.cli.app", "status", "--data-dir", str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        assert "wrong now" in shown
        assert "journal_unavailable" in shown
        assert PASSWORD not in str(status) + shown
    finally:
        if is_stopped:
            server.start()
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        process.stdout.close()
    for log in (tmp_path / "logs").rglob("*.log"):
        assert PASSWORD not in log.read_text(errors="replace"), log


def test_a_password_on_the_command_line_is_refused_with_a_remedy(tmp_path: Path) -> None:
    url = f"postgresql://plexrl:{PASSWORD}@nowhere/journal"
    done = subprocess.run(
        [*UP, "--data-dir", str(tmp_path), "--journal", url],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "invalid_request"
    assert JOURNAL_VARIABLE in error["message"]
    assert PASSWORD not in done.stdout + done.stderr


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """A cluster with a journal of that name, which serves the documentation of its API."""
    folder = tmp_path_factory.mktemp("documented")
    running = start_embedded(
        folder / "data", virtual_gpus=1, api_docs=True, journal=str(folder / JOURNAL)
    )
    yield running
    running.close()


@pytest.mark.slow
def test_the_option_api_docs_reaches_the_router(documented: EmbeddedCluster) -> None:
    assert httpx.get(f"{documented.url}/docs", timeout=60).status_code == 200


@pytest.mark.slow
def test_an_embedded_clusters_journal_is_not_an_argument(documented: EmbeddedCluster) -> None:
    supervisor = psutil.Process(documented.pid)
    for process in (supervisor, *supervisor.children(recursive=True)):
        assert JOURNAL not in " ".join(process.cmdline())
    assert (documented.data_dir.parent / JOURNAL).stat().st_size > 0
