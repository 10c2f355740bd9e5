"""Writes a checkpoint from the versions of all ranks, in bounded memory, atomically."""

import os
import shutil
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import xxhash

from plexrl.errors import InvalidRequestError, StorageFullError
from plexrl.statemanager.checkpoint.format.plan import (
    CheckpointFormat,
    Plan,
    PlannedFile,
    PlannedTensor,
    plan_checkpoint,
)
from plexrl.statemanager.checkpoint.format.record import (
    RECORD,
    VERSION,
    CheckpointRecord,
    FileRecord,
    TensorRecord,
    encode_record,
)
from plexrl.statemanager.checkpoint.format.tensors import TENSOR_BLOCK_BYTES, blocks, merge
from plexrl.statemanager.checkpoint.write.assembly import Assembler
from plexrl.statemanager.checkpoint.write.progress import Progress
from plexrl.statemanager.checkpoint.write.publish import begin, part_of, publish
from plexrl.statemanager.checkpoint.write.stream import StreamFile
from plexrl.statemanager.layout.casts import NUMPY_DTYPES, cast
from plexrl.statemanager.layout.keys import DTYPE_BYTES
from plexrl.statemanager.store.disk_space import checkpoint_write_error
from plexrl.statemanager.transfer.transport.reader import StateReader

EXTRAS_BYTES_MAX = 256 << 20
"""Limit of the small extra files: tokenizers have tens of megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """What to write."""

    target: Path
    """The checkpoint's directory."""
    node: str
    """This node's name, part of its temporary directories' names."""
    format: CheckpointFormat
    model_dtype: str | None
    """Absent: as stored."""
    shard_bytes_max: int
    overwrite: bool
    step: int | None = None
    """Training step, for the retention policy; absent: the version's seq."""
    trainer_step: int = 0
    """Optimizer steps in the parameters."""
    keep: bool = False
    """Whether retention policies keep it."""
    asked_by: str = ""
    """Id of the request; a repeated request returns this checkpoint."""
    upload: bool = False
    """Whether to upload it when it is complete."""


def write_checkpoint(
    wanted: CheckpointSpec,
    readers: Sequence[StateReader],
    extras_fd: int | None,
    progress: Progress,
) -> CheckpointRecord:
    """Write all files and publish them as `wanted.target`.

    `extras_fd` is a tar file of small extra files (configuration, tokenizer). After an error,
    nothing of the checkpoint remains.

    Raises:
        StateLostError: the versions do not cover some tensor.
        InvalidRequestError: a tensor cannot be cast to the wanted dtype.
        StorageFullError: the file system is full.
        StorageError: a file cannot be written.
        CorruptStateError: a version cannot be read, or two replicas differ.
        OperationCancelledError: it was cancelled.
        CheckpointExistsError: the name exists.
    """
    part = part_of(wanted.target, wanted.node)
    try:
        try:
            plan = plan_checkpoint(
                merge([reader.slices for reader in readers]),
                wanted.format,
                model_dtype=wanted.model_dtype,
                shard_bytes_max=wanted.shard_bytes_max,
            )
            progress.start(plan.nbytes)
            begin(part)
            if extras_fd is not None:
                _take_extras(extras_fd, part)
            for name, text in plan.texts:
                (part / name).write_text(text)
            record = _write_files(wanted, plan, readers, part, progress)
            for reader in readers:
                reader.confirm()
            (part / RECORD).write_bytes(encode_record(record))
            publish(part, wanted.target, wanted.node, overwrite=wanted.overwrite)
        except OSError as error:
            file = str(error.filename or wanted.target)
            raise checkpoint_write_error(f"the checkpoint {wanted.target}", error, file) from error
    except StorageFullError:
        # The write is retried, so the directory that announces it stays.
        with suppress(OSError):
            begin(part)
        raise
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        progress.end()
    return record


def describe(
    wanted: CheckpointSpec,
    readers: Sequence[StateReader],
    tensors: Sequence[TensorRecord],
    plan: Plan,
) -> CheckpointRecord:
    """The manifest of a checkpoint of these versions."""
    ranked = sorted((reader.manifest for reader in readers), key=lambda m: m.rank)
    return CheckpointRecord(
        version=VERSION,
        deployment=ranked[0].deployment,
        seq=ranked[0].seq,
        world_size=ranked[0].world_size,
        stamps=tuple(manifest.stamp for manifest in ranked),
        format=wanted.format.value,
        model_dtype=wanted.model_dtype,
        meta_json=tuple(manifest.meta_json for manifest in ranked),
        block_bytes=TENSOR_BLOCK_BYTES,
        files=tuple(FileRecord(path=file.path, nbytes=file.nbytes) for file in plan.files),
        tensors=tuple(tensors),
        step=ranked[0].seq if wanted.step is None else wanted.step,
        trainer_step=wanted.trainer_step,
        keep=wanted.keep,
        asked_by=wanted.asked_by,
        node=wanted.node,
        upload=wanted.upload,
    )


