"""Files that are replaced while processes run, such as certificates.

A process asks for what was loaded whenever it needs it; files that have changed are loaded again
then. Files that cannot be used, as in the middle of a replacement, leave the former ones in use.
"""

import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from plexrl.errors import InvalidRequestError

LOG = logging.getLogger(__name__)

LoadedT = TypeVar("LoadedT")
_Stamp = tuple[tuple[int, int, int], ...]


class FollowedFiles(Generic[LoadedT]):
    """The result of a function of files, made anew when they change. Thread-safe."""

    def __init__(self, paths: Sequence[str], load: Callable[[], LoadedT]) -> None:
        """`load` reads the files, and raises `InvalidRequestError` if they cannot be used.

        Raises:
            InvalidRequestError: the files cannot be used.
        """
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()
        self._problem = ""
        self._stamp = self._stamp_now()
        self._loaded = load()

    def newest(self) -> LoadedT:
        """What was made of the files as they are now, or as they were when they last were valid."""
        with self._lock:
            # Before the files are read: a change in between is found the next time.
            stamp = self._stamp_now()
            if stamp == self._stamp:
                return self._loaded
            try:
                self._loaded, self._stamp, self._problem = self._load(), stamp, ""
                LOG.info("%s: the new files are used from now on", ", ".join(self._paths))
            except InvalidRequestError as error:
                if error.message != self._problem:
                    LOG.warning("the former files are used for now: %s", error)
                self._problem = error.message
            return self._loaded

    def _stamp_now(self) -> _Stamp:
        # From a list: CPython fails if `gc.get_referrers` sees a tuple that a generator fills.
        return tuple([_stamp(path) for path in self._paths])


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        found = Path(path).stat()
    except OSError:
        # `load` finds out whether the file is needed.
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def renew_at_handshakes(context: ssl.SSLContext, newest: Callable[[], ssl.SSLContext]) -> None:
    """Let a server that keeps `context` use the newest one for each handshake."""

    def use(connection: ssl.SSLObject, server_name: str | None, former: ssl.SSLContext) -> None:
        del server_name, former
        connection.context = newest()

    context.sni_callback = use
