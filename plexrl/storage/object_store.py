"""An object store behind an `fsspec` URL.

What is needed of the store: an object appears as a whole or not at all, and is seen by every reader
once its write has returned (read-after-write consistency). A rename is not needed. Objects are
replaced and deleted one by one.

Failed calls are repeated for some seconds; then they raise `StoreUnavailableError`, and may or may
not have had their effect. All methods block and are thread-safe.
"""

import errno
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plexrl.errors import InvalidRequestError, PlexRLError, StorageFullError, StoreUnavailableError
from plexrl.process.folders.disk_errors import NO_SPACE

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

LOG = logging.getLogger(__name__)

Result = TypeVar("Result")

ATTEMPTS = 4
BACKOFF_S = 0.2
"""Delay before the second attempt; doubles for each later one."""
ATTEMPTS_S = 10.0
"""No attempt begins later than this after the first one."""
REQUEST_S = 5.0
"""Longest wait for the answer to a small request."""
BYTES_PER_S_MIN = 256 << 10
"""A request that sends or reads bytes may take longer by their number divided by this."""
CONNECT_S, SILENCE_S = 5.0, 15.0
"""Longest time to connect to an S3 store, and longest pause in its answer to any request."""
RETRY_AFTER_S = 2.0
REQUESTS_MAX = 16
"""Concurrent requests of one `ObjectStore`."""
CLOCK_DIFFERS = "RequestTimeTooSkewed"
"""S3's code for a request of a machine whose clock is more than 15 minutes from the store's."""
RANGE_BYTES = 16 << 20
"""Largest range of one request."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object in a listing."""

    key: str
    """Relative to the store's URL."""
    nbytes: int
    modified_s: float
    """Time of the last write by the store's clock, in seconds since the epoch."""


