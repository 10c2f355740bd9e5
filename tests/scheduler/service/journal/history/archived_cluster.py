"""A core whose events go to a real journal and from there to a real archive."""

import asyncio
from pathlib import Path

from plexrl.scheduler.service.journal.history.archive import Archive, KeptHistory
from plexrl.scheduler.service.journal.history.reading import HistoryReader
from plexrl.scheduler.service.journal.history.writer import HistoryWriter
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster

KEPT = KeptHistory(days=7.0, bytes_max=1 << 30)


class ArchivedCluster(FakeCluster):
    """Jobs `a` of tenant t and `b` of tenant u share a group of two GPUs."""

    def __init__(self, folder: Path, location: str = "", kept: KeptHistory = KEPT) -> None:
        super().__init__(policy="pack", residents_max=2)
        self.sql = SqlJournal(str(folder / "journal.db"))
        self.sql.acquire("test", 3600.0)
        self.archive = Archive(location or str(folder / "history"))
        self.kept = kept
        self.written = self.ran = 0
        self.start_node(2)
        for job, tenant in (("a", "t"), ("b", "u")):
            self.send(ev.TenantCreated(tenant=tenant, key_digest=tenant))
            self.job(job, tenant)
            self.deploy(f"{job}/actor")
        self.settle()
        self.begin()

    def begin(self) -> None:
        """A scheduler process begins to lead."""
        self.writer = HistoryWriter(
            self.archive, self.kept, self.sql, lambda: self.core, position=self.written
        )

    def work(self, count: int = 1) -> None:
        """Each job does so many operations in turn."""
        for _ in range(count):
            self.ran += 1
            for job in "ab":
                self.submit(f"{job}:{self.ran}", f"{job}/actor", "forward")
                self.pass_time(10.0)
                self.settle()

    def snapshot(self) -> None:
        """Write what happened to the journal, and a snapshot."""
        self.written = self.sql.append(self.journal[self.written :])
        self.sql.write_snapshot(self.written, self.now, self.core.dump())
        self.sql.compact(2, self.writer.deletable(self.written))

    def save(self) -> None:
        """Write a snapshot and the archive."""
        self.snapshot()
        asyncio.run(self.writer.archive_now())

    def reader(self, *, with_journal: bool = True) -> HistoryReader:
        """Reads the archive, and what only the journal has."""
        return HistoryReader(self.archive, self.sql if with_journal else None)
