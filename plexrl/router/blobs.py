"""The blob store: payloads and results, each a file that is written once and then only read.

A name is published by a rename, so whoever finds a blob finds it whole. Payloads outlive the router
that took them in, which is what lets another one carry the operation out.
"""

import asyncio
import os
import time
from pathlib import Path
from urllib.parse import quote

from plexrl.errors import StorageError, UnknownOperationError
from plexrl.ids import BlobRef

RESULT_SUFFIX = ".out"
"""Ends the name of every result."""

INLINE_BYTES_MAX = 256 << 10
"""Up to this size file calls are made on the event loop: a thread would cost more."""


class BlobStore:
    """Blobs under one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def write(self, ref: BlobRef, body: bytes) -> None:
        """Store a blob; the same name again is stored again.

        Raises:
            StorageError: the directory cannot be written.
        """
        if len(body) <= INLINE_BYTES_MAX:
            self._write(ref, body)
        else:
            await asyncio.to_thread(self._write, ref, body)

    async def read(self, ref: BlobRef) -> bytes:
        """A blob's bytes.

        Raises:
            UnknownOperationError: it has been discarded.
        """
        path = self._path(ref)
        try:
            if path.stat().st_size <= INLINE_BYTES_MAX:
                return path.read_bytes()
            return await asyncio.to_thread(path.read_bytes)
        except FileNotFoundError as error:
            raise UnknownOperationError(f"the result {ref!r} is no longer kept") from error

    def discard(self, ref: BlobRef) -> None:
        """Give a blob up; one that is gone already is no error."""
        self._path(ref).unlink(missing_ok=True)

    def discard_results(self, *, older_than_s: float) -> None:
        """Give up results that were written longer ago than that; payloads are the scheduler's."""
        limit = time.time() - older_than_s
        for path in self._directory.glob(f"*{RESULT_SUFFIX}"):
            try:
                if path.stat().st_mtime < limit:
                    path.unlink()
            except FileNotFoundError:
                # Another router was quicker.
                continue

    def _write(self, ref: BlobRef, body: bytes) -> None:
        path = self._path(ref)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_bytes(body)
            part.rename(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise StorageError(
                f"the blob store {self._directory} cannot be written ({error}): free space there"
            ) from error

    def _path(self, ref: BlobRef) -> Path:
        return self._directory / quote(ref, safe="")
