"""The shell under slow or failing surroundings."""

import asyncio
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import pytest

from plexrl.errors import (
    JournalFullError,
    LeaseLostError,
    StorageError,
    UnavailableError,
    UnknownOperationError,
)
from plexrl.ids import OperationId
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.service.connections.links import RouterLinks
from plexrl.scheduler.service.journal.journal import Entry, Row
from plexrl.scheduler.service.journal.leadership import keep_lead
from plexrl.scheduler.service.shell import Clock, Shell
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd
from plexrl.wire.rpc import Peer
from tests.scheduler.fake_cluster import config
from tests.scheduler.live_service import pass_time, run_live, until

WAIT_S = 30.0
SEND_TIMEOUT_S = 1000.0


class SlowJournal:
    """A journal in memory; an append blocks until `may_write` is set, and may fail."""

    def __init__(self, failure: StorageError | None = None) -> None:
        self.failure = failure
        self.is_writing = threading.Event()
        self.may_write = threading.Event()
        self.entries: list[Entry] = []
        self.snapshots: list[int] = []

    def acquire(self, holder: str, ttl_s: float) -> int:
        raise NotImplementedError

    def renew(self) -> None:
        if self.failure is not None:
            raise self.failure

    def release(self) -> None:
        raise NotImplementedError

    def append(self, entries: Sequence[Entry]) -> int:
        self.is_writing.set()
        assert self.may_write.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure
        self.entries += entries
        return len(self.entries)

    def read(self, after: int = 0) -> Iterator[tuple[int, ev.Event, float]]:
        raise NotImplementedError

    def write_snapshot(self, position: int, at: float, body: bytes) -> None:
        assert body
        assert at > 0
        self.snapshots.append(position)

    def snapshot(self, before: int | None = None) -> tuple[int, float, bytes] | None:
        raise NotImplementedError

    def rows(self, after: int, count: int) -> list[Row]:
        raise NotImplementedError

    def compact(self, kept_snapshots: int = 2, upto: int | None = None) -> None:
        del kept_snapshots, upto
        assert self.snapshots

    def close(self) -> None:
        raise NotImplementedError


class ForgetfulCore:
    """A core with one running operation, until it is evicted."""

    def __init__(self) -> None:
        self.knows = True
        self._core = SchedulerCore(config())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def is_final(self, operation: OperationId) -> bool:
        if not self.knows:
            raise UnknownOperationError(f"there is no operation {operation!r}, or not any more")
        return False

    def ended_since(self, count: int) -> tuple[int, list[OperationId] | None]:
        return count + 1, None


class PatientCore:
    """A core whose operations never end; counts the queries whether one has."""

    def __init__(self) -> None:
        self.asked = 0
        self._core = SchedulerCore(config())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def is_final(self, operation: OperationId) -> bool:
        del operation
        self.asked += 1
        return False


def tenant(name: str) -> ev.TenantCreated:
    return ev.TenantCreated(tenant=name, key_digest=name)


def test_stopping_waits_for_the_running_commit() -> None:
    async def run() -> None:
        journal = SlowJournal()
        shell = Shell(SchedulerCore(config()), journal, Clock(0.0))
        running = asyncio.create_task(shell.run())
        asked = asyncio.create_task(shell.request(tenant("t")))
        await asyncio.to_thread(journal.is_writing.wait, WAIT_S)
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=0.05)
        assert not done
        journal.may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(journal.entries) == 1
        with pytest.raises(UnavailableError, match="stopping"):
            await asked
        with pytest.raises(UnavailableError):
            await shell.request(tenant("u"))
        # The core has not seen the event: the next start replays it.
        await shell.save()
        assert journal.snapshots == []

    asyncio.run(run())


def test_snapshots_are_written_at_intervals_and_at_the_end() -> None:
    async def run() -> None:
        journal = SlowJournal()
        journal.may_write.set()
        shell = Shell(SchedulerCore(config()), journal, Clock(0.0), snapshot_events=3)
        running = asyncio.create_task(shell.run())
        for index in range(7):
            await shell.request(tenant(f"t{index}"))
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await shell.save()
        assert journal.snapshots[0] == 3
        assert journal.snapshots[-1] == 7
        await shell.save()
        assert journal.snapshots.count(7) == 1

    asyncio.run(run())


