"""A scheduler whose journal rejects events pauses: nothing fails, and work continues later."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from plexrl.errors import JournalFullError, JournalUnavailableError, PlexRLError, StorageError
from plexrl.scheduler.__main__ import EXIT_LEASE_LOST
from plexrl.scheduler.service.journal.database import open_database
from plexrl.scheduler.service.journal.schema import LEASES
from tests.scheduler.postgres import PostgresServer, server_folder
from tests.scheduler.scheduler_process import SchedulerProcess, job_params
from tests.small_disk import SmallDisk, small_disk

WAIT_S = 60.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", "4m") as made:
        yield made


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server that a test may stop."""
    binaries = server_folder()
    if binaries is None:
        pytest.skip("no PostgreSQL server is installed (initdb was not found)")
    server = PostgresServer(binaries)
    yield server
    server.close()


def stop_outside_of_transactions(process: SchedulerProcess, url: str) -> None:
    """A process that is stopped in a write to SQLite keeps the database locked."""
    while True:
        process.send(signal.SIGSTOP)
        try:
            lease_has_expired(url)
        except sa.exc.OperationalError:
            process.send(signal.SIGCONT)
        else:
            return


@contextmanager
def scheduler(folder: Path, journal: str, **changes: Any) -> Iterator[SchedulerProcess]:
    process = SchedulerProcess(folder, "a", journal, **changes)
    try:
        yield process
    finally:
        process.close()


async def until(ask: Callable[[], Awaitable[bool]], process: SchedulerProcess) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await ask():
            assert process.process.poll() is None, process.log
            await asyncio.sleep(0.05)


async def codes(process: SchedulerProcess) -> list[str]:
    """Of the conditions that hold the scheduler."""
    async with process.connected("looks") as peer:
        answer = await peer.call("conditions")
        return [each["code"] for each in answer["conditions"]]


async def held_then_taken_in(
    process: SchedulerProcess, refusal: type[StorageError], make_room: Callable[[], None]
) -> None:
    """Requests are refused with `refusal`; the same ones are taken in after `make_room`."""
    async with process.connected() as peer:
        waits: list[object] = []

        async def is_refused() -> bool:
            try:
                await peer.call("submit_job", job_params("j"))
            except refusal as error:
                waits.append(error.details["retry_after_s"])
            return bool(waits)

        await until(is_refused, process)
        assert all(isinstance(seconds, float) and seconds > 0 for seconds in waits)
        assert await codes(process) == [refusal.code]
        # What has happened is kept, though nobody can be told that it is safe yet.
        joining = asyncio.create_task(peer.call("operation_failed", failed("o"), timeout_s=WAIT_S))
        make_room()

        async def is_accepted() -> bool:
            try:
                await peer.call("submit_job", job_params("j"))
            except StorageError:
                return False
            return True

        await until(is_accepted, process)
        await joining
        assert await codes(process) == []


def failed(operation: str) -> dict[str, Any]:
    error = {"code": "internal", "message": "m", "details": {}}
    return {"operation": operation, "token": 1, "error": error, "state_intact": True}


@pytest.mark.slow
def test_a_full_disk_holds_requests_and_keeps_reports(tmp_path: Path, disk: SmallDisk) -> None:
    with scheduler(tmp_path, str(disk.path / "journal.sqlite")) as process:
        process.wait_ready()
        disk.fill()
        # What the journal has of room in files that it made before is used up first.
        asyncio.run(use_up(process))
        asyncio.run(held_then_taken_in(process, JournalFullError, disk.free))
        assert "Traceback" not in process.log


async def use_up(process: SchedulerProcess) -> None:
    async with process.connected() as peer:
        for index in range(10_000):
            try:
                await peer.call("submit_job", job_params(f"filler-{index}", name="n" * 200))
            except PlexRLError:
                return
    raise AssertionError("the disk is not full")


