"""Quotes: a child process simulates the cluster's next hours, off the scheduler's and the router's
turn.

The scheduler gives a small plan of the cluster (`READ_PLAN`); the child gets it on its standard
input and answers on its standard output. A quote changes nothing, so after a crash of any part it
is asked again. It cannot overload a router: one child runs at a time, it bounds its own processor
time and memory, it is killed after `QUOTE_S_MAX` and with its router, and after a quote its tenant
is refused for as long as the quote took. Whoever is refused is told when to ask again.
"""

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from plexrl.errors import ExecutionError, OverloadedError, from_wire
from plexrl.process.children.lifeline import environment_of_child
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages.overview_views import QuoteView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plexrl.router.execution.scheduler_link import SchedulerLink

MODULE = "plexrl.sim.search.quote"
"""The child's module. It is above this package, which imports nothing of it."""
QUOTE_S_MAX = 240.0
BUSY_S = 5.0
"""When to ask again while another quote is made."""
TENANTS_MAX = 10_000
"""Tenants whose last quote is remembered."""


class Quotes:
    """Makes one quote at a time."""

    def __init__(
        self, scheduler: "SchedulerLink", *, module: str = MODULE, seconds_max: float = QUOTE_S_MAX
    ) -> None:
        self._scheduler = scheduler
        self._module = module
        self._seconds_max = seconds_max
        self._is_busy = False
        self._not_before: dict[str, float] = {}
        """Monotonic time until which a tenant is refused."""

    async def answer(
        self, tenant: str, asked: "Mapping[str, object]", price: float | None
    ) -> QuoteView:
        """The quote of the job that `asked` describes.

        Raises:
            OverloadedError: another quote is being made, or the tenant had one just now.
            PlexRLError: the cluster refuses the job.
        """
        self._check(tenant)
        self._is_busy = True
        began_at = time.monotonic()
        try:
            plan = await self._scheduler.call(m.READ_PLAN, {"tenant": tenant, **asked})
            return await self._computed(plan["plan"], price)
        finally:
            self._is_busy = False
            self._rest(tenant, time.monotonic() - began_at)

    def _check(self, tenant: str) -> None:
        if self._is_busy:
            raise OverloadedError(
                "another quote is being made: ask again in a moment", retry_after_s=BUSY_S
            )
        left_s = self._not_before.get(tenant, 0.0) - time.monotonic()
        if left_s > 0.0:
            raise OverloadedError(
                f"tenant {tenant!r} had a quote just now: ask again in {left_s:.1f} s",
                retry_after_s=left_s,
            )

    def _rest(self, tenant: str, took_s: float) -> None:
        """Refuse the tenant for as long as its quote took."""
        if len(self._not_before) >= TENANTS_MAX:
            del self._not_before[next(iter(self._not_before))]
        self._not_before[tenant] = time.monotonic() + took_s

    async def _computed(self, plan: str, price: float | None) -> QuoteView:
        task = msgspec.json.encode({"plan": msgspec.Raw(plan.encode()), "price": price})
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment_of_child(),
        )
        try:
            async with asyncio.timeout(self._seconds_max):
                found, _ = await child.communicate(task)
        except TimeoutError:
            found = b""
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        return _decoded(found, child.returncode)


def _decoded(found: bytes, code: int | None) -> QuoteView:
    """The child's answer. Raises the error that it answers with, or the typed one of its end."""
    if not found:
        if code is not None and code < 0:
            raise OverloadedError(
                "this cluster has more work than a quote may simulate: ask when there is less",
                retry_after_s=60.0,
            )
        raise ExecutionError("the process that makes quotes ended without an answer: report it")
    answer: Any = msgspec.json.decode(found)
    if "error" in answer:
        raise from_wire(answer["error"])
    view: QuoteView = answer
    return view
