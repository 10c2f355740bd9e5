"""What a snapshot replaces is in the archive first, and can be read as it happened."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from plexrl.errors import NotFoundError, StorageError, StorageFullError
from plexrl.ids import GroupId, JobId, TenantId
from plexrl.scheduler.service.journal.history.archive import Archive, KeptHistory, expired
from plexrl.scheduler.service.journal.history.deletion import delete_tenant
from plexrl.scheduler.service.journal.history.pieces import (
    EVENTS,
    RUNS,
    STATE,
    ArchivePiece,
    new_piece,
    parse,
    unseal,
)
from plexrl.scheduler.service.journal.history.reading import handle
from plexrl.scheduler.service.journal.history.writer import HELD_EVENTS_MAX, HistoryWriter
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages.overview_views import SWITCH, WORK
from tests.scheduler.live_service import until
from tests.scheduler.service.journal.history.archived_cluster import KEPT, ArchivedCluster
from tests.small_disk import small_disk

LATER = 1e9


def plain(core: object) -> object:
    dump = core.dump()  # type: ignore[attr-defined]
    return msgspec.msgpack.decode(dump)


def archived(cluster: ArchivedCluster) -> list[tuple[ev.Event, float]]:
    reader = cluster.reader(with_journal=False)
    return [(entry.event, entry.at) for entry in reader.entries(0.0, LATER)]


def test_the_archive_has_every_event_before_the_journal_loses_it(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    for _ in range(4):
        cluster.work(3)
        cluster.save()
    assert archived(cluster) == cluster.journal
    (first, _, _), *_ = cluster.sql.rows(0, 1)
    assert first > 1
    assert cluster.archive.pieces(EVENTS)[0].first == 1


def test_events_that_are_not_archived_yet_are_read_from_the_journal(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.save()
    cluster.work(2)
    cluster.sql.append(cluster.journal[cluster.written :])
    found = list(cluster.reader().entries(0.0, LATER))
    assert [(entry.event, entry.at) for entry in found] == cluster.journal
    assert [entry.position for entry in found] == list(range(1, len(cluster.journal) + 1))


def test_a_replay_from_an_archived_snapshot_ends_in_the_same_state(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    middle = 0.0
    for number in range(4):
        cluster.work(2)
        cluster.save()
        if number == 1:
            before, middle = plain(cluster.core), cluster.now + 0.5
            cluster.pass_time(1.0)
    (first, *_) = cluster.archive.pieces(STATE)
    assert first.end < middle
    replay = cluster.reader(with_journal=False).replay(cluster.config, middle, LATER)
    assert plain(replay.core) == before
    count = sum(1 for _ in replay.run())
    assert count == sum(at >= middle for _, at in cluster.journal)
    assert plain(replay.core) == plain(cluster.core)


def test_a_replay_begins_at_the_beginning_if_there_is_no_snapshot_before(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.work(2)
    cluster.save()
    replay = cluster.reader(with_journal=False).replay(cluster.config, 0.0, LATER)
    assert replay.at == 0.0
    assert list(replay.events) == [(at, event) for event, at in cluster.journal]


def test_a_failing_archive_keeps_events_in_the_journal_and_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "history").write_text("no folder")
    cluster = ArchivedCluster(tmp_path)
    for _ in range(3):
        cluster.work()
        with pytest.raises(StorageError, match="check its disk"):
            cluster.save()
    assert cluster.sql.rows(0, 1)[0][0] == 1
    (tmp_path / "history").unlink()
    asyncio.run(cluster.writer.archive_now())
    assert archived(cluster) == cluster.journal
    assert cluster.sql.rows(0, 1)[0][0] > 1


def test_the_condition_of_a_failing_archive_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "history").write_text("no folder")
    cluster = ArchivedCluster(tmp_path)
    cluster.snapshot()
    writer = HistoryWriter(
        cluster.archive, KEPT, cluster.sql, lambda: cluster.core, position=0, retry_s=0.01
    )

    async def run() -> None:
        running = asyncio.create_task(writer.run())
        await until(lambda: writer.condition() is not None)
        held = writer.condition()
        assert held is not None
        assert held.code == "history_behind"
        (tmp_path / "history").unlink()
        await until(lambda: writer.condition() is None)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    assert archived(cluster) == cluster.journal


def test_a_journal_is_shortened_rather_than_grow_without_end(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    assert cluster.writer.deletable(HELD_EVENTS_MAX) == 0
    assert cluster.writer.deletable(HELD_EVENTS_MAX + 1) is None


def test_a_full_disk_of_the_archive_is_a_condition_only(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "4m") as disk:
        cluster = ArchivedCluster(tmp_path, str(disk.path / "history"))
        cluster.save()
        disk.fill()
        cluster.work(2)
        with pytest.raises(StorageFullError, match="no space"):
            cluster.save()
        disk.free()
        asyncio.run(cluster.writer.archive_now())
        assert archived(cluster) == cluster.journal


def test_what_a_killed_process_left_half_written_is_never_read(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.work()
    cluster.save()
    folder = tmp_path / "history"
    (piece,) = cluster.archive.pieces(EVENTS)
    half = folder / f"{piece.name}.part"
    half.write_bytes((folder / piece.name).read_bytes()[:100])
    other = folder / "notes.part"
    other.write_text("not of the archive")
    assert archived(cluster) == cluster.journal
    cluster.work()
    cluster.begin()
    cluster.save()
    assert archived(cluster) == cluster.journal
    assert (half.exists(), other.exists()) == (False, True)


def test_a_damaged_piece_is_missing_and_the_rest_is_read(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    for _ in range(3):
        cluster.work()
        cluster.save()
    first, second, third = cluster.archive.pieces(EVENTS)
    path = tmp_path / "history" / second.name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    known = cluster.journal[: first.last] + cluster.journal[third.first - 1 :]
    assert archived(cluster) == known
    for state in cluster.archive.pieces(STATE):
        cluster.archive.delete([state])
    replay = cluster.reader(with_journal=False).replay(cluster.config, 0.0, LATER)
    with pytest.raises(NotFoundError, match=f"no events {second.first} to {second.last}"):
        list(replay.events)


def test_a_new_process_goes_on_where_the_archive_ends(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.work()
    cluster.save()
    cluster.work()
    cluster.snapshot()
    cluster.begin()
    asyncio.run(cluster.writer.archive_now())
    assert archived(cluster) == cluster.journal
    assert {piece.series for piece in cluster.archive.pieces()} == {0}
    ends = [(piece.first, piece.last) for piece in cluster.archive.pieces(RUNS)]
    assert [last + 1 for _, last in ends[:-1]] == [first for first, _ in ends[1:]]


def test_a_new_journal_begins_a_series_of_its_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    location = str(tmp_path / "history")
    former = ArchivedCluster(tmp_path / "one", location)
    former.work(5)
    former.save()
    cluster = ArchivedCluster(tmp_path / "two", location)
    cluster.written = 0
    cluster.begin()
    cluster.work()
    cluster.save()
    assert {piece.series for piece in cluster.archive.pieces(EVENTS)} == {0, 1}
    assert archived(cluster) == former.journal + cluster.journal


def test_archived_runs_are_those_of_the_operations(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.work(3)
    cluster.save()
    found = cluster.reader().runs(0.0, LATER, 0.0)
    state = cluster.core.cluster.state
    ran = [op for op in state.operations.values() if op.started_at is not None]
    assert len(found.runs) == len(ran) > 6
    assert {(run.job.job, run.kind) for run in found.runs if run.job is not None} >= {
        (JobId("a"), WORK),
        (JobId("b"), SWITCH),
    }
    own = cluster.reader().runs(0.0, LATER, 0.0, TenantId("u"))
    assert 0 < len(own.runs) < len(found.runs)
    assert {run.job and run.job.tenant for run in own.runs} == {"u"}
    assert cluster.reader().runs(0.0, LATER, 0.0, TenantId("nobody")).runs == []
    assert {run.group.gpus for run in found.runs} == {2}


def test_a_spanning_run_is_on_the_groups_of_its_time(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.work()
    state = cluster.core.cluster.state
    last = state.operations[state.finished[state.finished_count]]
    last.also_on = (GroupId("other"),)
    cluster.save()
    groups = {run.group.group: run for run in cluster.reader().runs(0.0, LATER, 0.0).runs}
    assert set(groups) == {last.group, GroupId("other")}
    gone = groups[GroupId("other")]
    # Nobody remembers a group that is gone: it has the deployment's part of GPUs.
    assert (gone.group.gpus, gone.begin) == (1, last.started_at)


def test_a_tenants_history_is_deleted_and_that_of_others_stays(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    for _ in range(3):
        cluster.work(2)
        cluster.save()
    events = archived(cluster)
    deleted = delete_tenant(cluster.archive, TenantId("u"))
    assert deleted.events > 10
    assert (deleted.runs > 0, deleted.snapshots > 0) == (True, True)
    assert deleted.damaged == []
    for piece in cluster.archive.pieces(EVENTS):
        content = cluster.archive.read(piece)
        assert content is not None
        text = unseal(piece.name, content)
        assert b'"b:' not in text
        assert b"b/actor" not in text
        assert b'"u"' not in text
    rest = archived(cluster)
    assert rest == [each for each in events if each in rest]
    own = [event for event, _ in events if getattr(event, "deployment", "") == "a/actor"]
    assert [event for event, _ in rest if getattr(event, "deployment", "") == "a/actor"] == own
    assert cluster.reader(with_journal=False).runs(0.0, LATER, 0.0, TenantId("u")).runs == []
    assert cluster.reader(with_journal=False).runs(0.0, LATER, 0.0, TenantId("t")).runs
    replay = cluster.reader(with_journal=False).replay(cluster.config, 0.0, LATER)
    with pytest.raises(NotFoundError):
        list(replay.events)
    again = delete_tenant(cluster.archive, TenantId("u"))
    assert (again.events, again.runs, again.snapshots) == (0, 0, 0)


def test_the_oldest_pieces_go_first_at_either_bound() -> None:
    def piece(number: int, nbytes: int) -> ArchivePiece:
        made = new_piece(EVENTS, 0, number, number, number * 86_400.0, (number + 1) * 86_400.0)
        found = parse(made.name, nbytes)
        assert found is not None
        return found

    pieces = [piece(number, 100) for number in range(10)]
    now = 10 * 86_400.0
    by_age = expired(pieces, KeptHistory(days=7.0, bytes_max=10_000), now, 0)
    assert by_age == pieces[:2]
    by_bytes = expired(reversed(pieces), KeptHistory(days=70.0, bytes_max=750), now, 100)
    assert by_bytes == pieces[:4]
    assert expired(pieces, KeptHistory(days=70.0, bytes_max=1_100), now, 100) == []


def test_pieces_beyond_the_bytes_are_deleted_before_more_is_written(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path, kept=KeptHistory(days=7.0, bytes_max=15_000))
    for _ in range(30):
        cluster.work()
        cluster.save()
    pieces = cluster.archive.pieces()
    assert sum(piece.nbytes for piece in pieces) <= 15_000
    assert cluster.archive.pieces(EVENTS)[0].first > 1
    known = archived(cluster)
    assert known == cluster.journal[-len(known) :]


@pytest.mark.parametrize("name", ["events-0-1-2-3-4", "journal.db", "events", ""])
def test_other_files_are_no_pieces(name: str) -> None:
    assert parse(name, 1) is None


def test_an_archive_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path / "none"))
    assert archive.pieces() == []
    assert not (tmp_path / "none").exists()


def test_a_journal_of_which_nothing_is_archived_is_replayed_alone(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.work()
    cluster.sql.append(cluster.journal)
    replay = cluster.reader().replay(cluster.config, 0.0, LATER)
    for entry in replay.entries:
        handle(replay.core, entry)
    assert plain(replay.core) == plain(cluster.core)
    assert isinstance(cluster.sql, SqlJournal)
