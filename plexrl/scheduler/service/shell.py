"""The shell round the core: receive, stamp the time, journal, call the core, run the commands.

An event is journalled *before* the core sees it, so nothing the core did is ever unknown after a
crash. The core refuses a bad event without changing anything; such an event stays in the journal
and is refused again in every replay, because the core is deterministic. The alternative, asking
the core first, would need its changes undone whenever the journal cannot be written.

All events that wait while one transaction runs share the next one. When the journal cannot take
events in, because it is full or its database is away, the shell *holds*: requests are refused with
the reason and `retry_after_s`, reports of what has already happened are kept in order, and the
journal is tried again until it takes them. The first event after that is `ServiceResumed`, because
nobody could be heard meanwhile. The same event follows a time in which the process was stopped.

Every so many events the state is written down too, so that a restart replays only what came after.
The core is encoded between two events; the writing goes on beside those that follow.

A fault of ours inside the core leaves it half changed. Then the shell makes it anew from the
journal, without the step that failed (`set_aside`), and goes on; nobody is answered meanwhile.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass

from plexrl.errors import (
    JournalFullError,
    JournalUnavailableError,
    LeaseLostError,
    OverloadedError,
    PlexRLError,
    SchedulerFaultError,
    StorageError,
    UnavailableError,
    UnknownOperationError,
)
from plexrl.ids import NodeId, OperationId
from plexrl.process.conditions import Conditions
from plexrl.scheduler.core.advance import EVENT, NONE, Fault
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.journal.journal import Entry, Journal
from plexrl.scheduler.journal.recovery import restore
from plexrl.scheduler.service.journal_hold import HELD_RETRY_S, JournalHold
from plexrl.scheduler.service.links import AgentLinks, RouterLinks
from plexrl.scheduler.service.set_aside import NOTHING_ASIDE, SetAside, answer, follow_up
from plexrl.scheduler.state.commands import (
    AbortOperation,
    Command,
    DiscardBlobs,
    LaunchWorkers,
    MigrateState,
    PrefetchState,
    ReleaseState,
    RunOperation,
    SetTimer,
    StopWorkers,
)
from plexrl.scheduler.state.events import CODEC, Event, ServiceResumed, StateMigrated, TimerFired

LOG = logging.getLogger(__name__)

QUEUE_MAX = 10_000
BATCH_MAX = 512
SLOW_S = 5.0
"""A transaction that takes longer holds requests back: they would time out one after another."""


class Clock:
    """Seconds since the epoch that never go back, not over restarts either."""

    def __init__(self, not_before: float) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset


@dataclass(slots=True)
class _Item:
    event: Event
    done: asyncio.Future[None]
    is_report: bool


def _settle(item: _Item, refusal: PlexRLError | None) -> None:
    """Answer whoever sent the event."""
    if item.done.done():
        return
    if refusal is None:
        item.done.set_result(None)
        return
    item.done.set_exception(refusal)
    # Nobody awaits a timer's answer, nor one whose connection is gone.
    item.done.exception()


class Shell:
    """Owns the core while the service runs. `position` is that of the last event the core knows."""

    def __init__(
        self,
        core: SchedulerCore,
        journal: Journal,
        clock: Clock,
        *,
        position: int = 0,
        snapshot_position: int = 0,
        snapshot_events: int = 50_000,
        aside: SetAside | None = None,
    ) -> None:
        self.core = core
        self.clock = clock
        self.routers = RouterLinks()
        self.agents = AgentLinks()
        self.keys_used_at: dict[str, float] = {}
        """When a router last asked about an API key, by the key's id, since this process began."""
        self._journal = journal
        self._position = position
        self._at = clock.now()
        self._snapshot_position = snapshot_position
        self._snapshot_events = snapshot_events
        self._snapshot: asyncio.Task[None] | None = None
        self._snapshot_wanted = False
        self._snapshot_error = ""
        self._aside = aside
        self.fault_conditions = Conditions()
        """Faults of ours that this process has met; they last as long as it does."""
        self._sound = asyncio.Event()
        """Cleared while the core is half changed by a fault."""
        self._sound.set()
        self._ended: PlexRLError | None = None
        self._queue: asyncio.Queue[_Item] = asyncio.Queue(QUEUE_MAX)
        self._kept: deque[_Item] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._migrating: set[asyncio.Task[None]] = set()
        self.hold = JournalHold()
        self._awaited: dict[OperationId, set[asyncio.Future[None]]] = {}
        self._ended_count, _ = core.ended_since(0)

    async def request(self, event: Event) -> None:
        """Have a client's event accepted.

        Raises:
            PlexRLError: refused by the core; nothing changed.
            StorageError: the journal cannot take it now; nothing changed, and the same request
                succeeds later.
            InvalidRequestError: it holds a number that is not finite.
            OverloadedError: too many events wait.
        """
        self._check(event)
        if self.hold.error is not None:
            raise self.hold.error.with_traceback(None)
        item = _Item(event, asyncio.get_running_loop().create_future(), is_report=False)
        try:
            self._queue.put_nowait(item)
        except asyncio.QueueFull as error:
            raise OverloadedError(
                "the scheduler has too many requests waiting: try again", retry_after_s=1.0
            ) from error
        await item.done

    async def report(self, event: Event) -> None:
        """Have an account of something that already happened accepted, whatever it takes.

        Raises:
            PlexRLError: refused by the core; nothing changed.
            InvalidRequestError: it holds a number that is not finite.
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
        await self.sound()

    async def sound(self) -> None:
        """Return when the core may be asked: at once, but for the moment after a fault."""
        await self._sound.wait()

    def faults(self) -> dict[str, object]:
        """For operators: what of the scheduler itself does not work as it should."""
        aside = NOTHING_ASIDE if self._aside is None else self._aside.view()
        return {**aside, "snapshot_error": self._snapshot_error}

    async def confirm_lead(self) -> None:
        """Make sure that no other scheduler has taken anything in. Raises as `Journal.renew`."""
        await asyncio.to_thread(self._journal.renew)

    async def run(self) -> None:
        """Take in events until cancelled.

        Raises:
            LeaseLostError: another scheduler leads; the core must not be asked or told any more.
        """
        batch: list[_Item] = []
        beating = asyncio.create_task(self.hold.beat())
        try:
            while True:
                batch = await self._next_batch()
                await self._take_in(batch)
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
        """Write the state down, so that the next start replays nothing; once `run` has ended."""
        if self._snapshot is not None:
            await self._snapshot
        if self._position > self._snapshot_position and self._sound.is_set():
            body = self._dump()
            if body is not None:
                self._snapshot_position = self._position
                await self._write_snapshot(self._position, self._at, body)

    async def _take_in(self, batch: list[_Item]) -> None:
        self.hold.notice_stop()
        if self.hold.was_deaf:
            # First of all: events that follow would look for what was silent meanwhile.
            self.hold.was_deaf = False
            batch.insert(0, _unawaited(ServiceResumed()))
        now = self.clock.now()
        try:
            position = await self._append([(item.event, now) for item in batch])
        except LeaseLostError:
            raise
        except StorageError as error:
            await self._not_journalled(batch, error)
            return
        self.hold.end(core_knows=isinstance(batch[0].event, ServiceResumed))
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
        # Not before all are taken in: whoever is answered asks the core, which a fault may have
        # left half changed in between.
        for item, refusal in zip(batch, refusals, strict=True):
            _settle(item, refusal)
        self._position, self._at = position, now
        self._snapshot_if_due()
        self._tell_final()
        await self._carry_out(commands)

    async def _append(self, entries: list[Entry]) -> int:
        writing = asyncio.ensure_future(asyncio.to_thread(self._journal.append, entries))
        try:
            done, _ = await asyncio.wait({writing}, timeout=SLOW_S)
            if not done:
                self.hold.begin(
                    JournalUnavailableError(
                        f"the journal's database has not answered for {SLOW_S:g} s: see that it "
                        "runs, and that its disk is not overloaded"
                    )
                )
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            # The thread goes on; whoever closes the journal next must not meet it there.
            await asyncio.wait({writing})
            raise

    def _tell_final(self) -> None:
        """Wake those who wait for what has become final. Many may wait: only if the history is too
        short to say what became final is each of them looked at."""
        self._ended_count, ended = self.core.ended_since(self._ended_count)
        if ended is None:
            ended = [each for each in self._awaited if self._is_over(each)]
        for operation in ended:
            for final in self._awaited.pop(operation, ()):
                if not final.done():
                    final.set_result(None)

    def _is_over(self, operation: OperationId) -> bool:
        try:
            return self.core.is_final(operation)
        except UnknownOperationError:
            # Final, and forgotten within the same batch: whoever waits meets the same error.
            return True

    def _snapshot_if_due(self) -> None:
        is_due = self._position - self._snapshot_position >= self._snapshot_events
        if not is_due and not self._snapshot_wanted:
            return
        if self._snapshot is None or self._snapshot.done():
            self._snapshot_wanted = False
            # Also where it fails: the next try comes after as many events again.
            self._snapshot_position = self._position
            body = self._dump()
            if body is not None:
                work = self._write_snapshot(self._position, self._at, body)
                self._snapshot = asyncio.create_task(work)

    def _dump(self) -> bytes | None:
        """The core as bytes; None where it cannot be written down, which costs only time at the
        next start."""
        try:
            body = self.core.dump()
        except MemoryError:
            raise
        except Exception as error:
            self._snapshot_error = f"{type(error).__name__}: {error}"
            self.fault_conditions.hold(SchedulerFaultError(self._snapshot_error))
            LOG.critical(
                "a fault of PlexRL: the state at event %d cannot be written down; the scheduler "
                "goes on, and its journal grows: please report it",
                self._position,
                exc_info=error,
            )
            return None
        self._snapshot_error = ""
        return body

    async def _write_snapshot(
        self, position: int, at: float, body: bytes, *, kept: int = 2
    ) -> None:
        try:
            await asyncio.to_thread(self._journal.write_snapshot, position, at, body)
            await asyncio.to_thread(self._journal.compact, kept)
        except StorageError as error:
            # The events are all there: it only takes longer to start. A lost lease is met by the
            # next event, and by whoever keeps the lease.
            LOG.error("no snapshot at event %d: %s", position, error)
        else:
            LOG.info("snapshot at event %d: %d bytes", position, len(body))

    def _check(self, event: Event) -> None:
        if self._ended is not None:
            raise self._ended
        CODEC.check(event)

    def _end(self, error: PlexRLError, batch: list[_Item]) -> None:
        """Answer everybody who waits."""
        self._ended = error
        waiting = [*batch, *self._kept]
        while not self._queue.empty():
            waiting.append(self._queue.get_nowait())
        for item in waiting:
            _settle(item, error)

    async def _next_batch(self) -> list[_Item]:
        batch = list(self._kept)
        self._kept.clear()
        if not batch and self.hold.error is None:
            batch.append(await self._queue.get())
        while len(batch) < BATCH_MAX and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch

    async def _not_journalled(self, batch: list[_Item], error: StorageError) -> None:
        self.hold.begin(error)
        for item in batch:
            if item.is_report:
                self._kept.append(item)
            elif not item.done.done():
                item.done.set_exception(error)
        if not self._kept or not isinstance(self._kept[0].event, ServiceResumed):
            # It comes before what is kept, such as a timer that would look for who was silent. And
            # something must be written for anybody to learn that there is room.
            self._kept.appendleft(_unawaited(ServiceResumed()))
        if isinstance(error, JournalFullError):
            self._make_room()
        await asyncio.sleep(HELD_RETRY_S)

    def _make_room(self) -> None:
        """Have the events that a snapshot replaces deleted, and the snapshot before it."""
        is_busy = self._snapshot is not None and not self._snapshot.done()
        if is_busy or not self.hold.may_make_room() or (body := self._dump()) is None:
            return
        self._snapshot_position = self._position
        work = self._write_snapshot(self._position, self._at, body, kept=1)
        self._snapshot = asyncio.create_task(work)

    async def _handle(self, event: Event, position: int, now: float) -> list[Command]:
        """What follows from an event, also where a step of it fails.

        Raises:
            PlexRLError: the event was refused, or left out; nothing changed.
        """
        skipped = NONE
        while True:
            try:
                commands = self.core.handle(event, now, skipped)
            except Fault as fault:
                self._sound.clear()
                skipped = await self._make_anew(event, position, fault)
                self.fault_conditions.hold(answer(event, position))
                # Soon: every other fault costs a replay of what has come since.
                self._snapshot_wanted = True
                if EVENT not in skipped:
                    continue
                self._sound.set()
                instead = follow_up(self.core, event, now)
                if instead is not None:
                    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._kept.append(_Item(instead, done, is_report=True))
                raise answer(event, position) from fault
            self._sound.set()
            return commands

    async def _make_anew(self, event: Event, position: int, fault: Fault) -> frozenset[str]:
        """Have the core be as it was before the event at `position`; returns what of the event is
        to be left out."""
        if self._aside is None:
            self._aside = await asyncio.to_thread(SetAside, self._journal)
        aside = self._aside
        await asyncio.to_thread(aside.add, position, event, fault)
        while True:
            try:
                restored = await asyncio.to_thread(
                    restore, self.core.config, self._journal, aside, position - 1
                )
            except LeaseLostError:
                raise
            except StorageError as error:
                LOG.error("the core cannot be made anew yet: %s", error)
                await asyncio.sleep(HELD_RETRY_S)
                continue
            self.core.become(restored.core)
            return aside.steps(position)

    async def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case SetTimer():
                    self._set_timer(command.at)
                case RunOperation() | AbortOperation() | DiscardBlobs():
                    await self.routers.send(command)
                case LaunchWorkers() | StopWorkers() | ReleaseState() | PrefetchState():
                    self.agents.send(command)
                case MigrateState():
                    for node in command.nodes:
                        self._migrating.add(asyncio.create_task(self._migrate(command, node)))
                case _:
                    raise AssertionError(f"no way to carry out {command}")

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
        # A journal that holds keeps it like any report.
        if self._queue.full():
            self._timer = asyncio.get_running_loop().call_later(HELD_RETRY_S, self._timer_due)
        else:
            self._queue.put_nowait(_unawaited(TimerFired()))


def _unawaited(event: Event) -> _Item:
    """An event of the shell's own, whose outcome nobody waits for."""
    return _Item(event, asyncio.get_running_loop().create_future(), is_report=True)
