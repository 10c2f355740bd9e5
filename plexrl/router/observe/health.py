"""The cluster's health as far as a router sees it: for probes, tenants and operators.

A condition is `{"code", "message", "since"}`. The scheduler reports those of its journal and of its
database. The supervisor's record lists the parts that are being restarted. The router adds what it
finds itself. Messages may name paths, hosts and parts, so only the operator sees messages; other
callers see codes and times.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from plexrl.errors import PlexRLError, StorageFullError, UnavailableError
from plexrl.process.children.restart_log import PartHistory, read_parts
from plexrl.process.conditions import Conditions, ConditionView
from plexrl.process.folders.folder_watch import Finding, FolderWatch
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages import WorkerName
from plexrl.wire.messages.cluster_views import HealthView

LOG = logging.getLogger(__name__)

CACHE_S = 2.0
"""Probes within this time share one check."""
SCHEDULER_TIMEOUT_S = 2.0
UNREACHABLE_S = 15.0
"""After so long without a connection a worker is named: most are only being replaced."""
NAMED_MAX = 10
FREE_BYTES_MIN = 64 << 20
"""Free space on the data directory's disk below which the disk counts as full."""


class ClusterHealth:
    """Checks the health at most once in `CACHE_S` seconds, whatever the number of requests."""

    def __init__(
        self,
        scheduler: SchedulerLink,
        data_dir: Path,
        parts_file: Path | None,
        free_bytes_min: int = FREE_BYTES_MIN,
        unreachable: Callable[[], Sequence[tuple[WorkerName, float]]] = tuple,
    ) -> None:
        """`unreachable`: as `Executor.unreachable`."""
        self._scheduler = scheduler
        self._data_dir = data_dir
        self._parts_file = parts_file
        self._free_bytes_min = free_bytes_min
        self._checking: asyncio.Task[list[ConditionView]] | None = None
        self._checked_at = -CACHE_S
        self._unreachable = unreachable
        self._folders = FolderWatch("this router", (data_dir,))
        self._folder_since: dict[Finding, float] = {}
        self._own = Conditions()
        """Conditions that this router found itself."""

    async def public(self) -> HealthView:
        """Health without a key: codes, times and counts, no names and no messages."""
        found = await self.conditions()
        parts = self.parts()
        restarts = [part.last_restart_at for part in parts.values() if part.last_restart_at]
        return {
            "ok": not found,
            "scheduler": self._scheduler.is_connected,
            "conditions": [{"code": each["code"], "since": each["since"]} for each in found],
            "restarts": sum(part.restarts for part in parts.values()),
            "last_restart_at": max(restarts, default=None),
        }

    def parts(self) -> dict[str, PartHistory]:
        """The parts that have ended at least once since the cluster's start."""
        return {
            part: history
            for part, history in self._recorded().items()
            if history.restarts or history.down_since is not None
        }

    def _recorded(self) -> dict[str, PartHistory]:
        return {} if self._parts_file is None else read_parts(self._parts_file)

    async def conditions(self) -> list[ConditionView]:
        """All current conditions."""
        now = time.monotonic()
        if self._checking is None or (self._checking.done() and now - self._checked_at >= CACHE_S):
            self._checked_at = now
            self._checking = asyncio.create_task(self._check())
        return await asyncio.shield(self._checking)

    async def _check(self) -> list[ConditionView]:
        recorded = self._recorded()
        parts: list[ConditionView] = [
            {
                "code": "part_down",
                "message": f"{part} ended and is being restarted",
                "since": history.down_since,
            }
            for part, history in recorded.items()
            if history.down_since is not None
        ]
        parts += [
            {
                "code": "part_stuck",
                "message": f"{part} runs and does not answer: it is replaced if it goes on so",
                "since": history.stuck_since,
            }
            for part, history in recorded.items()
            if history.stuck_since is not None
        ]
        scheduler = await self._scheduler_conditions()
        folders = await self._folder_conditions()
        if not folders:
            self._check_disk()
        return [*parts, *scheduler, *folders, *self._unreachable_workers(), *self._own.view()]

    async def _folder_conditions(self) -> list[ConditionView]:
        now, known = time.time(), self._folder_since
        found = await self._folders.look()
        self._folder_since = {each: known.get(each, now) for each in found}
        return [
            {"code": code, "message": message, "since": since}
            for (code, message), since in self._folder_since.items()
        ]

    def _unreachable_workers(self) -> list[ConditionView]:
        now = time.time()
        found = [each for each in self._unreachable() if now - each[1] > UNREACHABLE_S]
        if not found:
            return []
        names = ", ".join(f"{each.deployment} rank {each.rank}" for each, _ in found[:NAMED_MAX])
        message = (
            f"no connection to {len(found)} workers, whose operations wait: {names}: see to the "
            "network between this router and their nodes"
        )
        return [
            {
                "code": "workers_unreachable",
                "message": message,
                "since": min(since for _, since in found),
            }
        ]

    async def _scheduler_conditions(self) -> list[ConditionView]:
        try:
            reply = await self._scheduler.call(m.CONDITIONS, {}, timeout_s=SCHEDULER_TIMEOUT_S)
        except PlexRLError as error:
            self._own.hold(UnavailableError(f"the scheduler does not reply: {error.message}"))
            return []
        self._own.clear(UnavailableError.code)
        conditions: list[ConditionView] = reply["conditions"]
        return conditions

    def _check_disk(self) -> None:
        try:
            disk = os.statvfs(self._data_dir)
        except OSError as error:
            LOG.error("the data directory %s cannot be read: %s", self._data_dir, error)
            return
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes >= self._free_bytes_min:
            self._own.clear(StorageFullError.code)
            return
        self._own.hold(
            StorageFullError(
                f"the disk of {self._data_dir} has {free_bytes >> 20} MiB left: free some space; "
                "work that needs space waits for it"
            )
        )
