"""A checkpoint's manifest, `checkpoint.json`: which tensor lies where, and digests of its blocks.

A directory that has one is a whole checkpoint: it is written last, under the temporary name. Pure.
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
    """One tensor, whole, in one file."""

    key: StateKey
    dtype: str
    shape: tuple[int, ...]
    file: str
    """Below the checkpoint."""
    start: int
    """Bytes from the start of the file."""
    digests: tuple[str, ...]
    """Hex xxh3-128 of each of `blocks(shape, …, block_bytes)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One safetensors file."""

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """All of a checkpoint but the small files beside the tensors."""

    version: int
    deployment: str
    seq: int
    world_size: int
    """Of the ranks that it was taken from."""
    stamps: tuple[str, ...]
    """Of their versions, by rank: the same ones make the same checkpoint."""
    format: str
    model_dtype: str | None
    meta_json: tuple[str, ...]
    """What each rank's version was saved with."""
    block_bytes: int
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]
    step: int
    """Orders the checkpoints of a job for its retention policy."""
    keep: bool
    """No retention policy deletes it."""
    asked_by: str
    """By what it was asked for: the same request again finds it done."""
    node: str
    """Whose StateManager wrote it."""
    upload: bool
    """That StateManager uploads it."""
    trainer_step: int = 0
    """Optimizer steps in the parameters; 0 too where the one that wrote it did not say."""


class _Sealed(msgspec.Struct):
    xxh3_128: str
    checkpoint: msgspec.Raw


def encode_record(record: CheckpointRecord) -> bytes:
    """The manifest's text, under a digest of its own."""
    body = msgspec.json.encode(record)
    sealed = _Sealed(xxh3_128=xxhash.xxh3_128_hexdigest(body), checkpoint=msgspec.Raw(body))
    return msgspec.json.encode(sealed) + b"\n"


def decode_record(text: bytes) -> CheckpointRecord:
    """What `encode_record` made.

    Raises:
        CorruptStateError: it did not make this, or a later version of it did.
    """
    try:
        sealed = msgspec.json.decode(text, type=_Sealed)
        body = bytes(sealed.checkpoint)
        if xxhash.xxh3_128_hexdigest(body) != sealed.xxh3_128:
            raise CorruptStateError(f"{RECORD} is damaged (its digest does not match)")
        found = msgspec.json.decode(body, type=CheckpointRecord)
    except msgspec.MsgspecError as error:
        raise CorruptStateError(f"{RECORD} is damaged ({error})") from error
    if found.version != VERSION:
        raise CorruptStateError(
            f"{RECORD} is of format {found.version}, and this PlexRL reads {VERSION}: use the one "
            "that wrote it"
        )
    return found
