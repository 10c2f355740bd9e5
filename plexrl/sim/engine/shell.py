"""A virtual clock and the scheduler's own core on it: the second shell round the core.

It does what the live shell does (take an event in, hand it to the core, carry the commands out) and
nothing else: no rule of scheduling stands here. Time jumps from one happening to the next;
happenings of equal time come in the order they were planned in, so a run repeats itself exactly.
"""

import heapq
import math
from collections.abc import Callable, Mapping
from typing import Any

from plexrl.ids import RouterId
from plexrl.scheduler import SchedulerConfig, SchedulerCore
from plexrl.scheduler.state import commands as cmd
from plexrl.scheduler.state import events as ev

FOREVER_S = 1e12
"""Silence that no virtual controller ever reaches."""

NEVER = math.inf

VIRTUAL = "virtual"
"""Address of every worker."""

Watcher = Callable[[ev.Event, list[cmd.Command], float], None]
"""Told of each event when the core has answered it, and before its commands are carried out."""

Carrier = Callable[[Any], None]
"""Carries out a command of one type."""


def _nothing(command: cmd.Command) -> None:
    """Nothing virtual holds blobs, or runs what can be ended early."""
    del command


class VirtualShell:
    """One core, one clock, one heap of what is to happen."""

    def __init__(self, config: SchedulerConfig, carriers: Mapping[type[cmd.Command], Carrier]):
        self.core = SchedulerCore(config)
        self.now = 0.0
        self.events = 0
        """Told to the core."""
        self.is_over = False
        """Nothing that is still planned matters."""
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0
        self._timer_at = NEVER
        self._watchers: list[Watcher] = []
        self._carriers: dict[type[cmd.Command], Carrier] = {
            cmd.StopWorkers: _nothing,
            cmd.ReleaseState: _nothing,
            cmd.PrefetchState: _nothing,
            cmd.AbortOperation: _nothing,
            cmd.DiscardBlobs: _nothing,
            cmd.SetTimer: self._set_timer,
            **carriers,
        }

    @property
    def planned(self) -> int:
        """Happenings to come, and the core's next timer."""
        return len(self._heap) + (self._timer_at < NEVER)

    def watch(self, watcher: Watcher) -> None:
        """Have `watcher` told of every event from now on."""
        self._watchers.append(watcher)

    def at(self, time: float, happen: Callable[[Any], None], subject: Any = None) -> None:
        """Plan `happen(subject)`."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, happen, subject))

    def send(self, event: ev.Event) -> None:
        """Tell the core, and carry out what it asks for.

        Raises:
            PlexRLError: the core refuses the event, and nothing has changed.
        """
        commands = self.core.handle(event, self.now)
        self.events += 1
        for watcher in self._watchers:
            watcher(event, commands, self.now)
        carriers = self._carriers
        for command in commands:
            carriers[type(command)](command)

    def connect_router(self) -> None:
        """Without a router the core keeps its runs to itself."""
        self.send(ev.RouterJoined(router=RouterId("router")))

    def run(self, happenings: int) -> int:
        """Let so many things happen at most, until it is over; returns how many did."""
        heap, pop, timer_fired = self._heap, heapq.heappop, ev.TimerFired()
        for done in range(happenings):
            if self.is_over:
                return done
            if heap and heap[0][0] <= self._timer_at:
                self.now, _, happen, subject = pop(heap)
                happen(subject)
            elif self._timer_at < NEVER:
                self.now, self._timer_at = self._timer_at, NEVER
                self.send(timer_fired)
            else:
                return done
        return happenings

    def _set_timer(self, command: cmd.SetTimer) -> None:
        # Not among the happenings: most timers are overtaken by earlier ones, and would pile up.
        if command.at < self._timer_at:
            self._timer_at = command.at


def worker_ready_events(command: cmd.LaunchWorkers) -> list[ev.WorkerReady]:
    """What a launch comes to, once its processes listen."""
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
    """The configuration of a simulated scheduler: the live defaults, and nothing kept for long."""
    return SchedulerConfig(
        **{"history": 1000, **changes},
        listen="-",
        journal="-",
        operator_key_digest="-",
        ordering=ordering,
        anticipation=anticipation,
    )
