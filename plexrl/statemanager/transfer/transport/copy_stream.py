"""Strided copies over a socket, as a stream of their bytes without separators.

Long copies are zero-copy: `sendfile` at the sender, and a receive into the destination; over TLS
the sender encrypts from the version's memory. Long rows of strided copies are sent from where they
lie. Other strided, cast and short copies pass through a block that fits the CPU cache. Each end
chooses by itself; the bytes on the wire are the same.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from plexrl.errors import ConnectionLostError, CorruptStateError
from plexrl.statemanager.bytes.mapped_files import MappedData
from plexrl.statemanager.bytes.mapped_memory import Region, parts_of
from plexrl.statemanager.bytes.strided_copy import copy_strided
from plexrl.statemanager.layout.plan.columns import Bytes
from plexrl.statemanager.layout.strided.copies import BYTES_CAST, StridedCopies, pack, unpack
from plexrl.wire.links.dial import BlockingSocket
from plexrl.wire.links.tls_socket import TlsSocket

DIRECT_BYTES_MIN = 64 << 10
"""A contiguous copy of this many bytes is sent without a block."""
ROW_BYTES_MIN = 2 << 10
"""A row of this many bytes is sent from where it lies: gathering it costs more than a system call's
share."""
ROWS_MAX = 1024
"""Most rows of one system call: Linux's IOV_MAX."""
GATHER_BYTES = 1 << 20
ANSWER_BYTES_MAX = 256 << 20
"""Limit of one answer: eight times the size of a client's request."""
DIGEST_BYTES = 8

COLUMNS = ("src_offsets", "items", "counts", "src_strides", "casts")
"""The columns that the sender needs."""


class Digest:
    """Checksum of a stream; does nothing if not `wanted`."""

    def __init__(self, wanted: bool) -> None:
        self._state = xxhash.xxh3_64() if wanted else None

    @property
    def is_wanted(self) -> bool:
        """Whether there is a checksum."""
        return self._state is not None

    def add(self, data: Bytes) -> None:
        """Add bytes to the checksum."""
        if self._state is not None:
            self._state.update(data.data)

    def value(self) -> bytes:
        """The checksum, `DIGEST_BYTES` long; empty if not wanted."""
        return b"" if self._state is None else self._state.digest()


def encode_copies(copies: StridedCopies) -> bytes:
    """Encode copies for the wire, without their destinations."""
    return np.stack([getattr(copies, name) for name in COLUMNS]).astype("<i8").tobytes()


def decode_copies(payload: bytes | bytearray) -> StridedCopies:
    """Decode copies from `encode_copies`; their destination offsets are 0.

    Raises:
        ValueError: the payload is malformed.
    """
    table = np.frombuffer(payload, dtype="<i8").reshape(len(COLUMNS), -1).astype(np.int64)
    zeros = np.zeros(table.shape[1], dtype=np.int64)
    columns = dict(zip(COLUMNS, table, strict=True))
    return StridedCopies(**columns, dst_offsets=zeros, dst_strides=zeros)


def send_copies(
    connection: BlockingSocket,
    regions: Sequence[Region],
    data: MappedData,
    copies: StridedCopies,
    digest: Digest,
) -> None:
    """Send the bytes of `copies`, which the caller has checked to lie within the data; `regions`
    and `data` are the same bytes in files and in memory, both in order.

    A plain socket must be blocking.
    """
    for part, way in _group(copies, _ways(connection, data, copies, digest)):
        if way == _Way.ROWS:
            assert isinstance(connection, socket.socket)
            for rows in _rows(data, part):
                _send_all(connection, rows)
            continue
        if way == _Way.BLOCKS:
            for block in _gather(data, part):
                digest.add(block)
                connection.sendall(block.data)
            continue
        for place, nbytes in zip(part.src_offsets.tolist(), part.items.tolist(), strict=True):
            for index, start, length in parts_of(regions, place, nbytes):
                piece = data.pieces[index][start : start + length]
                digest.add(piece)
                if isinstance(connection, TlsSocket):
                    connection.sendall(piece.data)
                else:
                    _send_file(connection, regions[index], start, length)
    connection.sendall(digest.value())


class _Way(IntEnum):
    """The way in which the bytes of a copy are sent."""

    BLOCKS = 0
    """Gathered into blocks."""
    ROWS = 1
    """Row by row from where they lie, many rows in one system call."""
    RUN = 2
    """As one run, from the file or from memory."""


def _ways(
    connection: BlockingSocket, data: MappedData, copies: StridedCopies, digest: Digest
) -> npt.NDArray[np.int64]:
    """The `_Way` of each copy."""
    is_bytes = copies.casts == BYTES_CAST
    row_bytes = copies.row_bytes()
    ways = np.full(len(copies), _Way.BLOCKS, dtype=np.int64)
    if not isinstance(connection, TlsSocket) and not digest.is_wanted:
        last = copies.src_offsets + (copies.counts - 1) * copies.src_strides + row_bytes - 1
        homes = [np.searchsorted(data.starts, at, "right") for at in (copies.src_offsets, last)]
        ways[is_bytes & (row_bytes >= ROW_BYTES_MIN) & (homes[0] == homes[1])] = _Way.ROWS
    ways[is_bytes & (copies.counts == 1) & (row_bytes >= DIRECT_BYTES_MIN)] = _Way.RUN
    return ways