class ObjectStore:
    """The objects below one URL. A key is a path relative to the URL."""

    def __init__(self, url: str) -> None:
        """Connects at the first request.

        Raises:
            InvalidRequestError: the package of this protocol is not installed.
        """
        self.url = url.rstrip("/")
        self.filesystem, self._root = open_filesystem(url)
        self._threads = ThreadPoolExecutor(REQUESTS_MAX, thread_name_prefix="object-store")
        self._closing = threading.Event()

    def path(self, key: str) -> str:
        """The object's path in `filesystem`."""
        return f"{self._root}/{key}"

    def write(self, key: str, data: bytes) -> None:
        """Store an object, in place of one of the same key. Raises `StoreUnavailableError`."""
        limit = self.limit(len(data))
        self.call(f"write {key}", lambda: self.filesystem.pipe_file(self.path(key), data, **limit))

    def write_file(self, key: str, path: Path) -> None:
        """Store a file's bytes, a large file in several parts at a time. Raises as `write`."""
        limit = self.limit(path.stat().st_size)
        self.call(
            f"write {key}", lambda: self.filesystem.put_file(str(path), self.path(key), **limit)
        )

    def create(self, key: str, data: bytes) -> bool:
        """Store an object if there is none of this key; returns whether it was stored.

        After a repeated attempt, False may also mean that this call's first attempt stored it. A
        store without conditional writes replaces the object: see `has_conditional_writes`.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

        def attempt() -> bool:
            try:
                self.filesystem.pipe_file(
                    self.path(key), data, mode="create", **self.limit(len(data))
                )
            except FileExistsError:
                return False
            except OSError as error:
                if error_code(error) in ("PreconditionFailed", "412"):
                    return False
                raise
            return True

        return self.call(f"create {key}", attempt)

    def has_conditional_writes(self, key: str) -> bool:
        """Whether the store refuses `create` of an object that exists. Writes the object `key`."""
        self.write(key, b"1")
        return not self.create(key, b"2")

    def read(self, key: str) -> bytes:
        """An object's bytes. Raises `FileNotFoundError` and as `write`."""

        def attempt() -> bytes:
            found: bytes = self.filesystem.cat_file(self.path(key))
            return found

        return self.call(f"read {key}", attempt)

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        """The bytes `start` to `stop` of an object that has them. Raises as `read`."""

        def attempt() -> bytes:
            limit = self.limit(stop - start)
            found: bytes = self.filesystem.cat_file(self.path(key), start=start, end=stop, **limit)
            if len(found) != stop - start:
                raise OSError(errno.EIO, f"{len(found)} of {stop - start} bytes were read")
            return found

        return self.call(f"read {key}", attempt)

    def read_ranges(
        self,
        ranges: Sequence[tuple[str, int, int]],
        take: Callable[[str, int, bytes], None],
    ) -> None:
        """Read `(key, start, stop)` ranges, several at a time. `take(key, start, data)` is called
        for each part of a range, on any thread. Raises as `read`."""
        parts = [
            (key, first, min(first + RANGE_BYTES, stop))
            for key, start, stop in ranges
            for first in range(start, stop, RANGE_BYTES)
        ]
        self.each(lambda part: take(part[0], part[1], self.read_range(*part)), parts)

    def size(self, key: str) -> int:
        """An object's size in bytes. Raises as `read`."""
        return self.describe(key).nbytes

    def describe(self, key: str) -> StoredObject:
        """An object's size and time. Raises as `read`."""
        found: dict[str, Any] = self.call(
            f"look up {key}", lambda: self.filesystem.info(self.path(key), **self.limit(0))
        )
        return StoredObject(key, int(found["size"] or 0), _modified(found))

    def find(self, prefix: str) -> list[StoredObject]:
        """All objects below the folder `prefix`, by key. Raises `StoreUnavailableError`."""

        def attempt() -> dict[str, dict[str, Any]]:
            found: dict[str, dict[str, Any]] = self.filesystem.find(
                self.path(prefix).rstrip("/"), detail=True
            )
            return found

        try:
            listed = self.call(f"list {prefix}", attempt)
        except FileNotFoundError:
            return []
        start = len(self._root) + 1
        return [
            StoredObject(path[start:], int(info["size"] or 0), _modified(info))
            for path, info in sorted(listed.items())
            # `find` returns the folder itself if its first object is written meanwhile.
            if info["type"] != "directory"
        ]

    def folders(self, prefix: str) -> list[str]:
        """Names directly below the folder `prefix` that have objects below them. Raises as
        `find`."""

        def attempt() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = self.filesystem.ls(
                self.path(prefix).rstrip("/"), detail=True
            )
            return found

        try:
            listed = self.call(f"list {prefix}", attempt)
        except FileNotFoundError:
            return []
        found = [each["name"] for each in listed if each["type"] == "directory"]
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that do not exist are left out. Raises `StoreUnavailableError`."""
        self.each(self._delete, list(keys))

    def each(self, work: Callable[[Any], object], items: Sequence[Any]) -> None:
        """Call `work` for all items, several at a time; the first error is raised when all calls
        that had begun have ended."""
        if len(items) == 1:
            work(items[0])
            return
        futures = [self._threads.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
            for future in futures:
                if not future.cancelled():
                    future.exception()

    def call(self, what: str, attempt: Callable[[], Result]) -> Result:
        """Repeat a request until it succeeds or the attempts are used up.

        Raises:
            FileNotFoundError: there is no such object or bucket.
            StorageFullError: the store is full.
            StoreUnavailableError: the last attempt failed.
        """
        began = time.monotonic()
        for number in range(ATTEMPTS):
            try:
                return attempt()
            except (FileNotFoundError, PlexRLError):
                raise
            # Each implementation of fsspec has exceptions of its own.
            except Exception as error:
                if isinstance(error, OSError) and error.errno in NO_SPACE:
                    raise StorageFullError(
                        f"{self.url} is full ({error}): free space there; the same request "
                        "succeeds then",
                        retry_after_s=RETRY_AFTER_S,
                    ) from error
                is_last = number + 1 == ATTEMPTS or time.monotonic() - began > ATTEMPTS_S
                if is_last or isinstance(error, PermissionError) or self._closing.is_set():
                    raise self.unavailable(what, error) from error
                LOG.info("attempt %d to %s in %s: %r", number + 1, what, self.url, error)
                self._closing.wait(BACKOFF_S * 2**number * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable")

    def limit(self, nbytes: int) -> dict[str, float]:
        """The time limit of one request for `nbytes`, as an argument of `filesystem`'s methods.

        The limits of an S3 client leave out the time in which it sends: without this one, a write
        to a store that hangs would never end.
        """
        if not self.filesystem.async_impl:
            return {}
        return {"timeout": REQUEST_S + nbytes / BYTES_PER_S_MIN}

    def unavailable(self, what: str, error: BaseException) -> StoreUnavailableError:
        """The error of a failed request."""
        mend = "check that the store runs and that this machine reaches it"
        if error_code(error) == CLOCK_DIFFERS:
            mend = "set this machine's clock, for example with `timedatectl set-ntp true`"
        elif isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
            mend = "check the credentials in the environment of the cluster's processes"
        no_answer = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
        return StoreUnavailableError(
            f"the object store {self.url} could not {what} ({str(error) or no_answer}): "
            f"{mend}; the same request succeeds then",
            retry_after_s=RETRY_AFTER_S,
        )

    def close(self) -> None:
        """End repeated attempts, and wait for the running requests."""
        self._closing.set()
        self._threads.shutdown(cancel_futures=True)

    def _delete(self, key: str) -> None:
        def attempt() -> None:
            self.filesystem.rm_file(self.path(key), **self.limit(0))

        try:
            self.call(f"delete {key}", attempt)
        except FileNotFoundError:
            return


def open_filesystem(url: str) -> tuple["AbstractFileSystem", str]:
    """The file system of an URL, and the URL's path in it.

    Raises:
        InvalidRequestError: the package of this protocol is not installed.
    """
    protocol = url.partition("://")[0]
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if protocol in ("s3", "s3a"):
        # `ObjectStore` repeats failed requests. Some stores accept equal parts only.
        waits = {"connect_timeout": CONNECT_S, "read_timeout": SILENCE_S}
        options |= {"config_kwargs": {"retries": {"total_max_attempts": 1}, **waits}}
        options |= {"fixed_upload_size": True}
    try:
        import fsspec

        configured = fsspec.config.conf.get(protocol, {})
        options = {name: value for name, value in options.items() if name not in configured}
        filesystem, root = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise InvalidRequestError(
            f"object stores of {protocol}:// cannot be used ({error}): install plexrl[s3], or the "
            "fsspec package of that protocol"
        ) from error
    if protocol in ("s3", "s3a"):
        filesystem.retries = 1
    return filesystem, str(root).rstrip("/")


def error_code(error: BaseException) -> str:
    """The store's own code of an error, or ''."""
    response = getattr(error.__cause__ or error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _modified(info: dict[str, Any]) -> float:
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            return datetime.fromisoformat(value).timestamp()
    # A store that reports no times: no object is ever old enough to be collected.
    return time.time()