def _write_files(
    wanted: CheckpointSpec,
    plan: Plan,
    readers: Sequence[StateReader],
    part: Path,
    progress: Progress,
) -> CheckpointRecord:
    assembler = Assembler(readers, _block_bytes_max(plan))
    tensors: list[TensorRecord] = []
    for file in plan.files:
        path = part / file.path
        path.parent.mkdir(exist_ok=True)
        tensors += _write_file(file, path, assembler, _block_bytes_max(plan), progress)
    return describe(wanted, readers, tensors, plan)


def _write_file(
    file: PlannedFile, path: Path, assembler: Assembler, block_bytes: int, progress: Progress
) -> list[TensorRecord]:
    at = file.path
    try:
        with StreamFile(path, file.nbytes, space_bytes_max=block_bytes) as stream:
            head = file.head
            stream.append(head)
            progress.add(len(head))
            start = len(head)
            records = []
            for tensor in file.tensors:
                at = f"{tensor.source.key.name} in {file.path}"
                digests = _write_tensor(tensor, stream, assembler, block_bytes, progress)
                records.append(
                    TensorRecord(
                        key=tensor.source.key,
                        dtype=tensor.dtype,
                        shape=tensor.source.shape,
                        file=file.path,
                        start=start,
                        digests=tuple(digests),
                    )
                )
                start += tensor.nbytes
            stream.finish()
            return records
    except OSError as error:
        what = f"{at} of the checkpoint {path.parent}"
        raise checkpoint_write_error(what, error, file.path) from error


def _write_tensor(
    tensor: PlannedTensor,
    stream: StreamFile,
    assembler: Assembler,
    block_bytes: int,
    progress: Progress,
) -> list[str]:
    """Append one tensor; returns its blocks' checksums."""
    source = tensor.source
    itemsize = DTYPE_BYTES[tensor.dtype]
    stored = memoryview(bytearray(block_bytes if tensor.dtype != source.dtype else 0))
    digests = []
    for block in blocks(source.shape, itemsize, TENSOR_BLOCK_BYTES):
        space = stream.space(block.size * itemsize)
        if tensor.dtype == source.dtype:
            assembler.read(source, block, space)
        else:
            read = stored[: block.size * DTYPE_BYTES[source.dtype]]
            assembler.read(source, block, read)
            cast(
                np.frombuffer(read, NUMPY_DTYPES[source.dtype])[None],
                np.frombuffer(space, NUMPY_DTYPES[tensor.dtype])[None],
                (source.dtype, tensor.dtype),
            )
        digests.append(xxhash.xxh3_128_hexdigest(space))
        stream.commit(len(space))
        progress.add(len(space))
    return digests


def _block_bytes_max(plan: Plan) -> int:
    """Largest block in bytes. Blocks are sized in the file's dtype; the stored one may be wider."""
    widest = max(
        (
            DTYPE_BYTES[tensor.source.dtype] / DTYPE_BYTES[tensor.dtype]
            for file in plan.files
            for tensor in file.tensors
        ),
        default=1,
    )
    return int(TENSOR_BLOCK_BYTES * max(1, widest))


def _take_extras(fd: int, folder: Path) -> None:
    """Unpack a worker's small files: only regular files with plain names, within a size limit."""
    size = 0
    os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(os.dup(fd), "rb") as file, _open_tar(file) as tar:
        for member in tar:
            size += member.size
            content = tar.extractfile(member) if member.isreg() else None
            if content is None or "/" in member.name or member.name.startswith("."):
                raise InvalidRequestError(
                    f"{member.name!r} cannot be added to a checkpoint: send regular files without "
                    "a path"
                )
            if size > EXTRAS_BYTES_MAX:
                raise InvalidRequestError(
                    f"the extra files have more than {EXTRAS_BYTES_MAX} bytes: send fewer"
                )
            with (folder / member.name).open("xb") as out:
                shutil.copyfileobj(content, out)


def _open_tar(file: IO[bytes]) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=file, mode="r:")
    except tarfile.TarError as error:
        raise InvalidRequestError(f"the extra files are not a tar file: {error}") from error
