"""Writes a checkpoint from the versions of all ranks, in bounded memory, atomically."""

import os
import tarfile
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import numpy as np
import xxhash

from plexrl.errors import (
    CheckpointNotFoundError,
    InvalidRequestError,
    PlexRLError,
    StorageFullError,
    StoreUnavailableError,
)
from plexrl.statemanager.checkpoint.announcement import lost_to_a_load
from plexrl.statemanager.checkpoint.format.plan import (
    CheckpointFormat,
    CheckpointPlan,
    PlannedFile,
    PlannedTensor,
    plan_checkpoint,
)
from plexrl.statemanager.checkpoint.format.record import (
    VERSION,
    CheckpointRecord,
    FileRecord,
    TensorRecord,
)
from plexrl.statemanager.checkpoint.format.tensors import TENSOR_BLOCK_BYTES, blocks, merge
from plexrl.statemanager.checkpoint.places.place import CheckpointPlace, Draft, FileStream
from plexrl.statemanager.checkpoint.write.assembly import Assembler
from plexrl.statemanager.checkpoint.write.other_nodes import OtherNodes
from plexrl.statemanager.checkpoint.write.progress import CheckpointProgress
from plexrl.statemanager.layout.keys import DTYPE_BYTES
from plexrl.statemanager.layout.strided.casts import NUMPY_DTYPES, cast
from plexrl.statemanager.store.disk_space import checkpoint_write_error
from plexrl.statemanager.store.receiving.reader import StateReader

EXTRAS_BYTES_MAX = 256 << 20
"""Limit of the small extra files: tokenizers have tens of megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """The checkpoint to write."""

    target: CheckpointPlace
    """The checkpoint's place."""
    node: str
    """This node's name, by which its unfinished checkpoints are found."""
    format: CheckpointFormat
    model_dtype: str | None
    """Absent: as stored."""
    shard_bytes_max: int
    overwrite: bool
    model_type: str = ""
    """Model type whose published names the files get; empty: the names of the state."""
    step: int | None = None
    """Training step, for the retention policy; absent: the version's seq."""
    trainer_step: int = 0
    """Optimizer steps in the parameters."""
    keep: bool = False
    """Whether retention policies keep it."""
    asked_by: str = ""
    """Id of the request; a repeated request returns this checkpoint."""


def write_checkpoint(
    wanted: CheckpointSpec,
    readers: Sequence[StateReader],
    extras_fd: int | None,
    progress: CheckpointProgress,
    others: OtherNodes | None = None,
) -> CheckpointRecord:
    """Write all files and publish them as `wanted.target`.

    `extras_fd` is a tar file of small extra files (configuration, tokenizer). `others` write a
    part of the large files. After an error, nothing of the checkpoint remains.

    Raises:
        StateLostError: the versions do not cover some tensor.
        InvalidRequestError: a tensor cannot be cast to the wanted dtype.
        StorageFullError: the file system is full.
        StorageError: a file cannot be written.
        StoreUnavailableError: the object store does not answer.
        CorruptStateError: a version cannot be read, or two replicas differ.
        OperationCancelledError: it was cancelled.
        CheckpointExistsError: the name exists.
        CheckpointNotFoundError: a load has ended the announcement.
    """
    draft = wanted.target.draft(wanted.node)
    try:
        try:
            plan = _plan(wanted, readers)
            progress.start(plan.nbytes)
            draft.begin()
            if extras_fd is not None:
                _take_extras(extras_fd, draft)
            for name, text in plan.texts:
                draft.add(name, text.encode())
            record = _write_files(wanted, plan, readers, draft, progress, others)
            for reader in readers:
                reader.confirm()
            if wanted.node not in wanted.target.announced():
                raise lost_to_a_load(wanted.target, wanted.node)
            draft.publish(record, overwrite=wanted.overwrite)
        except OSError as error:
            file = str(error.filename or wanted.target)
            raise checkpoint_write_error(f"the checkpoint {wanted.target}", error, file) from error
    except StorageFullError:
        # The write is retried, so the checkpoint stays announced.
        with suppress(OSError, PlexRLError):
            draft.begin()
        raise
    except StoreUnavailableError:
        # It is retried too, and the next attempt deletes this one's files.
        raise
    except BaseException:
        draft.drop()
        raise
    finally:
        progress.end()
    return record


