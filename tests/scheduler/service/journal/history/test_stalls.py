"""An archive on a mount that hangs, and does not fail."""

import asyncio
import threading
from pathlib import Path

from plexrl.scheduler.service.journal.history.archive import Archive
from plexrl.scheduler.service.journal.history.pieces import ArchivePiece
from plexrl.scheduler.service.journal.history.writer import HistoryWriter
from tests.scheduler.live_service import until
from tests.scheduler.service.journal.history.archived_cluster import KEPT, ArchivedCluster


class HangingArchive(Archive):
    """Answers no listing until it is released."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.released = threading.Event()
        self.waiting = 0

    def pieces(self, *kinds: str) -> list[ArchivePiece]:
        self.waiting += 1
        self.released.wait(60.0)
        self.waiting -= 1
        return super().pieces(*kinds)


def hanging_writer(cluster: ArchivedCluster, archive: Archive) -> HistoryWriter:
    return HistoryWriter(
        archive, KEPT, cluster.sql, lambda: cluster.core, position=0, stalled_s=0.05
    )


def test_an_archive_that_hangs_is_a_condition_until_it_answers(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.snapshot()
    archive = HangingArchive(str(tmp_path / "history"))
    writer = hanging_writer(cluster, archive)

    async def run() -> None:
        running = asyncio.create_task(writer.run())
        await until(lambda: writer.condition() is not None)
        held = writer.condition()
        assert held is not None
        assert held.code == "history_behind"
        assert "has not answered" in held.message
        archive.released.set()
        await until(lambda: bool(Archive.pieces(archive)) and writer.condition() is None)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_readers_that_give_up_leave_one_thread_in_an_archive_that_hangs(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.work()
    cluster.save()
    archive = HangingArchive(str(tmp_path / "history"))
    writer = hanging_writer(cluster, archive)

    async def run() -> None:
        for _ in range(5):
            reading = asyncio.create_task(writer.runs(0.0, 1e9, 0.0, None))
            await until(lambda: archive.waiting > 0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        assert archive.waiting == 1
        archive.released.set()
        found = await writer.runs(0.0, 1e9, 0.0, None)
        assert found.runs

    asyncio.run(run())
