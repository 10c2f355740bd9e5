"""The shell around the core: receive, stamp the time, journal, call the core, run the commands.

An event is journalled *before* the core handles it, so a crash loses nothing that the core did. The
core refuses a bad event without a change. Such an event stays in the journal and is refused again
in every replay, because the core is deterministic. Calling the core first would require undoing its
changes whenever the journal cannot be written.

Events that arrive during a transaction share the next one. While the journal cannot be written
because it is full or its database does not answer, the shell *holds*: it refuses requests with
the reason and `retry_after_s`, keeps reports in order, and retries the journal until it succeeds.
The first event afterwards is `ServiceResumed`, because no peer could reach the core meanwhile. The
same event follows a suspension of the process.

The state is written as a snapshot at intervals, so that a restart replays only the later events.
The core is encoded between two events; the write runs in the background.

A bug inside the core leaves its state inconsistent. Then the shell rebuilds the core from the
journal without the failed step (`skipped_steps`) and continues; queries wait meanwhile.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plexrl.errors import (
    JournalFullError,
    JournalUnavailableError,
    LeaseLostError,
    OverloadedError,
    PlexRLError,
    StorageError,
    UnavailableError,
    UnknownOperationError,
)
from plexrl.ids import JobId, NodeId, OperationId
from plexrl.process.conditions import Conditions
from plexrl.scheduler.core.advance import EVENT, NONE, Fault
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.service.connections.links import AgentLinks, RouterLinks
from plexrl.scheduler.service.journal.journal import Entry, Journal
from plexrl.scheduler.service.journal.outage import HELD_RETRY_S, JournalOutage
from plexrl.scheduler.service.journal.recovery import restore
from plexrl.scheduler.service.operation_totals import OperationTotals
from plexrl.scheduler.service.skipped_steps import (
    NONE_SKIPPED,
    SkippedSteps,
    fault_error,
    substitute_report,
)
from plexrl.scheduler.service.snapshots import SnapshotWriter
from plexrl.scheduler.state.messages.events import (
    CODEC,
    Event,
    ServiceResumed,
    StateMigrated,
    TimerFired,
)
from plexrl.wire.messages import (
    AbortOperation,
    Command,
    DiscardBlobs,
    LaunchWorkers,
    MigrateState,
    PrefetchState,
    ReleaseState,
    Run,
    SetTimer,
    StopWorkers,
)
from plexrl.wire.messages.cluster_views import BrokerView, FaultsView
from plexrl.wire.messages.overview_views import JournalView

if TYPE_CHECKING:
    from collections.abc import Callable

    from plexrl.scheduler.service.journal.history.writer import HistoryWriter

LOG = logging.getLogger(__name__)

QUEUE_MAX = 10_000
BATCH_MAX = 512
SLOW_S = 5.0
"""The shell holds if a transaction takes longer; otherwise requests would time out one by one."""


class Clock:
    """Seconds since the epoch that never decrease, not even over restarts."""

    def __init__(self, not_before: float) -> None:
        self.started_at = max(time.time(), not_before)
        self._offset = self.started_at - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset


@dataclass(slots=True)
class _Item:
    event: Event
    done: asyncio.Future[None]
    is_report: bool


def _settle(item: _Item, refusal: PlexRLError | None) -> None:
    """Answer the sender of the event."""
    if item.done.done():
        return
    if refusal is None:
        item.done.set_result(None)
        return
    item.done.set_exception(refusal)
    # Mark the exception as retrieved: timers and closed connections never await it.
    item.done.exception()


class Shell:
    """Owns the core while the service runs. `position`: of the last event that the core handled."""

    def __init__(
        self,
        core: SchedulerCore,
        journal: Journal,
        clock: Clock,
        *,
        position: int = 0,
        snapshot_position: int = 0,
        snapshot_events: int = 50_000,
        skipped: SkippedSteps | None = None,
    ) -> None:
        self.core = core
        self.clock = clock
        self.routers = RouterLinks()
        self.agents = AgentLinks()
        self.keys_used_at: dict[str, float] = {}
        """When a router last authenticated with an API key, by key id, since the process
        started."""
        self.on_change: Callable[[list[Command]], None] | None = None
        """Called with the commands of each batch, after the core has handled it."""
        self.event_status: Callable[[], BrokerView] | None = None
        """The connection to the MQTT broker, for operators; None: there is no broker."""
        self.history: HistoryWriter | None = None
        """Archives what snapshots replace; it runs beside the shell. None: nothing does."""
        self._journal = journal
        self._position = position
        self._at = clock.now()
        self._skipped = skipped
        self.fault_conditions = Conditions()
        """Bugs that this process has met; never cleared."""
        self._snapshots = SnapshotWriter(
            lambda: self.core.dump(),
            journal,
            self.fault_conditions,
            position=snapshot_position,
            events=snapshot_events,
            history=lambda: self.history,
        )
        self._consistent = asyncio.Event()
        """Cleared while a bug has left the core inconsistent."""
        self._consistent.set()
        self._ended: PlexRLError | None = None
        self._queue: asyncio.Queue[_Item] = asyncio.Queue(QUEUE_MAX)
        self._kept_reports: deque[_Item] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._migrating: set[asyncio.Task[None]] = set()
        self.outage = JournalOutage()
        self.breached_since: dict[JobId, float] = {}
        """When jobs over their service level were first seen so."""
        self._awaited: dict[OperationId, set[asyncio.Future[None]]] = {}
        self._ended_count, _ = core.ended_since(0)
        self.operation_totals = OperationTotals()

    async def request(self, event: Event) -> None:
        """Submit a client's event and wait until the core has handled it.

        Raises:
            PlexRLError: refused by the core; nothing changed.
            StorageError: the journal cannot take it now; nothing changed, and the same request
                succeeds later.
            InvalidRequestError: the event holds a number that is not finite.
            OverloadedError: too many events wait.
        """
        self._check(event)
        if self.outage.error is not None:
            raise self.outage.error.with_traceback(None)
        item = _Item(event, asyncio.get_running_loop().create_future(), is_report=False)
        try:
            self._queue.put_nowait(item)
        except asyncio.QueueFull as error:
            raise OverloadedError(
                "the scheduler has too many requests waiting: try again", retry_after_s=1.0
            ) from error
        await item.done

    async def report(self, event: Event) -> None:
        """Submit a report of something that has already happened; never refused for lack of
        capacity.

        Raises:
            PlexRLError: refused by the core; nothing changed.
            InvalidRequestError: the event holds a number that is not finite.
        """
        self._check(event)
        item = _Item(event, asyncio.get_running_loop().create_future(), is_report=True)
        await self._queue.put(item)
        await item.done

    async def wait_final(self, operation: OperationId, timeout_s: float) -> None:
        """Return when the operation is final or `timeout_s` seconds have passed."""
        if self.core.is_final(operation):
            return
        final: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._awaited.setdefault(operation, set())
        waiting.add(final)
        try:
            await asyncio.wait({final}, timeout=timeout_s)
        finally:
            waiting.discard(final)
            if not waiting and self._awaited.get(operation) is waiting:
                del self._awaited[operation]
        await self.wait_until_consistent()

    async def wait_until_consistent(self) -> None:
        """Wait until the core may be queried: at once, except after a bug."""
        await self._consistent.wait()

    def faults(self) -> FaultsView:
        """The scheduler's own faults, and the state of its events, for operators."""
        skipped = NONE_SKIPPED if self._skipped is None else self._skipped.view()
        events = None if self.event_status is None else self.event_status()
        return {**skipped, "snapshot_error": self._snapshots.error, "events": events}

    def journal_view(self) -> JournalView:
        """The journal, for operators."""
        return {
            "events": self._position,
            "events_to_replay": self._position - self._snapshots.position,
            "is_held": self.outage.error is not None,
            "waiting_events": self._queue.qsize() + len(self._kept_reports),
        }

    async def confirm_lead(self) -> None:
        """Check that no other scheduler has taken over. Raises as `Journal.renew`."""
        await asyncio.to_thread(self._journal.renew)

    async def run(self) -> None:
        """Process events until cancelled.

        Raises:
            LeaseLostError: another scheduler leads; the core must not be used any more.
        """
        batch: list[_Item] = []
        beating = asyncio.create_task(self.outage.beat())
        try:
            while True:
                batch = await self._next_batch()
                await self._process_batch(batch)
        except LeaseLostError as error:
            self._end(error, batch)
            raise
        except asyncio.CancelledError:
            stopping = UnavailableError(
                "the scheduler is stopping: try again in a moment", retry_after_s=0.5
            )
            self._end(stopping, batch)
            raise
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def save(self) -> None:
        """Write a snapshot, so that the next start replays nothing. Call it after `run` has
        ended."""
        is_consistent = self._consistent.is_set()
        await self._snapshots.finish(self._position, self._at, is_consistent=is_consistent)

    async def _process_batch(self, batch: list[_Item]) -> None:
        self.outage.detect_suspension()
        if self.outage.was_unreachable:
            # First: later events would treat peers as silent.
            self.outage.was_unreachable = False
            batch.insert(0, _unawaited(ServiceResumed()))
        now = self.clock.now()
        try:
            position = await self._append([(item.event, now) for item in batch])
        except LeaseLostError:
            raise
        except StorageError as error:
            await self._not_journalled(batch, error)
            return
        self.outage.end(is_reported=isinstance(batch[0].event, ServiceResumed))
        commands: list[Command] = []
        refusals: list[PlexRLError | None] = []
        for place, item in enumerate(batch, start=position - len(batch) + 1):
            try:
                commands += await self._handle(item.event, place, now)
            except PlexRLError as error:
                if isinstance(error, LeaseLostError):
                    raise
                refusals.append(error)
            else:
                refusals.append(None)
        # Answer after the whole batch: an answered sender queries the core, which a bug may have
        # left inconsistent in between.
        for item, refusal in zip(batch, refusals, strict=True):
            _settle(item, refusal)
        self._position, self._at = position, now
        self._snapshots.start_if_due(position, now)
        self._notify_final()
        if self.on_change is not None:
            self.on_change(commands)
        await self._execute(commands)

    async def _append(self, entries: list[Entry]) -> int:
        writing = asyncio.ensure_future(asyncio.to_thread(self._journal.append, entries))
        try:
            done, _ = await asyncio.wait({writing}, timeout=SLOW_S)
            if not done:
                self.outage.begin(
                    JournalUnavailableError(
                        f"the journal's database has not answered for {SLOW_S:g} s: check that it "
                        "runs and that its disk is not overloaded"
                    )
                )
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            # The thread still runs; wait for it, so that it does not use a closed journal.
            await asyncio.wait({writing})
            raise

    def _notify_final(self) -> None:
        """Wake the waiters of operations that became final. If the history is too short to tell,
        check every awaited operation."""
        self._ended_count, ended = self.core.ended_since(self._ended_count)
        if ended is None:
            ended = [each for each in self._awaited if self._is_over(each)]
        else:
            self._count(ended)
        for operation in ended:
            for final in self._awaited.pop(operation, ()):
                if not final.done():
                    final.set_result(None)

    def _count(self, ended: list[OperationId]) -> None:
        operations = self.core.cluster.state.operations
        for name in ended:
            self.operation_totals.add(operations[name])

    def _is_over(self, operation: OperationId) -> bool:
        try:
            return self.core.is_final(operation)
        except UnknownOperationError:
            # Final, and evicted within the same batch: the waiter gets the same error.
            return True

    def _check(self, event: Event) -> None:
        if self._ended is not None:
            raise self._ended
        CODEC.check(event)

    def _end(self, error: PlexRLError, batch: list[_Item]) -> None:
        """Answer all waiting senders with `error`."""
        self._ended = error
        waiting = [*batch, *self._kept_reports]
        while not self._queue.empty():
            waiting.append(self._queue.get_nowait())
        for item in waiting:
            _settle(item, error)

    async def _next_batch(self) -> list[_Item]:
        batch = list(self._kept_reports)
        self._kept_reports.clear()
        if not batch and self.outage.error is None:
            batch.append(await self._queue.get())
        while len(batch) < BATCH_MAX and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch

    async def _not_journalled(self, batch: list[_Item], error: StorageError) -> None:
        self.outage.begin(error)
        for item in batch:
            if item.is_report:
                self._kept_reports.append(item)
            elif not item.done.done():
                item.done.set_exception(error)
        if not self._kept_reports or not isinstance(self._kept_reports[0].event, ServiceResumed):
            # It precedes kept events, such as a timer that would treat peers as silent. Also, only
            # a write shows that the journal works again.
            self._kept_reports.appendleft(_unawaited(ServiceResumed()))
        is_full = isinstance(error, JournalFullError)
        if is_full and not self._snapshots.is_busy() and self.outage.may_free_space():
            self._snapshots.free_space(self._position, self._at)
        await asyncio.sleep(HELD_RETRY_S)

    async def _handle(self, event: Event, position: int, now: float) -> list[Command]:
        """The core's commands for an event, without its steps that fail.

        Raises:
            PlexRLError: the event was refused or skipped; nothing changed.
        """
        skipped = NONE
        while True:
            try:
                commands = self.core.handle(event, now, skipped)
            except Fault as fault:
                self._consistent.clear()
                skipped = await self._rebuild_core(event, position, fault)
                self.fault_conditions.hold(fault_error(event, position))
                # A snapshot soon: each further bug costs a replay of the events since the last.
                self._snapshots.is_wanted = True
                if EVENT not in skipped:
                    continue
                self._consistent.set()
                instead = substitute_report(self.core, event, now)
                if instead is not None:
                    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._kept_reports.append(_Item(instead, done, is_report=True))
                raise fault_error(event, position) from fault
            self._consistent.set()
            return commands

    async def _rebuild_core(self, event: Event, position: int, fault: Fault) -> frozenset[str]:
        """Restore the core to its state before the event at `position`; returns the steps of the
        event to skip."""
        if self._skipped is None:
            self._skipped = await asyncio.to_thread(SkippedSteps, self._journal)
        recorded = self._skipped
        await asyncio.to_thread(recorded.add, position, event, fault)
        while True:
            try:
                restored = await asyncio.to_thread(
                    restore, self.core.config, self._journal, recorded, position - 1
                )
            except LeaseLostError:
                raise
            except StorageError as error:
                LOG.error("the core cannot be rebuilt yet: %s", error)
                await asyncio.sleep(HELD_RETRY_S)
                continue
            self.core.become(restored.core)
            return recorded.steps(position)

    async def _execute(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case SetTimer():
                    self._set_timer(command.at)
                case Run() | AbortOperation() | DiscardBlobs():
                    await self.routers.send(command)
                case StopWorkers():
                    self.agents.send(command)
                    # Routers repeat requests to workers that do not answer until they know this.
                    await self.routers.tell_workers_gone(command)
                case LaunchWorkers() | ReleaseState() | PrefetchState():
                    self.agents.send(command)
                case MigrateState():
                    for node in command.nodes:
                        self._migrating.add(asyncio.create_task(self._migrate(command, node)))
                case _:
                    raise AssertionError(f"unknown command {command}")

    async def _migrate(self, command: MigrateState, node: NodeId) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            outcome = await self.agents.migrate(command, node)
            if outcome is not None:
                error, code = outcome
                await self.report(
                    StateMigrated(
                        deployment=command.deployment,
                        node=node,
                        seq=command.seq,
                        error=error,
                        code=code,
                    )
                )
        finally:
            self._migrating.discard(task)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, at - self.clock.now())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._timer_due)

    def _timer_due(self) -> None:
        # While the shell holds, the timer is kept like any report.
        if self._queue.full():
            self._timer = asyncio.get_running_loop().call_later(HELD_RETRY_S, self._timer_due)
        else:
            self._queue.put_nowait(_unawaited(TimerFired()))


def _unawaited(event: Event) -> _Item:
    """An event of the shell itself; nothing awaits its result."""
    return _Item(event, asyncio.get_running_loop().create_future(), is_report=True)
