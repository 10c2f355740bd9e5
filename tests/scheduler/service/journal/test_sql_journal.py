"""The journal's guarantees in each supported database."""

import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from plexrl.errors import (
    InvalidRequestError,
    JournalFullError,
    JournalUnavailableError,
    LeaseHeldError,
    LeaseLostError,
    StorageError,
)
from plexrl.scheduler.service.journal.journal import Journal
from plexrl.scheduler.service.journal.schema import HEAD
from plexrl.scheduler.service.journal.sql_journal import READ_PAGE, SqlJournal
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.postgres import PostgresServer

TTL_S = 3600.0

OLD_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE events (
    position INTEGER PRIMARY KEY, at REAL NOT NULL, body TEXT NOT NULL
) STRICT;
INSERT INTO meta VALUES ('schema', '1');
INSERT INTO events (at, body) VALUES
    (1.5, '{"type":"RouterJoined","router":"r0"}'), (2.5, '{"type":"TimerFired"}');
"""


def joined(*names: str) -> list[tuple[ev.Event, float]]:
    return [(ev.RouterJoined(router=name), float(at)) for at, name in enumerate(names)]


def routers(journal: Journal, after: int = 0) -> list[tuple[int, str]]:
    found = []
    for position, event, _ in journal.read(after):
        assert isinstance(event, ev.RouterJoined)
        found.append((position, str(event.router)))
    return found


def fill(journal: Journal, batch: list[tuple[ev.Event, float]]) -> None:
    for _ in range(1000):
        journal.append(batch)


def place_of(url: str) -> str:
    """The SQLAlchemy URL of a journal's database."""
    return url.replace("postgresql:", "postgresql+psycopg:") if "://" in url else f"sqlite:///{url}"


def execute(url: str, *statements: str) -> None:
    """Execute statements on a journal's database directly."""
    place = (
        url.replace("postgresql:", "postgresql+psycopg:") if "://" in url else f"sqlite:///{url}"
    )
    engine = sa.create_engine(place)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


@pytest.fixture
def open_journal(journal_url: str) -> Iterator[Callable[[str], SqlJournal]]:
    """Opens the journal; an empty holder does not take the lease."""
    opened = []

    def open_it(holder: str = "") -> SqlJournal:
        journal = SqlJournal(journal_url)
        opened.append(journal)
        if holder:
            journal.acquire(holder, TTL_S)
        return journal

    yield open_it
    for journal in opened:
        journal.close()


def test_appended_events_are_read_in_order(open_journal: Callable[[str], SqlJournal]) -> None:
    journal = open_journal("a")
    assert journal.append(joined("r1", "r2")) == 2
    assert journal.append(joined("r3")) == 3
    assert journal.append([]) == 3
    journal.close()
    again = open_journal("a")
    assert routers(again) == [(1, "r1"), (2, "r2"), (3, "r3")]
    assert routers(again, after=2) == [(3, "r3")]
    assert [at for _, _, at in again.read()] == [0.0, 1.0, 0.0]
    assert again.append(joined("r4")) == 4


def test_a_long_journal_is_read_whole(open_journal: Callable[[str], SqlJournal]) -> None:
    journal = open_journal("a")
    names = [f"r{index}" for index in range(2 * READ_PAGE)]
    journal.append(joined(*names))
    assert [name for _, name in routers(journal)] == names


def test_any_text_survives(open_journal: Callable[[str], SqlJournal]) -> None:
    journal = open_journal("a")
    names = ["", "\x00", "'; DROP TABLE events; --", '"\\', "\u00e4\u4e2d\U0001f600", "%s ? :x"]
    journal.append(joined(*names))
    assert [name for _, name in routers(journal)] == names


def test_a_batch_with_an_event_that_cannot_be_encoded_leaves_no_trace(
    open_journal: Callable[[str], SqlJournal],
) -> None:
    journal = open_journal("a")
    endless = ev.JobSubmitted(
        job="j", tenant="t", name="n", controller_timeout_s=float("inf"), reattach_timeout_s=1.0
    )
    with pytest.raises(InvalidRequestError, match="controller_timeout_s"):
        journal.append([*joined("r1"), (endless, 1.0)])
    assert list(journal.read()) == []


def test_a_batch_that_fails_halfway_leaves_no_trace(
    journal_url: str, open_journal: Callable[[str], SqlJournal]
) -> None:
    journal = open_journal("a")
    journal.append(joined("r1"))
    execute(journal_url, "INSERT INTO events (position, at, body) VALUES (3, 0.0, 'x')")
    with pytest.raises(StorageError):
        journal.append(joined("r2", "r3"))
    # The next append clears away whatever the core cannot know of.
    assert journal.append(joined("r4", "r5")) == 3
    assert routers(journal) == [(1, "r1"), (2, "r4"), (3, "r5")]


