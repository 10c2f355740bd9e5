"""Deltas of strided copies: encoded at the source, applied at the target."""

from collections.abc import Sequence

import numpy as np
import xxhash

from plexrl.errors import CorruptStateError
from plexrl.statemanager.bytes.mapped_files import MappedData
from plexrl.statemanager.bytes.strided_copy import copy_strided
from plexrl.statemanager.layout.plan.columns import Bytes
from plexrl.statemanager.layout.strided.copies import (
    BYTES_CAST,
    StridedCopies,
    pack,
    reverse_copies,
    unpack,
)
from plexrl.statemanager.protocol.delta_policy import DeltaPolicy
from plexrl.statemanager.transfer.delta.codec import WORD_BYTES, DeltaDecoder, encode
from plexrl.statemanager.transfer.delta.delta import batches, changed_blocks

DIGEST_BYTES = 16


def encode_delta(
    old: MappedData, new: MappedData, copies: StridedCopies, policy: DeltaPolicy, *, verify: bool
) -> list[bytes] | None:
    """The delta of the copies' destination bytes from one version to another, and with `verify` a
    checksum of the new bytes. None if it exceeds the policy's size limit."""
    parts: list[bytes] = []
    digest = xxhash.xxh3_128()
    bytes_max = policy.changed_max * copies.nbytes
    nbytes = 0
    for batch in batches(copies):
        before, after = _bytes_of(old, batch), _bytes_of(new, batch)
        parts.append(encode(before, after, policy.block_bytes))
        nbytes += len(parts[-1])
        if nbytes > bytes_max:
            return None
        if verify:
            digest.update(after.data)
    return [*parts, digest.digest()] if verify else parts


def apply_delta(
    payload: memoryview, copies: StridedCopies, target: Bytes, block_bytes: int, *, verify: bool
) -> None:
    """Update the destination bytes of `copies` in `target` from the old version to the new.

    Raises:
        CorruptStateError: with `verify`, the checksum does not match; `target` holds neither
            version.
    """
    end = len(payload) - (DIGEST_BYTES if verify else 0)
    decoder = DeltaDecoder(payload[: max(0, end)], block_bytes)
    digest = xxhash.xxh3_128()
    for batch in batches(copies):
        there = _at_target(batch, target)
        if decoder.apply(there) and not np.shares_memory(there, target):
            copy_strided(there, target, unpack(batch))
        if verify:
            digest.update(there.data)
    decoder.finish()
    if verify and digest.digest() != bytes(payload[end:]):
        raise CorruptStateError(
            "the result of a delta has another checksum than its version: pull all bytes"
        )


def copy_changed(
    source: MappedData, copies: StridedCopies, target: Bytes, policy: DeltaPolicy
) -> int:
    """Perform `copies` into `target`, but write only the words that differ; returns the bytes
    written."""
    moved = 0
    for batch in batches(copies):
        after, there = _bytes_of(source, batch), _at_target(batch, target)
        flags = changed_blocks(there, after, policy.block_bytes)
        if not flags.any():
            continue
        moved += _write_changed(there, after)
        if not np.shares_memory(there, target):
            copy_strided(there, target, unpack(batch))
    return moved


def _write_changed(there: Bytes, after: Bytes) -> int:
    even = len(there) // WORD_BYTES * WORD_BYTES
    old, new = there[:even].view(np.uint16), after[:even].view(np.uint16)
    differs = old != new
    np.copyto(old, new, where=differs)
    tail = int(np.count_nonzero(there[even:] != after[even:]))
    there[even:] = after[even:]
    return int(np.count_nonzero(differs)) * WORD_BYTES + tail


def _bytes_of(data: MappedData, batch: StridedCopies) -> Bytes:
    """A batch's bytes, contiguous; a view if they are contiguous in `data`."""
    jobs = data.jobs(pack(batch))
    if len(jobs) == 1 and _is_plain(jobs[0][1]):
        memory, job = jobs[0]
        at = int(job.src_offsets[0])
        return memory[at : at + int(job.items[0])]
    return _gather(jobs, batch.nbytes)


def _at_target(batch: StridedCopies, target: Bytes) -> Bytes:
    """As `_bytes_of`, for the target's bytes."""
    if _is_plain(batch):
        at = int(batch.dst_offsets[0])
        return target[at : at + int(batch.row_bytes()[0])]
    return _gather([(target, pack(reverse_copies(batch)))], batch.nbytes)


def _is_plain(copies: StridedCopies) -> bool:
    return len(copies) == 1 and int(copies.counts[0]) == 1 and int(copies.casts[0]) == BYTES_CAST


def _gather(jobs: Sequence[tuple[Bytes, StridedCopies]], nbytes: int) -> Bytes:
    row = np.empty(nbytes, dtype=np.uint8)
    for memory, job in jobs:
        copy_strided(memory, row, job)
    return row
