"""Read of a checkpoint into the slices of any layout, bit for bit, and only the needed bytes.

Every block that a slice touches is read completely and its checksum verified, so a read exceeds the
slice by less than a block at either end.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import xxhash

from plexrl.errors import CheckpointNotFoundError, CorruptStateError
from plexrl.statemanager.checkpoint.format.plan import TRAINING_DIR
from plexrl.statemanager.checkpoint.format.published_names import Named, published_tensors
from plexrl.statemanager.checkpoint.format.record import CheckpointRecord, TensorRecord
from plexrl.statemanager.checkpoint.format.safetensors import decode_head, head_bytes
from plexrl.statemanager.checkpoint.format.tensors import block_start, blocks, range_in_slice
from plexrl.statemanager.checkpoint.places.choice import Location, place_at
from plexrl.statemanager.checkpoint.places.directory import unreadable
from plexrl.statemanager.checkpoint.places.place import CheckpointPlace, Range
from plexrl.statemanager.checkpoint.write.assembly import copy_common
from plexrl.statemanager.layout.boxes import Box
from plexrl.statemanager.layout.keys import DTYPE_BYTES, StatePart, StateSlice

Fill = Callable[[StateSlice], memoryview]
"""Callback: the writable memory of a slice."""


class Checkpoint:
    """A published checkpoint, open for reading."""

    def __init__(self, location: Location | CheckpointPlace) -> None:
        """Reads the manifest and the headers of the files.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CorruptStateError: a file is missing, truncated, or does not match the manifest.
            StorageError: a file cannot be opened.
            StoreUnavailableError: the object store does not answer.
        """
        self.place = place_at(location) if isinstance(location, str | Path) else location
        self.bytes_read = 0
        self.record = self.place.read_record()
        self._files = self.place.open_files(self.record)
        self._checked: set[tuple[str, int]] = set()
        """File and first byte of each prefetched block."""
        self._buffer = memoryview(bytearray(self.record.block_bytes))
        try:
            for file in self.record.files:
                self._check_size(file.path, file.nbytes)
            self._check_heads()
        except BaseException:
            self._files.close()
            raise
        # A parameter may be stored in two dtypes: a slice is read from the tensor of its own dtype.
        self._tensors = {(r.key, r.dtype): r for r in self.record.tensors}

    def verify(self, wants: Sequence[StateSlice]) -> None:
        """Check everything that `fill` will read, without changes.

        Raises:
            CorruptStateError: a block is damaged or missing.
            CheckpointNotFoundError: a wanted tensor is missing, or has another dtype or shape.
        """
        self._prefetch(wants)
        for want in wants:
            for _ in self._blocks(want):
                pass

    def fill(self, wants: Sequence[StateSlice], memory: Fill) -> None:
        """Write every wanted slice to its memory. Raises as `verify`; some may then be written."""
        self._prefetch(wants)
        for want in wants:
            target = memory(want)
            for block, data in self._blocks(want):
                copy_common(want, target, block, data)

    def whole_parameters(self) -> dict[str, StateSlice]:
        """Every parameter as one whole slice, in the dtype that `transformers` loads."""
        found: dict[str, StateSlice] = {}
        for record in self.record.tensors:
            if record.key.part == StatePart.PARAMETER:
                piece = StateSlice(
                    key=record.key,
                    dtype=record.dtype,
                    global_shape=record.shape,
                    offset=(0,) * len(record.shape),
                    shape=record.shape,
                    arena_offset=0,
                )
                found.setdefault(record.key.name, piece)
        return found

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prefetch(self, wants: Sequence[StateSlice]) -> None:
        wanted: dict[Range, tuple[TensorRecord, int]] = {}
        for want in wants:
            record = self._record_of(want)
            itemsize = DTYPE_BYTES[record.dtype]
            for index, block in self._touch(want, record):
                start = record.start + block_start(block, record.shape) * itemsize
                wanted[record.file, start, block.size * itemsize] = (record, index)

        def arrived(found: Range, data: memoryview) -> None:
            self._check(*wanted[found], data)
            self._checked.add(found[:2])

        try:
            self._files.prefetch(list(wanted), arrived)
        except FileNotFoundError as error:
            raise self._corrupt(str(error), "it is missing", None) from error

    def _blocks(self, want: StateSlice) -> Iterator[tuple[Box, memoryview]]:
        """The verified blocks that a slice touches; each is valid until the next one."""
        record = self._record_of(want)
        for index, block in self._touch(want, record):
            yield block, self._read(record, index, block)

    def _touch(self, want: StateSlice, record: TensorRecord) -> Iterator[tuple[int, Box]]:
        itemsize = DTYPE_BYTES[record.dtype]
        held = Box(offset=want.offset, shape=want.shape)
        if 0 in want.shape:
            return
        for index, block in enumerate(blocks(record.shape, itemsize, self.record.block_bytes)):
            if range_in_slice(block, held, itemsize) is not None:
                yield index, block

    def _record_of(self, want: StateSlice) -> TensorRecord:
        record = self._tensors.get((want.key, want.dtype))
        if record is None or record.shape != want.global_shape:
            there = [f"{r.dtype}{list(r.shape)}" for r in self.record.tensors if r.key == want.key]
            raise CheckpointNotFoundError(
                f"checkpoint {self.place.name!r} has {want.key.name} as {there or 'nothing'}, and "
                f"{want.dtype}{list(want.global_shape)} is wanted: load it into the model that it "
                "was saved from, in a format that training can resume from",
                key=want.key.name,
            )
        return record

    def _read(self, record: TensorRecord, index: int, block: Box) -> memoryview:
        itemsize = DTYPE_BYTES[record.dtype]
        buffer = self._buffer[: block.size * itemsize]
        start = record.start + block_start(block, record.shape) * itemsize
        name, file = record.key.name, record.file
        try:
            data = self._files.read(file, start, buffer)
        except OSError as error:
            raise self._corrupt(file, f"{name} cannot be read: {error}", name) from error
        if len(data) < len(buffer):
            raise self._corrupt(file, f"it ends inside {name}", name)
        self.bytes_read += len(data)
        if (file, start) not in self._checked:
            self._check(record, index, data)
        return data

    def _check(self, record: TensorRecord, index: int, data: memoryview) -> None:
        if xxhash.xxh3_128_hexdigest(data) != record.digests[index]:
            name = record.key.name
            why = f"block {index} of {name} does not match its checksum"
            raise self._corrupt(record.file, why, name)

    def _check_size(self, file: str, nbytes: int) -> None:
        try:
            size = self._files.size(file)
        except FileNotFoundError as error:
            raise self._corrupt(file, "it is missing", None) from error
        except OSError as error:
            raise unreadable(f"{self.place}/{file}", error) from error
        if size != nbytes:
            raise self._corrupt(file, f"it has {size} bytes, {nbytes} were written", None)

    def _check_heads(self) -> None:
        """Check that the files' headers match the manifest, so that other tools read the same."""
        found: dict[tuple[str, str], tuple[str, tuple[int, ...], int]] = {}
        for file in (file.path for file in self.record.files):
            try:
                tensors = decode_head(self._head(file))
            except CorruptStateError as error:
                raise self._corrupt(file, error.message, None) from error
            except OSError as error:
                raise unreadable(f"{self.place}/{file}", error) from error
            found |= {(file, t.name): (t.dtype, t.shape, t.start) for t in tensors}
        for record in self.record.tensors:
            start = record.start
            for name, shape in self._entries(record):
                there = found.get((record.file, name))
                if there != (record.dtype, shape, start):
                    raise self._corrupt(
                        record.file, f"its header describes {name} as {there}", name
                    )
                start += math.prod(shape) * DTYPE_BYTES[record.dtype]

    def _entries(self, record: TensorRecord) -> tuple[Named, ...]:
        """The entries of the file's header for a tensor."""
        is_training = record.file.startswith(f"{TRAINING_DIR}/")
        model_type = "" if is_training else self.record.model_type
        return published_tensors(model_type, record.key.name, record.shape)

    def _head(self, file: str) -> bytes:
        start = self._files.read(file, 0, memoryview(bytearray(8)))
        head = memoryview(bytearray(head_bytes(start.tobytes())))
        return self._files.read(file, 0, head).tobytes()

    def _corrupt(self, file: str, why: str, key: str | None) -> CorruptStateError:
        details = {"file": file} if key is None else {"file": file, "key": key}
        return CorruptStateError(
            f"{file} of checkpoint {self.place} is damaged ({why}): load another checkpoint",
            **details,
        )


def read_record(location: Location) -> CheckpointRecord:
    """The manifest of the checkpoint at a path or URL. Raises as `CheckpointPlace.read_record`."""
    return place_at(location).read_record()