def test_a_full_file_refuses_until_its_limit_is_raised(tmp_path: Path) -> None:
    path = str(tmp_path / "journal.sqlite")
    with closing(SqlJournal(path, bytes_max=131_072)) as small:
        small.acquire("a", TTL_S)
        batch = joined(*(f"{index:>500}" for index in range(16)))
        with pytest.raises(JournalFullError, match="free disk space"):
            fill(small, batch)
        small.renew()
        accepted = len(list(small.read()))
        assert accepted > 0
        assert accepted % len(batch) == 0
    with closing(SqlJournal(path)) as roomy:
        roomy.acquire("a", TTL_S)
        assert roomy.append(batch) == accepted + len(batch)


def test_a_lost_connection_costs_one_refusal(postgres_server: PostgresServer) -> None:
    url = postgres_server.database()
    with closing(SqlJournal(url)) as journal:
        journal.acquire("a", TTL_S)
        journal.append(joined("r1"))
        execute(
            url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        with pytest.raises(JournalUnavailableError, match="does not answer"):
            journal.append(joined("r2"))
        assert journal.append(joined("r3")) == 2
        assert routers(journal) == [(1, "r1"), (2, "r3")]


def test_a_full_disk_of_the_server_is_named(postgres_server: PostgresServer) -> None:
    journal_url = postgres_server.database()
    with closing(SqlJournal(journal_url)) as journal:
        journal.acquire("a", TTL_S)
        execute(
            journal_url,
            "CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$",
            "CREATE TRIGGER full_disk BEFORE INSERT ON events EXECUTE FUNCTION fill()",
        )
        with pytest.raises(JournalFullError, match="free disk space"):
            journal.append(joined("r1"))
        execute(journal_url, "DROP TRIGGER full_disk ON events")
        assert journal.append(joined("r1")) == 1


def test_the_newest_snapshot_is_returned(open_journal: Callable[[str], SqlJournal]) -> None:
    journal = open_journal("a")
    assert journal.snapshot() is None
    journal.write_snapshot(3, 1.25, b"\x00three")
    journal.write_snapshot(7, 2.5, b"seven")
    assert journal.snapshot() == (7, 2.5, b"seven")
    assert journal.snapshot(before=7) == (3, 1.25, b"\x00three")
    assert journal.snapshot(before=3) is None
    journal.write_snapshot(7, 2.5, b"seven again")
    assert journal.snapshot() == (7, 2.5, b"seven again")


@pytest.mark.parametrize(
    "damage", ["body = body || body", "position = 8", "at = 9.0", "digest = 'x'"]
)
def test_a_damaged_snapshot_is_ignored(
    journal_url: str, open_journal: Callable[[str], SqlJournal], damage: str
) -> None:
    journal = open_journal("a")
    journal.write_snapshot(3, 1.0, b"three")
    journal.write_snapshot(7, 2.0, b"seven")
    if "://" not in journal_url:
        damage = damage.replace("body || body", "CAST('x' AS BLOB)")
    execute(journal_url, f"UPDATE snapshots SET {damage} WHERE position = 7")
    assert journal.snapshot() == (3, 1.0, b"three")
    execute(journal_url, "UPDATE snapshots SET digest = 'x'")
    assert journal.snapshot() is None


def test_compaction_keeps_what_the_older_of_two_snapshots_lacks(
    open_journal: Callable[[str], SqlJournal],
) -> None:
    journal = open_journal("a")
    journal.append(joined("r1", "r2", "r3", "r4"))
    journal.compact()
    journal.write_snapshot(1, 0.0, b"one")
    journal.compact()
    assert len(routers(journal)) == 4
    journal.write_snapshot(2, 0.0, b"two")
    journal.write_snapshot(3, 0.0, b"three")
    journal.compact()
    assert routers(journal) == [(3, "r3"), (4, "r4")]
    assert journal.snapshot(before=3) == (2, 0.0, b"two")
    assert journal.snapshot(before=2) is None


def test_positions_continue_after_a_full_compaction(
    open_journal: Callable[[str], SqlJournal],
) -> None:
    journal = open_journal("a")
    journal.append(joined("r1", "r2"))
    journal.write_snapshot(1, 0.0, b"")
    journal.write_snapshot(2, 0.0, b"")
    journal.append(joined("r3"))
    journal.write_snapshot(3, 0.0, b"")
    journal.write_snapshot(4, 0.0, b"ahead")
    journal.compact()
    assert routers(journal) == []
    journal.close()
    assert open_journal("a").append(joined("r5")) == 5


def test_a_held_lease_is_refused_by_name_and_free_when_released(
    open_journal: Callable[[str], SqlJournal],
) -> None:
    first, second = open_journal("a"), open_journal("")
    with pytest.raises(LeaseHeldError, match="'a'") as caught:
        second.acquire("b", TTL_S)
    assert caught.value.details["holder"] == "a"
    first.release()
    assert second.acquire("b", TTL_S) == 2


def test_an_expired_lease_is_free(open_journal: Callable[[str], SqlJournal]) -> None:
    first, second = open_journal(""), open_journal("")
    assert first.acquire("a", -1.0) == 1
    assert second.acquire("b", TTL_S) == 2
    with pytest.raises(LeaseHeldError):
        first.acquire("a", TTL_S)


def test_a_holder_of_the_same_name_takes_over_at_once(
    open_journal: Callable[[str], SqlJournal],
) -> None:
    first, second = open_journal("a"), open_journal("a")
    with pytest.raises(LeaseLostError):
        first.renew()
    second.renew()


def test_a_scheduler_that_lost_the_lease_writes_nothing(
    open_journal: Callable[[str], SqlJournal],
) -> None:
    first = open_journal("")
    first.acquire("a", -1.0)
    first.append(joined("r1"))
    # Expired, but nobody took it: harmless.
    first.renew()
    first.acquire("a", -1.0)
    second = open_journal("b")
    second.append(joined("r2"))
    with pytest.raises(LeaseLostError, match="led by 'b'"):
        first.append(joined("r3"))
    with pytest.raises(LeaseLostError):
        first.write_snapshot(1, 0.0, b"")
    with pytest.raises(LeaseLostError):
        first.compact()
    with pytest.raises(LeaseLostError):
        first.renew()
    first.release()
    second.renew()
    assert routers(second) == [(1, "r1"), (2, "r2")]
    assert second.snapshot() is None


def test_an_append_during_a_takeover_writes_nothing(
    journal_url: str, open_journal: Callable[[str], SqlJournal]
) -> None:
    journal = open_journal("a")
    engine = sa.create_engine(place_of(journal_url))
    with ThreadPoolExecutor(1) as pool:
        with engine.begin() as taking_over:
            taking_over.exec_driver_sql("UPDATE lease SET epoch = epoch + 1, holder = 'b'")
            appending = pool.submit(journal.append, joined("r1"))
            # It waits for the row, or for the file; it must not take the epoch of before as good.
            finished, _ = wait([appending], timeout=0.2)
            assert not finished
        with pytest.raises(LeaseLostError, match="led by 'b'"):
            appending.result()
    engine.dispose()
    assert list(journal.read()) == []


def test_nothing_is_written_without_a_lease(open_journal: Callable[[str], SqlJournal]) -> None:
    journal = open_journal("")
    with pytest.raises(LeaseLostError):
        journal.append(joined("r1"))
    assert list(journal.read()) == []


def test_a_closed_journal_says_so(open_journal: Callable[[str], SqlJournal]) -> None:
    journal = open_journal("a")
    journal.close()
    with pytest.raises(StorageError, match="is closed"):
        journal.append(joined("r1"))


def test_a_file_older_than_the_migrations_is_upgraded_in_place(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(sqlite3.connect(path)) as old:
        old.executescript(OLD_SCHEMA)
    for _ in range(2):
        with closing(SqlJournal(str(path))) as journal:
            events = list(journal.read())
            assert events[:2] == [(1, ev.RouterJoined(router="r0"), 1.5), (2, ev.TimerFired(), 2.5)]
            journal.acquire("a", TTL_S)
            assert journal.append(joined("r1")) == len(events) + 1
    with closing(sqlite3.connect(path)) as upgraded:
        assert upgraded.execute("SELECT version_num FROM alembic_version").fetchone() == (HEAD,)
        assert upgraded.execute("SELECT value FROM meta").fetchall() == [("2",)]


def test_a_newer_schema_is_refused(
    journal_url: str, open_journal: Callable[[str], SqlJournal]
) -> None:
    open_journal("a").close()
    execute(journal_url, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StorageError, match="schema 9999; this version reads up to"):
        open_journal("")


def test_a_newer_schema_without_migrations_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(sqlite3.connect(path)) as old:
        old.executescript(OLD_SCHEMA.replace("('schema', '1')", "('schema', '7')"))
    with pytest.raises(StorageError, match="schema 7"):
        SqlJournal(str(path))


def test_the_newest_revision_is_the_one_this_version_knows() -> None:
    from alembic.script import ScriptDirectory

    import plexrl.scheduler.service.journal.migrations as migrations

    folder = Path(migrations.__file__).parent
    assert ScriptDirectory(str(folder)).get_current_head() == HEAD


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_text("not a database, but long enough to be taken for one" * 100)
    with pytest.raises(StorageError, match="cannot be used"):
        SqlJournal(str(path))


@pytest.mark.parametrize("url", ["mysql://host/name", "://host", "sqlite://"])
def test_an_unsupported_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="journal"):
        SqlJournal(url)


def test_messages_hide_passwords() -> None:
    pytest.importorskip("psycopg", reason="a journal in PostgreSQL needs the extra `postgres`")
    with pytest.raises(StorageError) as caught:
        SqlJournal("postgresql://user:hush@localhost:1/name")
    assert "hush" not in str(caught.value)
    assert "hush" not in str(caught.value.details)


def test_opening_waits_for_a_process_that_creates_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with (
        closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        other.execute("CREATE TABLE meanwhile (x)")
        other.execute("BEGIN IMMEDIATE")
        opening = pool.submit(SqlJournal, str(path))
        done, _ = wait([opening], timeout=0.2)
        other.execute("ROLLBACK")
        with closing(opening.result()):
            assert not done