def test_a_scheduler_starts_on_a_full_disk_and_goes_on_when_there_is_room(
    tmp_path: Path, disk: SmallDisk
) -> None:
    path = str(disk.path / "journal.sqlite")
    with scheduler(tmp_path, path) as process:
        process.wait_ready()
        asyncio.run(process.submit_job("before"))
        process.send(signal.SIGKILL)
        process.wait_end()
    disk.fill()
    with scheduler(tmp_path, path) as process:
        process.wait_ready()
        asyncio.run(until(lambda: has_conditions(process), process))
        assert asyncio.run(codes(process)) == ["journal_full"]
        with pytest.raises(JournalFullError):
            asyncio.run(process.submit_job("j"))
        disk.free()
        asyncio.run(until(lambda: has_no_conditions(process), process))
        asyncio.run(process.submit_job("j"))
        assert asyncio.run(process.jobs()) == ["before", "j"]
        assert "Traceback" not in process.log


@pytest.mark.parametrize("is_first", [False, True])
def test_a_scheduler_starts_on_a_read_only_disk_and_goes_on_when_it_is_mended(
    tmp_path: Path, disk: SmallDisk, is_first: bool
) -> None:
    path = str(disk.path / "folder" / "journal.sqlite")
    if not is_first:
        with scheduler(tmp_path, path) as process:
            process.wait_ready()
            asyncio.run(process.submit_job("before"))
            process.send(signal.SIGKILL)
            process.wait_end()
    disk.make_read_only()
    with scheduler(tmp_path, path) as process:
        process.wait_ready()
        asyncio.run(until(lambda: has_conditions(process), process))
        assert asyncio.run(codes(process)) == ["journal_unavailable"]
        with pytest.raises(JournalUnavailableError):
            asyncio.run(process.submit_job("j"))
        disk.make_writable()
        asyncio.run(until(lambda: has_no_conditions(process), process))
        asyncio.run(process.submit_job("j"))
        assert asyncio.run(process.jobs()) == ([] if is_first else ["before"]) + ["j"]
        assert "Traceback" not in process.log


def test_a_first_start_on_a_full_disk_waits_for_room(tmp_path: Path, disk: SmallDisk) -> None:
    disk.fill()
    with scheduler(tmp_path, str(disk.path / "journal.sqlite")) as process:
        process.wait_ready()
        assert asyncio.run(codes(process)) == ["journal_full"]
        disk.free()
        asyncio.run(until(lambda: has_no_conditions(process), process))
        asyncio.run(process.submit_job("j"))
        assert asyncio.run(process.jobs()) == ["j"]


async def has_conditions(process: SchedulerProcess) -> bool:
    return bool(await codes(process))


async def has_no_conditions(process: SchedulerProcess) -> bool:
    try:
        return not await codes(process)
    except (PlexRLError, OSError):
        # Between the socket of a scheduler that holds and that of one that serves.
        return False


def test_a_database_that_is_away_holds_requests(
    tmp_path: Path, own_postgres: PostgresServer
) -> None:
    with scheduler(tmp_path, own_postgres.database()) as process:
        process.wait_ready()
        asyncio.run(process.submit_job("before"))
        own_postgres.stop()
        asyncio.run(held_then_taken_in(process, JournalUnavailableError, own_postgres.start))
        assert asyncio.run(process.jobs()) == ["before", "j"]
        assert process.process.poll() is None
        assert "Traceback" not in process.log


def test_a_scheduler_starts_without_its_database_and_goes_on_when_it_is_there(
    tmp_path: Path, own_postgres: PostgresServer
) -> None:
    url = own_postgres.database()
    own_postgres.stop()
    with scheduler(tmp_path, url) as process:
        process.wait_ready()
        assert asyncio.run(codes(process)) == ["journal_unavailable"]
        own_postgres.start()
        asyncio.run(until(lambda: has_no_conditions(process), process))
        asyncio.run(process.submit_job("j"))


def test_a_database_that_does_not_exist_is_no_reason_to_wait(
    tmp_path: Path, own_postgres: PostgresServer
) -> None:
    url = own_postgres.database().replace("/journal1", "/nothing")
    with scheduler(tmp_path, url) as process:
        assert process.wait_end() == 1
        assert "nothing" in process.log


