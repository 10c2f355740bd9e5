"""A checkpoint's manifest, `checkpoint.json`: tensors, their positions, and block checksums. Pure.

It is written last, before the directory gets its name, so a directory with a manifest is complete.
"""

from dataclasses import dataclass

import msgspec
import xxhash

from plexrl.errors import CorruptStateError
from plexrl.statemanager.layout.keys import StateKey

RECORD = "checkpoint.json"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One whole tensor in one file."""

    key: StateKey
    dtype: str
    shape: tuple[int, ...]
    file: str
    """Path relative to the checkpoint."""
    start: int
    """Offset in the file, in bytes."""
    digests: tuple[str, ...]
    """Hex xxh3-128 of each of `blocks(shape, …, block_bytes)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One safetensors file."""

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """Manifest of a checkpoint, without the small extra files."""

    version: int
    deployment: str
    seq: int
    world_size: int
    """World size of the saved ranks."""
    stamps: tuple[str, ...]
    """Stamps of the ranks' versions, by rank; equal stamps mean an equal checkpoint."""
    format: str
    model_dtype: str | None
    meta_json: tuple[str, ...]
    """Metadata of each rank's version."""
    block_bytes: int
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]
    step: int
    """Orders the checkpoints of a job for its retention policy."""
    keep: bool
    """Whether retention policies keep it."""
    asked_by: str
    """Id of the request; a repeated request returns this checkpoint."""
    node: str
    """Node whose StateManager wrote it."""
    upload: bool = False
    """Not used any more."""
    trainer_step: int = 0
    """Optimizer steps in the parameters; 0 also if unknown."""
    model_type: str = ""
    """Model type whose published names the model's files have; empty: the names of the state."""
    attempt: str = ""
    """In an object store: folder of the files, named after the attempt that wrote them."""


class _Sealed(msgspec.Struct):
    xxh3_128: str
    checkpoint: msgspec.Raw


def encode_record(record: CheckpointRecord) -> bytes:
    """Encode the manifest, with its own checksum."""
    body = msgspec.json.encode(record)
    sealed = _Sealed(xxh3_128=xxhash.xxh3_128_hexdigest(body), checkpoint=msgspec.Raw(body))
    return msgspec.json.encode(sealed) + b"\n"


def decode_record(text: bytes) -> CheckpointRecord:
    """Decode a manifest from `encode_record`.

    Raises:
        CorruptStateError: the text is damaged, or of another format version.
    """
    try:
        sealed = msgspec.json.decode(text, type=_Sealed)
        body = bytes(sealed.checkpoint)
        if xxhash.xxh3_128_hexdigest(body) != sealed.xxh3_128:
            raise CorruptStateError(f"{RECORD} is damaged (its checksum does not match)")
        found = msgspec.json.decode(body, type=CheckpointRecord)
    except msgspec.MsgspecError as error:
        raise CorruptStateError(f"{RECORD} is damaged ({error})") from error
    if found.version != VERSION:
        raise CorruptStateError(
            f"{RECORD} has format {found.version}, and this release of PlexRL reads {VERSION}: use "
            "the release that wrote it"
        )
    return found
