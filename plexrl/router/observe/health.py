"""What is wrong with the cluster, as far as a router can tell: for probes, tenants and operators.

A condition is `{"code", "message", "since"}`. The scheduler reports those of its journal and of its
database. The supervisor's record says which parts are being started again. The router adds what it
meets itself. Messages may name paths, hosts and parts, so they are for the operator; everybody else
sees codes and times.
"""

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

from plexrl.errors import PlexRLError, StorageFullError, UnavailableError
from plexrl.process.children.restart_log import PartHistory, read_parts
from plexrl.process.conditions import Conditions
from plexrl.router.execution.scheduler_link import SchedulerLink

LOG = logging.getLogger(__name__)

Plain = dict[str, Any]
CACHE_S = 2.0
"""Probes within this time share one look."""
ASK_S = 2.0
FREE_BYTES_MIN = 64 << 20
"""With less room left on its disk the data directory counts as full."""


class ClusterHealth:
    """Looks at most once in `CACHE_S` seconds, however many ask."""

    def __init__(
        self,
        scheduler: SchedulerLink,
        data_dir: Path,
        parts_file: Path | None,
        free_bytes_min: int = FREE_BYTES_MIN,
    ) -> None:
        self._scheduler = scheduler
        self._data_dir = data_dir
        self._parts_file = parts_file
        self._free_bytes_min = free_bytes_min
        self._looking: asyncio.Task[list[Plain]] | None = None
        self._looked_at = -CACHE_S
        self._own = Conditions()
        """That this router found itself."""

    async def public(self) -> Plain:
        """For anybody, without a key: codes, times and counts, no names and no messages."""
        found = await self.conditions()
        parts = self.parts()
        restarts = [each.last_restart_at for each in parts.values() if each.last_restart_at]
        return {
            "ok": not found,
            "scheduler": self._scheduler.is_connected,
            "conditions": [{"code": each["code"], "since": each["since"]} for each in found],
            "restarts": sum(each.restarts for each in parts.values()),
            "last_restart_at": max(restarts, default=None),
        }

    def parts(self) -> dict[str, PartHistory]:
        """The parts that ended since the cluster was started."""
        return {} if self._parts_file is None else read_parts(self._parts_file)

    async def conditions(self) -> list[Plain]:
        """All that is wrong now."""
        now = time.monotonic()
        if self._looking is None or (self._looking.done() and now - self._looked_at >= CACHE_S):
            self._looked_at = now
            self._looking = asyncio.create_task(self._look())
        return await asyncio.shield(self._looking)

    async def _look(self) -> list[Plain]:
        found = [
            {
                "code": "part_down",
                "message": f"{part} ended and is being started again",
                "since": history.down_since,
            }
            for part, history in self.parts().items()
            if history.down_since is not None
        ]
        scheduler = await self._ask_scheduler()
        self._look_at_disk()
        return [*found, *scheduler, *self._own.view()]

    async def _ask_scheduler(self) -> list[Plain]:
        try:
            answer = await self._scheduler.call("conditions", {}, timeout_s=ASK_S)
        except PlexRLError as error:
            self._own.hold(UnavailableError(f"the scheduler does not answer: {error.message}"))
            return []
        self._own.clear(UnavailableError.code)
        return list(answer["conditions"])

    def _look_at_disk(self) -> None:
        try:
            disk = os.statvfs(self._data_dir)
        except OSError as error:
            LOG.error("the data directory %s cannot be looked at: %s", self._data_dir, error)
            return
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes >= self._free_bytes_min:
            self._own.clear(StorageFullError.code)
            return
        self._own.hold(
            StorageFullError(
                f"the disk of {self._data_dir} has {free_bytes >> 20} MiB left: free some space; "
                "work that needs room waits for it"
            )
        )
