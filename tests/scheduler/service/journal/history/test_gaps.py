"""What the history does not have is not read as if nothing had happened."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from plexrl.errors import NotFoundError, StorageError
from plexrl.scheduler.service.journal.history.event_files import decode_events, repack
from plexrl.scheduler.service.journal.history.pieces import (
    EVENTS,
    STATE,
)
from tests.scheduler.service.journal.history.archived_cluster import ArchivedCluster

LATER = 1e9


def two_journals(folder: Path) -> tuple[ArchivedCluster, ArchivedCluster]:
    """A cluster whose history is archived, and one with a new journal in its place."""
    for name in ("one", "two"):
        (folder / name).mkdir()
    location = str(folder / "history")
    former = ArchivedCluster(folder / "one", location)
    former.work(2)
    former.save()
    return former, ArchivedCluster(folder / "two", location)


def test_a_replay_does_not_end_early_where_the_last_piece_is_damaged(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    for _ in range(2):
        cluster.work()
        cluster.save()
    first, second = cluster.archive.pieces(EVENTS)
    path = tmp_path / "history" / second.name
    path.write_bytes(path.read_bytes()[:-1])
    replay = cluster.reader(with_journal=False).replay(cluster.config, 0.0, LATER)
    with pytest.raises(NotFoundError, match=f"no events {second.first} to {second.last}"):
        list(replay.events)
    earlier = cluster.reader(with_journal=False).replay(cluster.config, 0.0, first.end - 0.5)
    assert 0 < len(list(earlier.events)) < first.last


def test_a_replay_does_not_end_early_where_the_last_events_were_deleted(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.save()
    since = cluster.now + 0.5
    cluster.work()
    cluster.save()
    for state in cluster.archive.pieces(STATE)[1:]:
        cluster.archive.delete([state])
    (_, piece) = cluster.archive.pieces(EVENTS)
    content = cluster.archive.read(piece)
    assert content is not None
    rows = decode_events(piece, content)
    rows.bodies[-1] = ""
    cluster.archive.write(piece, repack(piece, rows))
    replay = cluster.reader(with_journal=False).replay(cluster.config, since, LATER)
    with pytest.raises(NotFoundError, match=f"no events {piece.last} to {piece.last}"):
        list(replay.events)


def test_a_new_journal_is_read_before_anything_of_it_is_archived(tmp_path: Path) -> None:
    former, cluster = two_journals(tmp_path)
    cluster.sql.append(cluster.journal)
    assert len(cluster.journal) < len(former.journal)
    found = [(each.event, each.at) for each in cluster.reader().entries(0.0, LATER)]
    assert found == former.journal + cluster.journal
    replay = cluster.reader().replay(cluster.config, LATER, LATER)
    assert replay.core.dump() == cluster.core.dump()


def test_a_new_journal_that_was_not_archived_at_first_begins_a_series_too(tmp_path: Path) -> None:
    former, cluster = two_journals(tmp_path)
    cluster.pass_time(0.5)
    cluster.work(5)
    assert len(cluster.journal) > len(former.journal)
    cluster.snapshot()
    cluster.begin()
    asyncio.run(cluster.writer.archive_now())
    assert {piece.series for piece in cluster.archive.pieces(EVENTS)} == {0, 1}
    found = cluster.reader(with_journal=False).entries(0.0, LATER)
    assert [(each.event, each.at) for each in found] == former.journal + cluster.journal


def test_no_replay_begins_with_a_snapshot_of_the_same_millisecond(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.pass_time(0.0004)
    cluster.work()
    cluster.save()
    (state,) = cluster.archive.pieces(STATE)
    since = cluster.journal[-1][1] - 1e-6
    assert state.begin < since
    replay = cluster.reader(with_journal=False).replay(cluster.config, since, LATER)
    assert list(replay.events) == [(at, event) for event, at in cluster.journal if at >= since]


def test_an_event_of_another_version_is_named(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.save()
    (piece,) = cluster.archive.pieces(EVENTS)
    content = cluster.archive.read(piece)
    assert content is not None
    rows = decode_events(piece, content)
    rows.bodies[2] = '{"type": "FromTheFuture"}'
    cluster.archive.write(replace(piece, nbytes=0), repack(piece, rows))
    with pytest.raises(StorageError, match="event 3 of the history cannot be read"):
        list(cluster.reader(with_journal=False).entries(0.0, LATER))