def test_a_lost_lease_ends_the_shell_and_answers_all_senders() -> None:
    async def run() -> None:
        journal = SlowJournal(LeaseLostError("led by another"))
        shell = Shell(SchedulerCore(config()), journal, Clock(0.0))
        running = asyncio.create_task(shell.run())
        asked = [
            asyncio.create_task(shell.request(tenant("t"))),
            asyncio.create_task(shell.report(ev.RouterJoined(router="r"))),
        ]
        await asyncio.to_thread(journal.is_writing.wait, WAIT_S)
        late = asyncio.create_task(shell.report(ev.RouterLost(router="r")))
        journal.may_write.set()
        with pytest.raises(LeaseLostError):
            await running
        for question in (*asked, late):
            with pytest.raises(LeaseLostError):
                await question
        assert shell.core.tenants() == []

    asyncio.run(run())


def test_a_lease_taken_by_another_scheduler_is_lost() -> None:
    async def run() -> None:
        async with asyncio.timeout(WAIT_S):
            await keep_lead(SlowJournal(LeaseLostError("led by another")), 0.05)

    with pytest.raises(LeaseLostError, match=r"led by another; it was last renewed .* s ago"):
        asyncio.run(run())


def test_a_leader_without_its_journal_ends_if_another_listens_at_its_address() -> None:
    async def run() -> None:
        async with asyncio.timeout(WAIT_S):
            await keep_lead(SlowJournal(StorageError("no server")), 0.05, lambda: True)

    with pytest.raises(LeaseLostError, match="listens at this address"):
        asyncio.run(run())


@pytest.mark.parametrize("failure", [JournalFullError("no room"), StorageError("no server")])
def test_an_expired_lease_that_no_scheduler_took_is_not_lost(failure: StorageError) -> None:
    async def run() -> None:
        async with asyncio.timeout(0.3):
            await keep_lead(SlowJournal(failure), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(run())


def test_a_router_that_accepts_nothing_is_disconnected_for_the_next_one() -> None:
    async def run() -> None:
        links = RouterLinks(send_timeout_s=SEND_TIMEOUT_S)
        deaf, ears = socket.socketpair(), socket.socketpair()
        heard: asyncio.Queue[str] = asyncio.Queue()

        async def abort(peer: Peer, params: dict[str, object]) -> None:
            del peer
            await heard.put(str(params["command"]))

        stuck = Peer(*await asyncio.open_connection(sock=deaf[0]), {})
        other = Peer(*await asyncio.open_connection(sock=ears[0]), {})
        listener = Peer(*await asyncio.open_connection(sock=ears[1]), {"abort": abort})
        links.add("deaf", stuck)
        links.add("ears", other)
        running = [asyncio.create_task(peer.run()) for peer in (stuck, other, listener)]
        command = cmd.AbortOperation(operation="o" * (1 << 22), deployment="d", addresses=())
        sending = asyncio.create_task(links.send(command))
        await until(lambda: bool(select.select([deaf[1]], [], [], 0)[0]))
        assert not sending.done()
        pass_time(SEND_TIMEOUT_S)
        await sending
        assert "ooo" in await heard.get()
        # Its connection has ended, so that the core is told.
        await running[0]
        other.close()
        await asyncio.gather(*running, return_exceptions=True)
        deaf[1].close()

    run_live(run)


def test_an_event_that_ends_no_operation_checks_no_waiter() -> None:
    async def run() -> None:
        journal = SlowJournal()
        journal.may_write.set()
        core = PatientCore()
        shell = Shell(cast("SchedulerCore", core), journal, Clock(0.0))
        running = asyncio.create_task(shell.run())
        waits = [
            asyncio.create_task(shell.wait_final(OperationId(f"o{index}"), WAIT_S))
            for index in range(20)
        ]
        await asyncio.sleep(0)
        asked = core.asked
        assert asked == len(waits)
        await shell.request(tenant("a"))
        assert core.asked == asked
        for task in (running, *waits):
            task.cancel()
        await asyncio.gather(running, *waits, return_exceptions=True)

    asyncio.run(run())


def test_the_waiter_of_an_evicted_operation_gets_an_error() -> None:
    async def run() -> None:
        journal = SlowJournal()
        journal.may_write.set()
        core = ForgetfulCore()
        shell = Shell(cast("SchedulerCore", core), journal, Clock(0.0))
        running = asyncio.create_task(shell.run())
        waiting = asyncio.create_task(shell.wait_final(OperationId("o"), WAIT_S))
        await asyncio.sleep(0)
        core.knows = False
        await shell.request(tenant("a"))
        async with asyncio.timeout(WAIT_S):
            await waiting
            # The loop goes on, and whoever asks from now on meets the error.
            await shell.request(tenant("b"))
            with pytest.raises(UnknownOperationError):
                await shell.wait_final(OperationId("o"), WAIT_S)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
