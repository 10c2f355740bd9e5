"""The archive of a real scheduler that is killed, and one in a real object store that is away."""

import asyncio
import signal
from pathlib import Path

import pytest

from plexrl.errors import StoreUnavailableError
from plexrl.scheduler.service.journal.history.archive import Archive
from plexrl.scheduler.service.journal.history.pieces import EVENTS
from plexrl.scheduler.service.journal.history.reading import HistoryReader
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from plexrl.scheduler.state.messages.events import JobSubmitted
from tests.scheduler.scheduler_process import SchedulerProcess
from tests.scheduler.service.journal.history.archived_cluster import ArchivedCluster


def start(folder: Path) -> SchedulerProcess:
    process = SchedulerProcess(
        folder,
        "a",
        str(folder / "journal.db"),
        archive_url=str(folder / "history"),
        snapshot_events=7,
    )
    process.wait_ready()
    return process


def test_no_event_is_lost_or_read_twice_when_the_scheduler_is_killed_again_and_again(
    tmp_path: Path,
) -> None:
    accepted = []
    for round_number in range(6):
        process = start(tmp_path)
        try:
            for number in range(12):
                name = f"j{round_number}-{number}"
                asyncio.run(process.submit_job(name))
                accepted.append(name)
            process.send(signal.SIGKILL)
            process.wait_end()
        finally:
            process.close()
    archive = Archive(str(tmp_path / "history"))
    assert archive.pieces(EVENTS)
    journal = SqlJournal(str(tmp_path / "journal.db"))
    try:
        entries = list(HistoryReader(archive, journal).entries(0.0, 1e12))
        assert journal.rows(0, 1)[0][0] > 1
    finally:
        journal.close()
    assert [entry.position for entry in entries] == list(range(1, len(entries) + 1))
    submitted = [each.event.job for each in entries if isinstance(each.event, JobSubmitted)]
    assert submitted == accepted


def test_an_archive_in_an_object_store_goes_on_when_the_store_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its server is a package that a core's tests do without.
    servers = pytest.importorskip("tests.s3_server", exc_type=ImportError)
    with servers.s3_server(tmp_path / "s3") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        cluster = ArchivedCluster(tmp_path, server.url("history"))
        cluster.work()
        cluster.save()
        server.kill()
        cluster.work()
        with pytest.raises(StoreUnavailableError):
            cluster.save()
        server.start()
        asyncio.run(cluster.writer.archive_now())
        reader = cluster.reader(with_journal=False)
        found = [(entry.event, entry.at) for entry in reader.entries(0.0, 1e12)]
        assert found == cluster.journal
        assert len(reader.runs(0.0, 1e12, 0.0).runs) > 4
        cluster.archive.delete(cluster.archive.pieces())
        assert cluster.archive.pieces() == []
