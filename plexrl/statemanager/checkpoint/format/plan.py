"""Plan of a checkpoint's files and the tensors in them. Pure.

    config.json, tokenizer.json, …                      given by the caller
    model.safetensors                                    or shards with an index;
                                                         adapters: adapter_model.safetensors
    training/optimizer.safetensors                       likewise
    training/parameter.safetensors                       only if the model files have another dtype
    checkpoint.json                                      the manifest (`record.py`)

Training resumes from the same parameters that `transformers` loads, so they are written once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from plexrl.errors import InvalidRequestError
from plexrl.model.lora import are_adapters
from plexrl.statemanager.checkpoint.format.published_names import Named, published_tensors
from plexrl.statemanager.checkpoint.format.safetensors import encode_head
from plexrl.statemanager.checkpoint.format.tensors import WholeTensor
from plexrl.statemanager.layout.keys import DTYPE_BYTES, StatePart
from plexrl.statemanager.layout.strided.casts import CAST_RULES

SHARD_BYTES_MAX = 5_000_000_000
"""Shard size of `transformers`' own checkpoints."""
TRAINING_DIR = "training"
INDEX = "model.safetensors.index.json"

_MODEL_PARTS = (StatePart.PARAMETER, StatePart.BUFFER)
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class CheckpointFormat(StrEnum):
    """Purpose of a checkpoint."""

    HF = "hf"
    """For `transformers`."""
    TRAINING = "training"
    """For resuming training, on any number of ranks."""
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """A tensor and its dtype in a file."""

    source: WholeTensor
    dtype: str
    """Dtype in the file."""
    model_type: str = ""
    """Model type whose published names the file has; empty: the names of the state."""

    @property
    def entries(self) -> tuple[Named, ...]:
        """The entries of the file's header: the tensor, or parts of it, end to end."""
        return published_tensors(self.model_type, self.source.key.name, self.source.shape)

    @property
    def nbytes(self) -> int:
        return self.source.nbytes // DTYPE_BYTES[self.source.dtype] * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A safetensors file."""

    path: str
    """Path relative to the checkpoint."""
    tensors: tuple[PlannedTensor, ...]
    """Tensors in file order."""

    @property
    def head(self) -> bytes:
        """The header, which precedes the tensors."""
        named = [(name, t.dtype, shape) for t in self.tensors for name, shape in t.entries]
        return encode_head(named, {"format": "pt"})

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """A checkpoint's files."""

    files: tuple[PlannedFile, ...]
    texts: tuple[tuple[str, str], ...]
    """(path, contents) of small files: the index."""

    @property
    def nbytes(self) -> int:
        """Size of all safetensors files."""
        return sum(file.nbytes for file in self.files)


def plan_checkpoint(
    tensors: Iterable[WholeTensor],
    checkpoint_format: CheckpointFormat,
    *,
    model_dtype: str | None = None,
    model_type: str = "",
    shard_bytes_max: int = SHARD_BYTES_MAX,
) -> CheckpointPlan:
    """Plan a checkpoint's files. `model_dtype` absent: the model's floats keep their dtype. The
    model's files have the published names of `model_type`, if these differ.

    Checkpoints do not contain gradients.

    Raises:
        InvalidRequestError: there are no parameters, or a dtype cannot be cast to `model_dtype`.
    """
    found = list(tensors)
    model = [
        PlannedTensor(source=tensor, dtype=_model_dtype(tensor, model_dtype), model_type=model_type)
        for tensor in found
        if tensor.key.part in _MODEL_PARTS
    ]
    if not model:
        raise InvalidRequestError(
            "the version has no parameters, so there is nothing to checkpoint"
        )
    files: list[PlannedFile] = []
    texts: tuple[tuple[str, str], ...] = ()
    if checkpoint_format != CheckpointFormat.TRAINING:
        # `transformers` and PEFT expect these names.
        stem = "adapter_model" if are_adapters(t.source.key.name for t in model) else "model"
        files = _cut(stem, model, shard_bytes_max)
        texts = _index(files)
    if checkpoint_format != CheckpointFormat.HF:
        is_written = bool(files) and all(t.dtype == t.source.dtype for t in model)
        for part in (*(() if is_written else _MODEL_PARTS), StatePart.OPTIMIZER):
            own = [
                PlannedTensor(source=tensor, dtype=tensor.dtype)
                for tensor in found
                if tensor.key.part == part
            ]
            if own:
                files += _cut(f"{TRAINING_DIR}/{part.value}", own, shard_bytes_max)
    return CheckpointPlan(files=tuple(files), texts=texts)


def _model_dtype(tensor: WholeTensor, wanted: str | None) -> str:
    if wanted is None or tensor.dtype == wanted or tensor.dtype not in _FLOATS:
        return tensor.dtype
    if (tensor.dtype, wanted) not in CAST_RULES:
        raise InvalidRequestError(
            f"{tensor.key.name} is {tensor.dtype}, which cannot be written as {wanted}: use one of "
            f"{sorted(to for source, to in CAST_RULES if source == tensor.dtype)}"
        )
    return wanted


def _cut(stem: str, tensors: Sequence[PlannedTensor], shard_bytes_max: int) -> list[PlannedFile]:
    """Split tensors into files of at most `shard_bytes_max` bytes, or of one larger tensor."""
    shards: list[list[PlannedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > shard_bytes_max:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    count = len(shards)
    return [
        PlannedFile(
            path=f"{stem}.safetensors"
            if count == 1
            else f"{stem}-{index:05d}-of-{count:05d}.safetensors",
            tensors=tuple(shard),
        )
        for index, shard in enumerate(shards, start=1)
    ]


def _index(files: Sequence[PlannedFile]) -> tuple[tuple[str, str], ...]:
    if len(files) == 1:
        return ()
    index = {
        "metadata": {"total_size": sum(t.nbytes for file in files for t in file.tensors)},
        "weight_map": {
            name: file.path for file in files for t in file.tensors for name, _ in t.entries
        },
    }
    text = msgspec.json.format(msgspec.json.encode(index, order="sorted"), indent=2).decode()
    return ((INDEX, text + "\n"),)
