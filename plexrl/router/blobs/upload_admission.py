"""Bodies on their way into this router: how many bytes of them there may be at a time.

A body is admitted by the length that its request announces, before any of it is taken. One that is
refused is read to its end and dropped, since a client that is still sending would not hear why. One
of which nothing more comes is given up, or a client that died would keep others out for ever.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from plexrl.errors import ConnectionLostError, OverloadedError

RETRY_AFTER_S_MIN = 0.1
RETRY_AFTER_S_MAX = 60.0
BYTES_PER_S_MIN = 16 << 10
"""A client that sends more slowly is taken for one that only holds its connection."""
NEWEST = 0.25
"""Weight of the newest body in the rate."""


class Arrivals:
    """The count of one router."""

    def __init__(self, bytes_max: int, tenant_bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._tenant_bytes_max = tenant_bytes_max
        self._by_tenant: Counter[str] = Counter()
        self._bytes_per_s: float | None = None

    @property
    def bytes_arriving(self) -> int:
        """Announced by the bodies that are on their way."""
        return self._by_tenant.total()

    @contextmanager
    def admit(self, tenant: str, size: int) -> Iterator[None]:
        """Count a body of `size` bytes while it arrives.

        Raises:
            OverloadedError: it would be over the router's bound, or its tenant's.
        """
        self._check(self._by_tenant[tenant], size, self._tenant_bytes_max, f"tenant {tenant!r}")
        self._check(self.bytes_arriving, size, self._bytes_max, "this router")
        self._by_tenant[tenant] += size
        began_at = time.monotonic()
        try:
            yield
        finally:
            self._by_tenant[tenant] -= size
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
            if size:
                self._note(size / max(time.monotonic() - began_at, 1e-6))

    def _check(self, arriving: int, size: int, bytes_max: int, whose: str) -> None:
        # One that is larger than the bound by itself is let in alone.
        over = arriving + size - bytes_max
        if not arriving or over <= 0:
            return
        wait_s = RETRY_AFTER_S_MIN
        if self._bytes_per_s is not None:
            wait_s = min(max(over / self._bytes_per_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)
        raise OverloadedError(
            f"{whose} has {arriving} bytes of requests arriving, and {size} more are over its "
            f"bound of {bytes_max}: send them later, or fewer at a time",
            bound="arriving_bytes_max",
            retry_after_s=round(wait_s, 3),
        )

    def _note(self, bytes_per_s: float) -> None:
        if self._bytes_per_s is None:
            self._bytes_per_s = bytes_per_s
        else:
            self._bytes_per_s += NEWEST * (bytes_per_s - self._bytes_per_s)


async def steady(chunks: AsyncIterator[bytes], stall_s: float) -> AsyncIterator[bytes]:
    """The chunks of a body as they come.

    Raises:
        ConnectionLostError: the client was waited for longer than `stall_s` seconds, and a second
            more for every `BYTES_PER_S_MIN` bytes that had come.
    """
    # Only what the client takes counts, not what a slow disk of ours does.
    left_s = stall_s
    while True:
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(min(left_s, stall_s)):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise ConnectionLostError(
                f"the request's body stalled for {stall_s:g} s, or came more slowly than "
                f"{BYTES_PER_S_MIN} bytes a second: send it again"
            ) from error
        left_s += len(chunk) / BYTES_PER_S_MIN - (time.monotonic() - began_at)
        yield chunk
