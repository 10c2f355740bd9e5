"""Two scheduler processes on one journal: one leads, and its accepted events survive it."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.scheduler.__main__ import EXIT_LEASE_LOST
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from tests.scheduler.scheduler_process import SchedulerProcess, job_params

Start = Callable[..., SchedulerProcess]
LONG_S = 3600.0
"""A lease that does not run out on a busy machine."""


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory, journal_url: str) -> Iterator[Start]:
    """Starts schedulers on the one journal."""
    # Paths of sockets are short.
    folder = tmp_path_factory.mktemp("s")
    begun = []

    def start_it(name: str, **changes: object) -> SchedulerProcess:
        begun.append(SchedulerProcess(folder, name, journal_url, **changes))
        return begun[-1]

    yield start_it
    for scheduler in begun:
        scheduler.close()


def test_a_standby_takes_over_from_a_killed_leader(start: Start, journal_url: str) -> None:
    leader = start("a", lease_s=LONG_S)
    leader.wait_ready()
    asyncio.run(leader.submit_job("j1"))
    standby = start("b", lease_s=LONG_S)
    asyncio.run(standby.wait_log("standing by"))
    asyncio.run(leader.submit_job("j2"))
    assert not Path(standby.listen).exists()
    leader.send(signal.SIGKILL)
    leader.wait_end()
    with closing(SqlJournal(journal_url)) as journal:
        # The leader's lease, as if its time were over.
        journal.acquire("a", -1.0)
    standby.wait_ready()
    assert asyncio.run(standby.jobs()) == ["j1", "j2"]
    asyncio.run(standby.submit_job("j3"))
    # The former leader comes back and stands by in its turn.
    former = start("a", lease_s=LONG_S)
    asyncio.run(former.wait_log("led by 'b'"))
    standby.send(signal.SIGTERM)
    assert standby.wait_end() == 0
    former.wait_ready()
    assert asyncio.run(former.jobs()) == ["j1", "j2", "j3"]


def test_a_leader_that_was_suspended_stops_at_once(start: Start) -> None:
    leader = start("a")
    leader.wait_ready()
    leader.send(signal.SIGSTOP)
    # At the same socket, so that routers and agents find whoever leads.
    standby = start("b", listen=leader.listen)
    standby.wait_ready()
    asyncio.run(standby.submit_job("j1"))
    leader.send(signal.SIGCONT)
    assert leader.wait_end() == EXIT_LEASE_LOST
    assert "the scheduler stops" in leader.log
    assert asyncio.run(standby.jobs()) == ["j1"]


def test_a_killed_scheduler_takes_over_from_itself_without_waiting(start: Start) -> None:
    first = start("a", lease_s=3600.0)
    first.wait_ready()
    asyncio.run(first.submit_job("j1"))
    first.send(signal.SIGKILL)
    first.wait_end()
    second = start("a", lease_s=3600.0)
    second.wait_ready()
    assert "standing by" not in second.log
    assert asyncio.run(second.jobs()) == ["j1"]


def test_a_standby_ends_on_request(start: Start) -> None:
    leader, standby = start("a", lease_s=LONG_S), start("b", lease_s=LONG_S)
    first, second = leader, standby
    asyncio.run(_either_stands_by(leader, standby))
    if "standing by" in leader.log:
        first, second = standby, leader
    first.wait_ready()
    second.send(signal.SIGTERM)
    assert second.wait_end() == 0
    assert second.process.stdout is not None
    assert second.process.stdout.read() == b""


async def _either_stands_by(*schedulers: SchedulerProcess) -> None:
    waits = [asyncio.create_task(one.wait_log("standing by")) for one in schedulers]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


def test_a_clean_stop_leaves_nothing_to_replay(start: Start, journal_url: str) -> None:
    scheduler = start("a", snapshot_events=3)
    scheduler.wait_ready()
    for index in range(9):
        asyncio.run(scheduler.submit_job(f"j{index}"))
    scheduler.send(signal.SIGTERM)
    assert scheduler.wait_end() == 0
    with closing(SqlJournal(journal_url)) as journal:
        newest = journal.snapshot()
        assert newest is not None
        # Its last connection may end while it stops.
        behind = [type(event).__name__ for _, event, _ in journal.read(after=newest[0])]
        assert behind in ([], ["RouterLost"])
        # Compacted on the way.
        assert next(journal.read())[0] > 1
    again = start("a")
    again.wait_ready()
    assert asyncio.run(again.jobs()) == [f"j{index}" for index in range(9)]


def test_strange_requests_are_refused_before_the_journal(start: Start, journal_url: str) -> None:
    scheduler = start("a")
    scheduler.wait_ready()

    async def ask() -> None:
        async with scheduler.connected() as peer:
            endless = job_params("j", controller_timeout_s=float("inf"))
            with pytest.raises(InvalidRequestError, match="controller_timeout_s"):
                await peer.call("submit_job", endless)
            report = {"operation": "o", "token": 1, "error": "{", "state_intact": True}
            with pytest.raises(InvalidRequestError, match="error"):
                await peer.call("operation_failed", report)

    asyncio.run(ask())
    assert asyncio.run(scheduler.jobs()) == []
    scheduler.send(signal.SIGKILL)
    scheduler.wait_end()
    with closing(SqlJournal(journal_url)) as journal:
        kinds = [type(event).__name__ for _, event, _ in journal.read()]
    comings = {"RouterJoined", "RouterLost"}
    assert [kind for kind in kinds if kind not in comings] == ["SchedulerStarted", "TenantCreated"]


def test_a_scheduler_started_on_a_full_journal_holds_with_the_reason(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("s")
    path = str(folder / "journal.sqlite")
    # The tables are there, but these events are larger than what is left of their pages.
    SqlJournal(path).close()
    tenants = [(f"tenant{index}", "0" * 64) for index in range(100)]
    full = SchedulerProcess(folder, "a", path, journal_bytes_max=1, tenants=tenants)
    with closing(full):
        full.wait_ready()
        asyncio.run(full.wait_log("is full"))
        assert "Traceback" not in full.log
    roomy = SchedulerProcess(folder, "a", path, tenants=tenants)
    with closing(roomy):
        roomy.wait_ready()
        asyncio.run(roomy.submit_job("j"))
