"""Calls of routers for views of the whole cluster.

Long answers are made in steps. Between two steps the scheduler handles what has arrived, so that a
view of many jobs delays no operation.
"""

import asyncio
from collections.abc import Iterator
from typing import Final

import msgspec

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.ids import JobId
from plexrl.scheduler.accounting.sharing import sharing_view
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.queries.overview.gpu_states import overview
from plexrl.scheduler.queries.overview.job_times import TimesReader
from plexrl.scheduler.queries.overview.lanes import LanesReader
from plexrl.scheduler.queries.overview.planned_jobs import LiveJobsReader, cluster_plan
from plexrl.scheduler.queries.overview.queue import LISTS, page, row
from plexrl.scheduler.queries.overview.shares import Bills
from plexrl.scheduler.queries.overview.totals import TotalsReader
from plexrl.scheduler.rules.lookups import unknown_job
from plexrl.scheduler.service.shell import Shell
from plexrl.scheduler.state.messages import calls
from plexrl.scheduler.state.messages.calls import Ask, Scope
from plexrl.scheduler.state.records import Job
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages import cluster_views as cv
from plexrl.wire.messages import overview_views as ov

ARCHIVE_S: Final = 10.0
"""Longest wait for the archive; lanes show what it would have told as unknown."""
JOBS_PER_STEP: Final = 2000
"""A step over so many jobs takes about a millisecond."""


class OverviewCalls:
    """Calls for views of the whole cluster; a tenant sees its own jobs."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def requests(self) -> dict[str, Ask]:
        """Calls on behalf of a tenant or an operator."""
        return dict(
            (
                calls.on_request(m.STATUS, calls.Nothing, self._status),
                calls.on_request(m.OVERVIEW, calls.Nothing, self._overview),
                calls.on_request(m.READ_LANES, calls.ReadLanes, self._lanes),
                calls.on_request(m.READ_QUEUE, calls.ReadQueue, self._queue),
                calls.on_request(m.READ_PLAN, calls.ReadPlan, self._plan),
                calls.on_request(m.JOB_TIMES, calls.OneJob, self._times),
                calls.on_request(m.LIST_SHARES, calls.Nothing, self._shares),
            )
        )

    @property
    def _core(self) -> SchedulerCore:
        return self._shell.core

    async def _status(self, scope: Scope, _: calls.Nothing) -> cv.ClusterView:
        reader = TotalsReader(self._core.cluster.state, scope)
        await self._read(reader.steps(lambda: self._core.cluster))
        view = reader.view(self._core.cluster, self._now())
        return view if scope is not None else {**view, **self._shell.faults()}

    async def _overview(self, scope: Scope, _: calls.Nothing) -> ov.OverviewView:
        view = overview(self._core.cluster, scope, self._now())
        if scope is None:
            view["operations"] = self._shell.operation_totals.views()
            view["journal"] = self._shell.journal_view()
        return view

    async def _lanes(self, scope: Scope, call: calls.ReadLanes) -> ov.LanesView:
        if not (call.seconds > 0.0 and call.until_s >= 0.0 and call.first >= 0):
            raise InvalidRequestError("a window has seconds > 0, until_s >= 0 and first >= 0")
        until = self._now() - call.until_s
        window = until - call.seconds, until
        reader = LanesReader(self._core.cluster, scope, window, call.first)
        await self._read(reader.read_memory(lambda: self._core.cluster))
        await self._add_earlier(reader, scope)
        await self._read(reader.steps())
        return reader.view()

    async def _add_earlier(self, reader: LanesReader, scope: Scope) -> None:
        """Add what the archive has of the window, if it does not answer late: lanes do without."""
        history, window = self._shell.history, reader.earlier
        if history is None or window is None:
            return
        try:
            async with asyncio.timeout(ARCHIVE_S):
                found = await history.runs(*window, reader.pixel_s, scope)
        except (TimeoutError, PlexRLError):
            return
        await self._read(reader.add_earlier(found.runs, found.covered))

    async def _queue(self, scope: Scope, call: calls.ReadQueue) -> ov.QueueView:
        if call.which not in LISTS:
            raise InvalidRequestError(f"there is no list {call.which!r}: name one of {LISTS}")
        first = max(0, call.first)
        window = first, first + max(1, min(call.limit, ov.QUEUE_PAGE_MAX))
        total, entries = page(self._core.cluster, call.which, scope, self._now(), window)
        rows: list[ov.QueuedView] = []
        for entry in entries:
            await self._pause()
            view = row(self._core.cluster, entry, self._now(), sees_all=scope is None)
            if view is not None:
                rows.append(view)
        return {"now": self._now(), "total": total, "first": first, "rows": rows}

    async def _plan(self, scope: Scope, call: calls.ReadPlan) -> ov.PlanView:
        if scope is None:
            raise InvalidRequestError("a quote is for one tenant: name it")
        if call.like is not None and scope != self._core.tenant_of_job(call.like):
            raise unknown_job(call.like)
        reader, now = LiveJobsReader(self._core.cluster.state), self._now()
        await self._read(reader.steps(lambda: self._core.cluster.state, now))
        plan = cluster_plan(self._core.cluster, scope, call, now, reader.jobs)
        return {"plan": msgspec.json.encode(plan).decode()}

    async def _times(self, scope: Scope, call: calls.OneJob) -> ov.JobTimesView:
        if scope not in (None, self._core.tenant_of_job(call.job)):
            raise unknown_job(call.job)
        state = self._core.cluster.state
        reader = TimesReader(state, state.job(call.job))
        await self._read(reader.steps(lambda: self._core.cluster))
        return reader.view(self._core.cluster.state)

    async def _shares(self, scope: Scope, _: calls.Nothing) -> ov.SharesView:
        bills = Bills()
        names = list(self._core.cluster.state.jobs)
        for at in range(0, len(names), JOBS_PER_STEP):
            bills.add(self._jobs(names[at : at + JOBS_PER_STEP], scope))
            await self._pause()
        cluster, now = self._core.cluster, self._now()
        bills.add_savings(sharing_view(cluster.state, scope, now))
        return {"now": now, "tenants": bills.views(cluster, scope, now)}

    def _jobs(self, names: list[JobId], scope: Scope) -> list[Job]:
        """The jobs of these names that are still remembered, and that the caller may see."""
        jobs = self._core.cluster.state.jobs
        found = (jobs.get(name) for name in names)
        return [job for job in found if job is not None and scope in (None, job.tenant)]

    async def _read(self, steps: Iterator[None]) -> None:
        """Make an answer in its steps."""
        for _ in steps:
            await self._pause()

    async def _pause(self) -> None:
        """Let the scheduler handle what has arrived."""
        await asyncio.sleep(0)
        await self._shell.wait_until_consistent()

    def _now(self) -> float:
        return self._shell.clock.now()
