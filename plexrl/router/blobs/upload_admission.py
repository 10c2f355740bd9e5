"""Admission of uploads: a bound on the bytes of request bodies that arrive at a time.

A body is admitted by its declared length, before any of it is read. A refused body is read to its
end and dropped, because a client that is still sending does not read the response. A body that
stalls is abandoned, so that a dead client does not keep others out.
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
"""A client that sends more slowly is treated as stalled."""
NEWEST_WEIGHT = 0.25
"""Weight of the newest body in the average rate."""


class UploadAdmission:
    """Counts the bytes that arrive at one router, by tenant."""

    def __init__(self, bytes_max: int, tenant_bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._tenant_bytes_max = tenant_bytes_max
        self._by_tenant: Counter[str] = Counter()
        self._bytes_per_s: float | None = None

    @property
    def bytes_arriving(self) -> int:
        """Declared bytes of all bodies that are arriving."""
        return self._by_tenant.total()

    @contextmanager
    def admit(self, tenant: str, size: int) -> Iterator[None]:
        """Count a body of `size` bytes while the block runs.

        Raises:
            OverloadedError: the body would exceed the router's or the tenant's bound.
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
                self._update_rate(size / max(time.monotonic() - began_at, 1e-6))

    def _check(self, arriving: int, size: int, bytes_max: int, owner: str) -> None:
        # A body larger than the bound itself is admitted if no other is arriving.
        over = arriving + size - bytes_max
        if not arriving or over <= 0:
            return
        wait_s = RETRY_AFTER_S_MIN
        if self._bytes_per_s is not None:
            wait_s = min(max(over / self._bytes_per_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)
        raise OverloadedError(
            f"{owner} has {arriving} bytes of requests arriving; {size} more exceed the bound of "
            f"{bytes_max}: send them later, or fewer at a time",
            bound="arriving_bytes_max",
            retry_after_s=round(wait_s, 3),
        )

    def _update_rate(self, bytes_per_s: float) -> None:
        if self._bytes_per_s is None:
            self._bytes_per_s = bytes_per_s
        else:
            self._bytes_per_s += NEWEST_WEIGHT * (bytes_per_s - self._bytes_per_s)


async def timed_chunks(chunks: AsyncIterator[bytes], stall_s: float) -> AsyncIterator[bytes]:
    """Yield the chunks of a body as they arrive.

    Raises:
        ConnectionLostError: the waits for the client exceeded `stall_s` seconds plus one second for
            every `BYTES_PER_S_MIN` bytes received.
    """
    # Only the waits for the client count, not the time that our own disk takes.
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
                f"the request's body stalled for {stall_s:g} s, or arrived more slowly than "
                f"{BYTES_PER_S_MIN} bytes a second: send it again"
            ) from error
        left_s += len(chunk) / BYTES_PER_S_MIN - (time.monotonic() - began_at)
        yield chunk