def _rows(data: MappedData, copies: StridedCopies) -> Iterator[list[memoryview]]:
    """The rows of copies that each lie in one region, as many as a system call takes."""
    rows: list[memoryview] = []
    homes = np.searchsorted(data.starts, copies.src_offsets, "right") - 1
    columns = (
        *(homes, copies.src_offsets - data.starts[homes], copies.items),
        *(copies.counts, copies.src_strides),
    )
    for home, start, nbytes, count, stride in zip(*(c.tolist() for c in columns), strict=True):
        memory = data.pieces[home].data
        for index in range(count):
            at = start + index * stride
            rows.append(memory[at : at + nbytes])
            if len(rows) == ROWS_MAX:
                yield rows
                rows = []
    if rows:
        yield rows


def _send_all(connection: socket.socket, rows: list[memoryview]) -> None:
    sent = connection.sendmsg(rows)
    for row in rows:
        # A blocking socket takes everything, unless a signal or a timeout interrupts it.
        if sent < len(row):
            connection.sendall(row[max(0, sent) :])
        sent -= len(row)


def _gather(data: MappedData, copies: StridedCopies) -> Iterator[Bytes]:
    """The copies' bytes, block by block; the next block is gathered while the caller sends one."""
    spare = [np.empty(GATHER_BYTES, dtype=np.uint8) for _ in range(2)]

    def gather(batch: StridedCopies, block: Bytes) -> Bytes:
        nbytes = batch.nbytes
        block = block if nbytes <= len(block) else np.empty(nbytes, dtype=np.uint8)
        for memory, job in data.jobs(pack(batch)):
            copy_strided(memory, block, job)
        return block[:nbytes]

    batches = copies.batches(GATHER_BYTES)
    first = next(batches, None)
    if first is None:
        return
    with ThreadPoolExecutor(1, thread_name_prefix="plexrl-gather") as pool:
        ready = pool.submit(gather, first, spare[0])
        for index, batch in enumerate(batches):
            block = ready.result()
            ready = pool.submit(gather, batch, spare[(index + 1) % 2])
            yield block
        yield ready.result()


def receive_copies(
    connection: BlockingSocket, copies: StridedCopies, target: Bytes, digest: Digest
) -> None:
    """Receive the bytes of `copies` into their offsets in `target`.

    Raises:
        ConnectionLostError: the sender closed.
        CorruptStateError: the checksum does not match.
    """
    block = np.empty(GATHER_BYTES, dtype=np.uint8)
    in_a_row = (copies.counts == 1) | (copies.dst_strides == copies.row_bytes())
    sizes = copies.row_bytes() * copies.counts
    is_direct_copy = in_a_row & (sizes >= DIRECT_BYTES_MIN)
    for part, is_direct in _group(copies, is_direct_copy.astype(np.int64)):
        if is_direct:
            lengths = (part.row_bytes() * part.counts).tolist()
            for to, nbytes in zip(part.dst_offsets.tolist(), lengths, strict=True):
                if to < 0 or to + nbytes > len(target):
                    raise ValueError(f"a copy to offset {to} exceeds its memory")
                receive_bytes(connection, target[to : to + nbytes].data)
                digest.add(target[to : to + nbytes])
            continue
        for batch in part.batches(GATHER_BYTES):
            nbytes = batch.nbytes
            block = block if nbytes <= len(block) else np.empty(nbytes, dtype=np.uint8)
            receive_bytes(connection, block[:nbytes].data)
            digest.add(block[:nbytes])
            copy_strided(block, target, unpack(batch))
    expected = digest.value()
    if expected:
        found = bytearray(DIGEST_BYTES)
        receive_bytes(connection, memoryview(found))
        if found != expected:
            raise CorruptStateError(
                "the checksum of received bytes does not match: check the network"
            )


def _group(
    copies: StridedCopies, ways: npt.NDArray[np.int64]
) -> Iterator[tuple[StridedCopies, int]]:
    """The copies in order, grouped into ranges of equal `ways`."""
    changes = np.flatnonzero(ways[1:] != ways[:-1]) + 1
    edges = [0, *changes.tolist(), len(copies)] if len(copies) else []
    for first, last in pairwise(edges):
        yield copies.chosen(slice(first, last)), int(ways[first])


def _send_file(connection: socket.socket, region: Region, start: int, nbytes: int) -> None:
    offset, end = region.offset + start, region.offset + start + nbytes
    while offset < end:
        sent = os.sendfile(connection.fileno(), region.fd, offset, end - offset)
        if sent == 0:
            raise ConnectionLostError("a version's file is shorter than its data")
        offset += sent


def receive_bytes(connection: BlockingSocket, target: memoryview) -> None:
    """Fill `target`.

    Raises:
        ConnectionLostError: the sender closed.
    """
    filled = 0
    while filled < len(target):
        if isinstance(connection, TlsSocket):
            count = connection.recv_into(target[filled:])
        else:
            count = connection.recv_into(target[filled:], 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionLostError("the source closed the connection")
        filled += count
