"""Serves what a core was at one moment, as a scheduler does: queries are answered, and nothing
changes.

So an operator's page can show a journal without a cluster. Time stands still: ages and estimates
are those of that moment.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from plexrl.errors import ConflictError, UnavailableError
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.service.journal.history.writer import history_writer
from plexrl.scheduler.service.journal.journal import Journal
from plexrl.scheduler.service.service import Service
from plexrl.scheduler.service.shell import Clock, Shell
from plexrl.scheduler.state.messages.events import Event


class StillClock(Clock):
    """A clock that stands."""

    def __init__(self, at: float) -> None:
        super().__init__(at)
        self._at = self.started_at = at

    def now(self) -> float:
        """Always the same time."""
        return self._at


class StillShell(Shell):
    """A shell that refuses requests and ignores reports."""

    async def request(self, event: Event) -> None:
        """Refuse. Raises `ConflictError`."""
        raise ConflictError(
            f"{type(event).__name__} is refused: this is a stored state, and no cluster runs"
        )

    async def report(self, event: Event) -> None:
        """Do nothing: no process of a cluster is there."""
        del event


@asynccontextmanager
async def serving(
    config: SchedulerConfig, core: SchedulerCore, journal: Journal, at: float, label: str
) -> AsyncIterator[Service]:
    """Serve the core as it was `at`, at the addresses of `config`; `label` says what it is, in the
    condition that the page shows."""
    shell = StillShell(core, journal, StillClock(at))
    # Only read: nothing runs it.
    shell.history = history_writer(config, journal, lambda: core, 0)
    shell.fault_conditions.hold(UnavailableError(label))
    service = Service(config, shell)
    await service.listen()
    try:
        yield service
    finally:
        await service.end()
        await asyncio.sleep(0)
