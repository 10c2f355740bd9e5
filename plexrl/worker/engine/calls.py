"""A rollout backend's calls as its engine takes them, and the engine's results as the wire does."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plexrl.errors import BatchShapeError, InvalidRequestError
from plexrl.wire.operations import CheckpointParams, OperationKind
from plexrl.worker.backend import BackendCall, BackendResult, Emit
from plexrl.worker.checkpoint import load_hf_parameters
from plexrl.worker.engine.generation import Generation
from plexrl.worker.engine.protocol import EngineStats

if TYPE_CHECKING:
    import torch


def generation_of(call: BackendCall, emit: Emit | None) -> Generation:
    """The generation that a `generate` asks for."""
    tokens, lengths = call.arrays["tokens"], call.arrays["lengths"]
    ends = np.cumsum(lengths)[:-1]
    return Generation(
        name=call.operation,
        prompts=[part.tolist() for part in np.split(tokens, ends)],
        samples_per_prompt=call.params.samples_per_prompt,
        sampling=call.params.sampling,
        emit=emit,
        weights_seq=call.seq,
    )


def result_of(generation: Generation, stats: EngineStats) -> BackendResult:
    """`segments` lists `[row, start, weights_seq]` of rows that other versions drew."""
    metrics = {
        "preemptions": generation.preemptions,
        "kv_cache_bytes": stats.kv_bytes_max,
        "kv_cache_bytes_used_max": generation.blocks_max * stats.block_bytes,
    }
    result: dict[str, Any] = {"weights_seq": generation.weights_seq, "metrics": metrics}
    if mixed := generation.mixed_segments():
        result["segments"] = mixed
    return BackendResult(result=result, arrays=generation.arrays())


def checkpoint_weights(
    call: BackendCall, checkpoint_dir: Path, shapes: Mapping[str, tuple[int, ...]]
) -> "dict[str, torch.Tensor]":
    """The whole weights that a `load_checkpoint` asks for; the model's parameters have `shapes`.

    Raises:
        InvalidRequestError: `call` is another operation.
        BatchShapeError: the checkpoint is of another model.
    """
    if call.kind != OperationKind.LOAD_CHECKPOINT:
        raise InvalidRequestError(f"{call.kind.value} is no operation of a rollout backend")
    params: CheckpointParams = call.params
    job = params.job or str(call.rank_params["job"])
    found = load_hf_parameters(checkpoint_dir / job / params.name)
    for name, shape in shapes.items():
        if name not in found or tuple(found[name].shape) != shape:
            raise BatchShapeError(
                f"checkpoint {params.name!r} has no parameter {name!r} of shape "
                f"{list(shape)}: it is of another model"
            )
    return found
