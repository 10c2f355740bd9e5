"""The life of a supervisor: its event loop, its signals, its log."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from plexrl.errors import StorageError
from plexrl.process.children.startup import LOG_FORMAT, ending_signals
from plexrl.process.folders.rotated_log import RotatedLog
from plexrl.process.plain_text import PlainFormatter

LOG_BYTES_MAX = 32 << 20
"""Bound on all files of a supervisor's log."""
ReadyT = TypeVar("ReadyT")


def run_until_end(
    supervise: Callable[[asyncio.Event, Callable[[ReadyT], None]], Awaitable[None]],
    ready: Callable[[ReadyT], None],
    lifeline: Callable[[], None] | None = None,
) -> None:
    """Run `supervise(stop, ready)` in an event loop. A signal, or the return of `lifeline`, which
    runs in a thread, sets `stop`; before `supervise` has called `ready` it is cancelled instead.
    """

    async def run() -> None:
        stop, up = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_ready(what: ReadyT) -> None:
            up.set()
            ready(what)

        serving = asyncio.ensure_future(supervise(stop, on_ready))

        def end() -> None:
            if not up.is_set() and not stop.is_set():
                # A start has no deadline while it makes progress, so it must be cancelled.
                serving.cancel()
            stop.set()

        for sig in ending_signals():
            loop.add_signal_handler(sig, end)
        if lifeline is not None:

            def watch() -> None:
                lifeline()
                with suppress(RuntimeError):  # the loop is closed: it has ended otherwise
                    loop.call_soon_threadsafe(end)

            threading.Thread(target=watch, daemon=True).start()
        try:
            await serving
        except asyncio.CancelledError:
            if not stop.is_set():
                raise

    asyncio.run(run())


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Write the supervisor's log to a rotated file. Raises `StorageError`."""
    try:
        handler = RotatedLog(path, LOG_BYTES_MAX)
    except OSError as error:
        raise StorageError(f"the log {path} cannot be written ({error}): check its disk") from error
    handler.setFormatter(PlainFormatter(LOG_FORMAT))
    logger = logging.getLogger("plexrl")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()
