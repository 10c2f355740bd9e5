"""An operator rotates and revokes keys at the command line, on real processes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from plexrl.cli.app import app
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.errors import PlexRLError

# `tests/router/services/test_authentication.py` rotates and revokes keys in one process.
pytestmark = pytest.mark.slow


@pytest.fixture
def running(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    cluster = start_embedded(tmp_path / "data", virtual_gpus=1, routers=2)
    yield cluster
    cluster.close()


def cli(cluster: EmbeddedCluster, *words: str) -> Any:
    """The JSON that a command prints; it finds the cluster and the key by the data directory."""
    done = CliRunner().invoke(app, [*words, "--data-dir", str(cluster.data_dir), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def refused(cluster: EmbeddedCluster, *words: str) -> str:
    """The code of the error with which a command ends."""
    done = CliRunner().invoke(app, [*words, "--data-dir", str(cluster.data_dir), "--json"])
    assert isinstance(done.exception, PlexRLError), (done.output, done.exception)
    return done.exception.code


def answers(cluster: EmbeddedCluster, key: str) -> list[int]:
    """Each router's status for a request with this key."""
    headers = {"Authorization": f"Bearer {key}"}
    return [
        httpx.get(f"{url}/v1/jobs", headers=headers, timeout=60).status_code
        for url in cluster.url.split(",")
    ]


def test_a_rotated_key_is_valid_at_once_and_a_revoked_one_on_no_router(
    running: EmbeddedCluster,
) -> None:
    first = cli(running, "tenants", "create", "alice", "--show-key")["api_key"]
    assert answers(running, first) == [200, 200]
    (before,) = cli(running, "tenants", "keys", "alice")
    rotated = cli(running, "tenants", "rotate", "alice", "--show-key")
    assert answers(running, first) == answers(running, rotated["api_key"]) == [200, 200]
    keys = cli(running, "tenants", "keys", "alice")
    assert [each["key"] for each in keys] == [before["key"], rotated["key"]]
    assert all(each["last_used_at"] >= each["created_at"] for each in keys)
    cli(running, "tenants", "revoke", "alice", before["key"])
    assert answers(running, first) == [401, 401]
    assert answers(running, rotated["api_key"]) == [200, 200]
    assert refused(running, "tenants", "revoke", "alice", "0123456789ab") == "not_found"


def test_the_operators_key_is_rotated_in_its_file_too(
    running: EmbeddedCluster, tmp_path: Path
) -> None:
    file = running.data_dir / "operator.key"
    old = file.read_text()
    (only,) = cli(running, "tenants", "keys", "operator")
    assert refused(running, "tenants", "revoke", "operator", only["key"]) == "conflict"
    rotated = cli(running, "tenants", "rotate", "operator", "--show-key")
    assert file.read_text() == rotated["api_key"] != old
    assert file.stat().st_mode & 0o777 == 0o600
    assert answers(running, old) == [200, 200]
    left = cli(running, "tenants", "revoke", "operator", only["key"])
    assert [each["key"] for each in left] == [rotated["key"]]
    assert answers(running, old) == [401, 401]
    running.close()
    again = start_embedded(tmp_path / "data", virtual_gpus=1, routers=2)
    try:
        assert again.api_key == rotated["api_key"]
        assert cli(again, "status")["gpus"] == 1
        assert answers(again, old) == [401, 401]
    finally:
        again.close()
