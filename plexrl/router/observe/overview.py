"""The cluster's overview for operators' pages: asked at most once in some seconds for each reader,
whatever the number of pages."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.router.observe.health import SCHEDULER_TIMEOUT_S, ClusterHealth
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages.cluster_views import ServiceLevels
from plexrl.wire.messages.overview_views import ClusterOverview, OverviewView, SharesView

if TYPE_CHECKING:
    from plexrl.router.services.authentication import Caller

OVERVIEW_S = 2.0
"""Age of an overview after which it is asked for again."""
SHARES_S = 15.0
"""The same for shares, which are sums over all jobs."""
FAILURE_S = 2.0
"""The same for a question that failed."""
READERS_MAX = 256
"""Tenants whose last answer is kept."""

ViewT = TypeVar("ViewT")


class RecentAnswers(Generic[ViewT]):
    """The last answer for each reader, shared by all its requests within `age_s` seconds."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._asked: OrderedDict[str | None, tuple[float, asyncio.Task[ViewT]]] = OrderedDict()

    async def of(self, reader: str | None, ask: Callable[[], Awaitable[ViewT]]) -> ViewT:
        """The answer for the reader. Raises as the question does."""
        known, now = self._asked.get(reader), time.monotonic()
        if known is None or (known[1].done() and now - known[0] >= self._kept_s(known[1])):
            known = now, asyncio.ensure_future(_answer(ask))
            self._asked[reader] = known
            while len(self._asked) > READERS_MAX:
                self._asked.popitem(last=False)
        return await asyncio.shield(known[1])

    def _kept_s(self, asked: asyncio.Task[ViewT]) -> float:
        """A failure is soon asked for again."""
        has_failed = asked.cancelled() or asked.exception() is not None
        return min(FAILURE_S, self._age_s) if has_failed else self._age_s


async def _answer(ask: Callable[[], Awaitable[ViewT]]) -> ViewT:
    return await ask()


class Overviews:
    """Overviews and shares, as each caller may see them."""

    def __init__(self, scheduler: SchedulerLink, health: ClusterHealth) -> None:
        self._scheduler = scheduler
        self._health = health
        self._overviews = RecentAnswers[ClusterOverview](OVERVIEW_S)
        self._of_all = RecentAnswers[OverviewView](OVERVIEW_S)
        self._levels = RecentAnswers[ServiceLevels](OVERVIEW_S)
        self._shares = RecentAnswers[SharesView](SHARES_S)

    async def overview(self, caller: "Caller") -> ClusterOverview:
        """At most `OVERVIEW_S` old. Raises as `SchedulerLink.call`."""
        return await self._overviews.of(caller.scope, partial(self._ask_overview, caller))

    async def of_all(self) -> OverviewView:
        """All of the cluster, for figures without names, which anybody may ask for; at most
        `OVERVIEW_S` old. Raises as `SchedulerLink.call`."""
        return await self._of_all.of(None, self._ask_of_all)

    async def _ask_of_all(self) -> OverviewView:
        rights = {"tenant": None, "as_operator": True}
        return await self._scheduler.call(m.OVERVIEW, rights, timeout_s=SCHEDULER_TIMEOUT_S)

    async def service_levels(self) -> ServiceLevels:
        """The service levels of all live jobs; at most `OVERVIEW_S` old. Raises as
        `SchedulerLink.call`."""
        return await self._levels.of(None, self._ask_levels)

    async def _ask_levels(self) -> ServiceLevels:
        return await self._scheduler.call(m.SERVICE_LEVELS, {}, timeout_s=SCHEDULER_TIMEOUT_S)

    async def shares(self, caller: "Caller") -> SharesView:
        """At most `SHARES_S` old. Raises as `SchedulerLink.call`."""
        return await self._shares.of(caller.scope, partial(self._ask_shares, caller))

    async def _ask_overview(self, caller: "Caller") -> ClusterOverview:
        found = await self._scheduler.call(m.OVERVIEW, caller.rights)
        public = await self._health.public()
        conditions = public["conditions"]
        if caller.sees_all:
            conditions = await self._health.conditions()
        return {
            **found,
            "conditions": conditions,
            "restarts": public["restarts"],
            "last_restart_at": public["last_restart_at"],
        }

    async def _ask_shares(self, caller: "Caller") -> SharesView:
        return await self._scheduler.call(m.LIST_SHARES, caller.rights)
