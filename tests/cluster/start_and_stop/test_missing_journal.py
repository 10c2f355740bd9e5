"""A missing journal is not replaced silently while state of former jobs exists."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.scheduler.postgres import PostgresServer, server_folder

START_S = 60


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with a checkpoint, and no journal."""
    checkpoint = tmp_path / "data" / "checkpoints" / "kept" / "end"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "data"


def command(data: Path, *words: str) -> list[str]:
    where = ("--data-dir", str(data), "--virtual-gpus", "1")
    return [sys.executable, "-m", "plexrl.cli.app", "up", *where, *words]


@contextmanager
def up(data: Path, *words: str) -> Iterator[str]:
    """The first line that `plexrl up --json` prints; ended afterwards."""
    process = subprocess.Popen(
        command(data, "--json", *words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline()
    finally:
        process.terminate()
        process.wait(START_S)
        process.stdout.close()


@pytest.mark.slow
def test_up_refuses_a_missing_journal_unless_new_journal_is_given(data: Path) -> None:
    for _ in range(2):
        with up(data) as line:
            error = json.loads(line)["error"]
        assert error["code"] == "journal_missing"
        assert "--new-journal" in error["message"]
        assert Path(error["details"]["found"]).exists()
    with up(data, "--new-journal") as line:
        assert json.loads(line)["url"].startswith("http://")
    with up(data) as line:
        assert "url" in json.loads(line), "the new journal counts as this directory's from then on"
    assert (data / "checkpoints" / "kept" / "end" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "shown", "begins"), [(b"n\n", b"--new-journal", False), (b"y\n", b"is up", True)]
)
def test_at_a_terminal_up_begins_a_new_journal_only_with_consent(
    data: Path, answer: bytes, shown: bytes, begins: bool
) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command(data), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, answer)
    try:
        seen = b""
        while shown not in seen or b"Begin a new journal" not in seen:
            seen += os.read(ours, 4096)
        if begins:
            process.terminate()
        assert process.wait(START_S) == (0 if begins else 1)
        with up(data) as line:
            assert ("url" in json.loads(line)) == begins
        assert (data / "checkpoints" / "kept" / "end" / "model.safetensors").exists()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.slow
def test_an_empty_database_with_old_state_is_refused(data: Path) -> None:
    binaries = server_folder()
    if binaries is None:
        pytest.skip("no PostgreSQL server is installed (initdb was not found)")
    server = PostgresServer(binaries)
    try:
        with up(data, "--journal", server.database()) as line:
            assert json.loads(line)["error"]["code"] == "journal_missing"
    finally:
        server.close()
