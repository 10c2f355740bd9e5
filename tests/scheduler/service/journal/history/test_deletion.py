"""What a deletion of a tenant's history leaves, and what an interrupted one does."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from plexrl.errors import StorageFullError
from plexrl.ids import TenantId
from plexrl.scheduler.service.journal.history.archive import Archive
from plexrl.scheduler.service.journal.history.deletion import delete_tenant
from plexrl.scheduler.service.journal.history.event_files import decode_events, repack
from plexrl.scheduler.service.journal.history.pieces import EVENTS, ArchivePiece, unseal
from tests.scheduler.service.journal.history.archived_cluster import ArchivedCluster


def texts(cluster: ArchivedCluster) -> list[bytes]:
    """The bytes of all events."""
    found = [(each, cluster.archive.read(each)) for each in cluster.archive.pieces(EVENTS)]
    return [unseal(piece.name, content) for piece, content in found if content is not None]


def test_an_operation_that_is_reported_again_after_its_end_is_deleted_too(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.work()
    cluster.save()
    (piece,) = cluster.archive.pieces(EVENTS)
    content = cluster.archive.read(piece)
    assert content is not None
    rows = decode_events(piece, content)
    # As of a generation that was interrupted, or a late report of an earlier run.
    (at,) = (
        number
        for number, body in enumerate(rows.bodies)
        if '"OperationFinished"' in body and '"b:1"' in body
    )
    rows.bodies.append(rows.bodies[at])
    rows.times.append(rows.times[-1])
    cluster.archive.write(replace(piece, nbytes=0), repack(piece, rows))
    delete_tenant(cluster.archive, TenantId("u"))
    assert not any(b'"b:1"' in text for text in texts(cluster))
    assert any(b'"a:1"' in text for text in texts(cluster))


def test_the_end_of_an_operation_that_began_before_the_oldest_event_is_deleted(
    tmp_path: Path,
) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.submit("b:late", "b/actor", "forward")
    cluster.save()
    cluster.archive.delete(cluster.archive.pieces(EVENTS))
    cluster.pass_time(10.0)
    cluster.settle()
    cluster.save()
    assert any(b'"b:late"' in text for text in texts(cluster))
    delete_tenant(cluster.archive, TenantId("u"))
    assert not any(b'"b:late"' in text for text in texts(cluster))


class FailingArchive(Archive):
    """An archive of which only so many writes and deletions succeed."""

    left = 0

    def write(self, piece: ArchivePiece, content: bytes) -> None:
        self._count()
        super().write(piece, content)

    def delete(self, pieces: Sequence[ArchivePiece]) -> None:
        self._count()
        super().delete(pieces)

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise StorageFullError("the test's disk is full", retry_after_s=1.0)


@pytest.mark.parametrize("writes", range(6))
def test_a_deletion_that_was_interrupted_is_completed_by_the_next(
    tmp_path: Path, writes: int
) -> None:
    cluster = ArchivedCluster(tmp_path)
    for _ in range(3):
        cluster.work()
        cluster.save()
    archive = FailingArchive(str(tmp_path / "history"))
    archive.left = writes
    # The oldest events, with the submission of the job, are gone: snapshots alone name it.
    cluster.archive.delete(cluster.archive.pieces(EVENTS)[: writes % 2])
    with pytest.raises(StorageFullError):
        delete_tenant(archive, TenantId("u"))
    delete_tenant(cluster.archive, TenantId("u"))
    for piece in cluster.archive.pieces(EVENTS):
        content = cluster.archive.read(piece)
        assert content is not None
        assert b"b/actor" not in unseal(piece.name, content)