def test_a_silent_database_holds_requests_and_what_was_asked_is_done_once(
    tmp_path: Path, own_postgres: PostgresServer
) -> None:
    with scheduler(tmp_path, own_postgres.database()) as process:
        process.wait_ready()

        async def ask() -> None:
            async with process.connected() as peer:
                own_postgres.send(signal.SIGSTOP)
                first = asyncio.create_task(
                    peer.call("submit_job", job_params("j"), timeout_s=WAIT_S)
                )
                await until(lambda: has_conditions(process), process)
                with pytest.raises(JournalUnavailableError, match="has not answered"):
                    await peer.call("submit_job", job_params("k"))
                own_postgres.send(signal.SIGCONT)
                await first
                await until(lambda: has_no_conditions(process), process)
                await peer.call("submit_job", job_params("j"))

        asyncio.run(ask())
        assert asyncio.run(process.jobs()) == ["j"]
        assert process.process.poll() is None


def test_a_journal_at_its_bound_makes_room_by_a_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    bound = 100_000
    with scheduler(tmp_path, str(path), journal_bytes_max=bound) as process:
        process.wait_ready()

        async def ask() -> None:
            async with process.connected() as peer:
                refusals = 0
                for index in range(2000):
                    async with asyncio.timeout(WAIT_S):
                        while True:
                            try:
                                call = {"job": "j", "tenant": "operator"}
                                if not index:
                                    await peer.call("submit_job", job_params("j"))
                                await peer.call("heartbeat", {**call, "job": "j"})
                                break
                            except JournalFullError as error:
                                refusals += 1
                                await asyncio.sleep(float(str(error.details["retry_after_s"])))
                assert refusals, "the bound was never reached"

        asyncio.run(ask())
        assert asyncio.run(codes(process)) == []
        assert asyncio.run(process.jobs()) == ["j"]
        assert path.stat().st_size < 2 * bound
        process.send(signal.SIGKILL)
        process.wait_end()
    with scheduler(tmp_path, str(path), journal_bytes_max=bound) as process:
        process.wait_ready()
        assert asyncio.run(process.jobs()) == ["j"]


def test_a_leader_without_a_rival_goes_on_with_an_expired_lease(
    tmp_path: Path, journal_url: str
) -> None:
    with scheduler(tmp_path, journal_url, lease_s=0.5) as process:
        process.wait_ready()
        first = lease_expires_at(journal_url)

        async def is_renewed() -> bool:
            return await asyncio.to_thread(lease_expires_at, journal_url) != first

        # From its first renewal on, the scheduler itself sees how long its lease lasts.
        asyncio.run(until(is_renewed, process))
        stop_outside_of_transactions(process, journal_url)

        # Longer than the lease lasts, by the only clock that counts for it.
        asyncio.run(until(lambda: asyncio.to_thread(lease_has_expired, journal_url), process))
        process.send(signal.SIGCONT)
        asyncio.run(process.wait_log("no scheduler had taken it"))
        asyncio.run(process.submit_job("j"))
        assert process.process.poll() is None


def test_a_leader_without_its_database_leads_until_another_listens_at_its_address(
    tmp_path: Path, own_postgres: PostgresServer
) -> None:
    with scheduler(tmp_path, own_postgres.database(), lease_s=0.5) as process:
        process.wait_ready()
        own_postgres.stop()
        try:
            asyncio.run(process.wait_log("has expired: it could not be renewed"))
            assert process.process.poll() is None
            Path(process.listen).unlink()
            with socket.socket(socket.AF_UNIX) as successor:
                successor.bind(process.listen)
                successor.listen()
                assert process.wait_end() == EXIT_LEASE_LOST
            assert "another scheduler listens at this address" in process.log
        finally:
            own_postgres.start()


def lease_expires_at(url: str) -> object:
    database = open_database(url, None)
    try:
        with database.engine.begin() as connection:
            return connection.execute(sa.select(LEASES.c.expires_at)).scalar_one()
    finally:
        database.engine.dispose()


def lease_has_expired(url: str) -> bool:
    database = open_database(url, None)
    try:
        with database.engine.begin() as connection:
            asked = sa.select((LEASES.c.expires_at < database.now()).label("expired"))
            return bool(connection.execute(asked).scalar_one())
    finally:
        database.engine.dispose()
