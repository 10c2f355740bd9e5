"""The blob store: payloads and results, written once and then only read.

A reader finds either the whole blob or none. A payload outlives the router that received it, so
another router can execute the operation; a stored blob survives a power cut. The name of a blob has
a digest of its bytes, and each read from a store is checked against it: a damaged blob is never
used. Large blobs are memory-mapped: checks, plans and sends use the page cache's own bytes.
"""

import hashlib
import re
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from plexrl.errors import (
    PayloadLostError,
    StorageFullError,
    StorageUnavailableError,
    StoreUnavailableError,
    UnknownOperationError,
)
from plexrl.ids import BlobRef
from plexrl.router.blobs.upload import INLINE_BYTES_MAX as INLINE_BYTES_MAX
from plexrl.router.blobs.upload import Upload as Upload
from plexrl.wire.tensors import Body

PAYLOAD_SUFFIX = ".in"
"""Ends the name of every payload."""

RESULT_SUFFIX = ".out"
"""Ends the name of every result."""

STORE_AWAY = (StorageFullError, StorageUnavailableError, StoreUnavailableError)
"""Errors of a store that pass once an operator acts."""

RECENT_BYTES_MAX = 64 << 20
"""Bound on small blobs kept in memory."""

_DIGEST = re.compile(r"\.xxh3-([0-9a-f]{32})\.[a-z]+$")

NAME_BYTES_MAX = 200
"""Bound on a file name; file systems allow 255. A longer name is cut, with a digest added."""


class BlobStore(Protocol):
    """Blobs that all routers share."""

    result_period_s: float
    """Time between two deletions of old results."""

    async def write(self, ref: BlobRef, *parts: Body) -> None:
        """Store a blob, given in parts; a blob of the same name is replaced.

        Raises:
            StorageError: the directory cannot be written.
            StoreUnavailableError: the object store does not answer.
        """
        ...

    async def read(self, ref: BlobRef) -> Body:
        """Return a blob's bytes, which must not be changed.

        Raises:
            UnknownOperationError: it is a result, which was discarded.
            PayloadLostError: the blob is damaged, or a payload is missing.
            StoreUnavailableError: the object store does not answer.
        """
        ...

    async def receive(self, chunks: AsyncIterator[bytes], bytes_max: int) -> Upload:
        """Receive a body; a large one is written to a local file while the rest arrives.

        Raises:
            PayloadTooLargeError: the body is longer than `bytes_max`; nothing is kept.
            StorageError: the file cannot be written; nothing is kept.
        """
        ...

    async def publish(self, upload: Upload, ref: BlobRef) -> None:
        """Store an upload under a name that no other blob ever has. Raises as `write`."""
        ...

    def discard(self, ref: BlobRef) -> None:
        """Delete a blob, if it still exists."""
        ...

    def discard_all(self, refs: Iterable[BlobRef]) -> None:
        """Delete blobs; one that cannot be deleted is logged and left."""
        ...

    def payloads(self, *, older_than_s: float) -> list[BlobRef]:
        """Payloads older than `older_than_s` seconds, without those with a shortened name. Blocks.
        Raises as `write`, and `OSError`."""
        ...

    def discard_results(self, *, older_than_s: float) -> None:
        """Delete results older than `older_than_s` seconds. Payloads are deleted by the scheduler's
        order. Blocks. Raises as `write`, and `OSError`."""
        ...

    def close(self) -> None:
        """End what runs in the background."""
        ...


def digested_ref(stem: str, digest: str, suffix: str) -> BlobRef:
    """The name of a blob whose bytes have this xxh3-128 digest, in hexadecimal digits."""
    return BlobRef(f"{stem}.xxh3-{digest}{suffix}")


def check_digest(ref: BlobRef, digest: str) -> None:
    """Check the digest of what was read against the name; a name without a digest is not checked.

    Raises:
        PayloadLostError: they differ.
    """
    named = _DIGEST.search(ref)
    if named is not None and named[1] != digest:
        raise lost(ref, "its bytes do not match the digest in its name")


def lost(ref: BlobRef, why: str) -> PayloadLostError:
    """The error for a blob that is damaged or missing."""
    if ref.endswith(PAYLOAD_SUFFIX):
        what, remedy = "payload", "submit its batch again if its operation fails"
    else:
        what, remedy = "result", "compute it again with a new operation"
    return PayloadLostError(
        f"the {what} {ref!r} is damaged or lost ({why}): {remedy}, and check the disk of the blob "
        "store",
        payload=ref,
    )


def missing(ref: BlobRef) -> PayloadLostError | UnknownOperationError:
    """The error for a blob that does not exist. Only results are deleted while they have a name
    that somebody may ask for."""
    if ref.endswith(PAYLOAD_SUFFIX):
        return lost(ref, "there is no such blob")
    return UnknownOperationError(f"the result {ref!r} is no longer kept")


def blob_name(ref: BlobRef) -> str:
    """The name of a blob's file or object."""
    name = quote(ref, safe="")
    if len(name) <= NAME_BYTES_MAX:
        return name
    digest = hashlib.blake2b(ref.encode(), digest_size=16).hexdigest()
    # No id contains a '~'.
    return f"{name[:120]}~{digest}{Path(ref).suffix}"