def describe(
    wanted: CheckpointSpec,
    readers: Sequence[StateReader],
    tensors: Sequence[TensorRecord],
    plan: CheckpointPlan,
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
        model_type=wanted.model_type,
        meta_json=tuple(manifest.meta_json for manifest in ranked),
        block_bytes=TENSOR_BLOCK_BYTES,
        files=tuple(FileRecord(path=file.path, nbytes=file.nbytes) for file in plan.files),
        tensors=tuple(tensors),
        step=ranked[0].seq if wanted.step is None else wanted.step,
        trainer_step=wanted.trainer_step,
        keep=wanted.keep,
        asked_by=wanted.asked_by,
        node=wanted.node,
    )


def write_some_files(
    wanted: CheckpointSpec,
    files: Collection[str],
    readers: Sequence[StateReader],
    progress: CheckpointProgress,
    written: Callable[[Sequence[TensorRecord]], None],
) -> None:
    """Write some files of a checkpoint that `wanted.node` has begun; `written` is called with what
    is in each, once it is flushed and was read from versions that were held until then.

    Raises:
        CheckpointNotFoundError: what that node has begun is not to be seen from here.
        PlexRLError: as `write_checkpoint`.
    """
    draft = wanted.target.draft(wanted.node)
    try:
        if not draft.join():
            raise CheckpointNotFoundError(
                f"the checkpoint {wanted.target} that {wanted.node!r} writes is not to be seen "
                "from this node: checkpoint_url is a folder that nodes do not share"
            )
        plan = _plan(wanted, readers)
        chosen = [file for file in plan.files if file.path in files]
        progress.start(sum(file.nbytes for file in chosen))
        block_bytes = _block_bytes_max(plan)
        assembler = Assembler(readers, block_bytes)
        for file in chosen:
            tensors = _write_file(file, draft, assembler, block_bytes, progress)
            for reader in readers:
                reader.confirm()
            written(tensors)
    except OSError as error:
        at = str(error.filename or wanted.target)
        raise checkpoint_write_error(f"the checkpoint {wanted.target}", error, at) from error


def _plan(wanted: CheckpointSpec, readers: Sequence[StateReader]) -> CheckpointPlan:
    """The same on every node, for the same versions."""
    return plan_checkpoint(
        merge([reader.slices for reader in readers]),
        wanted.format,
        model_dtype=wanted.model_dtype,
        model_type=wanted.model_type,
        shard_bytes_max=wanted.shard_bytes_max,
    )


def _write_files(
    wanted: CheckpointSpec,
    plan: CheckpointPlan,
    readers: Sequence[StateReader],
    draft: Draft,
    progress: CheckpointProgress,
    others: OtherNodes | None,
) -> CheckpointRecord:
    block_bytes = _block_bytes_max(plan)
    assembler = Assembler(readers, block_bytes)
    found: dict[str, list[TensorRecord]] = {}

    def write(files: Sequence[PlannedFile], *, replace: bool) -> None:
        for file in files:
            found[file.path] = _write_file(
                file, draft, assembler, block_bytes, progress, replace=replace
            )

    if others is None or len(plan.files) == 1:
        write(plan.files, replace=False)
    else:
        held_by = [reader.address for reader in readers]
        with others.writing(plan.files, held_by, progress) as (own, elsewhere):
            write(own, replace=False)
            for each in elsewhere:
                for tensor in each.result():
                    found.setdefault(tensor.file, []).append(tensor)
        # What another node could not write is written here.
        write([file for file in plan.files if file.path not in found], replace=True)
    tensors = [tensor for file in plan.files for tensor in found[file.path]]
    return describe(wanted, readers, tensors, plan)


def _write_file(
    file: PlannedFile,
    draft: Draft,
    assembler: Assembler,
    block_bytes: int,
    progress: CheckpointProgress,
    *,
    replace: bool = False,
) -> list[TensorRecord]:
    at = file.path
    try:
        with draft.stream(
            file.path, file.nbytes, space_bytes_max=block_bytes, replace=replace
        ) as stream:
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
        what = f"{at} of the checkpoint"
        raise checkpoint_write_error(what, error, file.path) from error


def _write_tensor(
    tensor: PlannedTensor,
    stream: FileStream,
    assembler: Assembler,
    block_bytes: int,
    progress: CheckpointProgress,
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


def _block_bytes_max(plan: CheckpointPlan) -> int:
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


def _take_extras(fd: int, draft: Draft) -> None:
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
            draft.add(member.name, content.read())


def _open_tar(file: IO[bytes]) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=file, mode="r:")
    except tarfile.TarError as error:
        raise InvalidRequestError(f"the extra files are not a tar file: {error}") from error
