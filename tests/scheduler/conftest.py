"""The databases a journal can lie in, for tests that must hold in each."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scheduler.postgres import PostgresServer, server_folder


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server for the whole run."""
    binaries = server_folder()
    if binaries is None:
        pytest.skip("no PostgreSQL server is installed (initdb was not found)")
    server = PostgresServer(binaries)
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgres"])
def journal_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new journal may lie: a path, or the URL of an empty database."""
    if request.param == "sqlite":
        return str(tmp_path / "journal.sqlite")
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.database()
