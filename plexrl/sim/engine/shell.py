"""The scheduler's core on a virtual clock: the simulator's counterpart of the live service.

The shell passes events to the core and executes the core's commands, as the live service does; it
makes no scheduling decision. Time jumps from one scheduled call to the next. Calls of equal time
run in the order in which they were scheduled, so a run is deterministic.
"""

import heapq
import math
from collections.abc import Callable, Mapping
from typing import Any

from plexrl.ids import RouterId
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd

FOREVER_S = 1e12
"""A controller timeout that no simulated run reaches."""

NEVER = math.inf

VIRTUAL = "virtual"
"""Address of every worker."""

EventObserver = Callable[[ev.Event, list[cmd.Command], float], None]
"""Receives each event after the core has handled it and before its commands are executed."""

CommandHandler = Callable[[Any], None]
"""Executes commands of one type."""


def ignore(command: cmd.Command) -> None:
    """Ignore a command without an effect in a simulation."""
    del command


class VirtualShell:
    """One core, one clock, and one heap of scheduled calls."""

    def __init__(
        self, config: SchedulerConfig, handlers: Mapping[type[cmd.Command], CommandHandler]
    ) -> None:
        self.core = SchedulerCore(config)
        self.now = 0.0
        self.events = 0
        """Number of events that the core has handled."""
        self.is_over = False
        """Set by the owner when the remaining calls have no effect."""
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0
        self._timer_at = NEVER
        self._observers: list[EventObserver] = []
        self._handlers: dict[type[cmd.Command], CommandHandler] = {
            cmd.AbortOperation: ignore,
            cmd.DiscardBlobs: ignore,
            cmd.SetTimer: self._set_timer,
            **handlers,
        }

    @property
    def pending(self) -> int:
        """Number of scheduled calls, the core's next timer included."""
        return len(self._heap) + (self._timer_at < NEVER)

    def observe(self, observer: EventObserver) -> None:
        """Call `observer` for every later event."""
        self._observers.append(observer)

    def at(self, time: float, callback: Callable[[Any], None], argument: Any = None) -> None:
        """Schedule `callback(argument)`."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, callback, argument))

    def send(self, event: ev.Event) -> None:
        """Pass an event to the core and execute the resulting commands.

        Raises:
            PlexRLError: the core refuses the event; its state is unchanged.
        """
        commands = self.core.handle(event, self.now)
        self.events += 1
        for observer in self._observers:
            observer(event, commands, self.now)
        handlers = self._handlers
        for command in commands:
            handlers[type(command)](command)

    def connect_router(self) -> None:
        """Register a router; without one the core starts no operation."""
        self.send(ev.RouterJoined(router=RouterId("router")))

    def run(self, calls: int) -> int:
        """Run at most so many scheduled calls and timers; returns how many ran."""
        heap, pop, timer_fired = self._heap, heapq.heappop, ev.TimerFired()
        for done in range(calls):
            if self.is_over:
                return done
            if heap and heap[0][0] <= self._timer_at:
                self.now, _, callback, argument = pop(heap)
                callback(argument)
            elif self._timer_at < NEVER:
                self.now, self._timer_at = self._timer_at, NEVER
                self.send(timer_fired)
            else:
                return done
        return calls

    def _set_timer(self, command: cmd.SetTimer) -> None:
        # Not on the heap: most timers are replaced by earlier ones and would accumulate there.
        if command.at < self._timer_at:
            self._timer_at = command.at


def worker_ready_events(command: cmd.LaunchWorkers) -> list[ev.WorkerReady]:
    """The events of a completed launch, one for each rank."""
    return [
        ev.WorkerReady(
            deployment=command.deployment,
            rank=rank.rank,
            incarnation=command.incarnation,
            address=VIRTUAL,
        )
        for rank in command.ranks
    ]


def virtual_config(
    *, ordering: str = "hrrs", anticipation: bool | None = None, **changes: Any
) -> SchedulerConfig:
    """The configuration of a simulated scheduler: the live defaults with a short history. Nothing
    hangs in a simulation, and an operation of a trace may be a whole job."""
    return SchedulerConfig(
        **{"history": 1000, "operation_overdue_s": 0.0, **changes},
        listen=("unix:/-",),
        journal="-",
        operator_key_digest="-",
        ordering=ordering,
        anticipation=anticipation,
    )
