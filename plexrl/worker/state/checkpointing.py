"""`save_checkpoint`, as the ranks of a deployment carry it out together.

Each rank has its StateManager store what is on the device, unless that is stored already; then the
first rank's StateManager pins all of it and writes it while the ranks go on (PlexRL §4.5.3). The
StateManagers of all ranks must be on one machine, because they pass descriptors.
"""

import os
from typing import Any

import msgspec

from plexrl.statemanager.checkpoint.format.plan import CheckpointFormat
from plexrl.statemanager.checkpoint.format.retention import RetentionPolicy
from plexrl.statemanager.checkpoint.requests import CheckpointReport, WriteCheckpoint
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.wire.operations import CheckpointParams
from plexrl.worker.process.backend import Backend
from plexrl.worker.state.checkpoint import agree, packed

MODEL_DTYPES = {"bfloat16": "BF16", "float16": "F16"}

Plain = dict[str, Any]


def save_checkpoint(
    backend: Backend,
    client: StateManagerClient,
    params: CheckpointParams,
    *,
    operation: str,
    seq: int,
    keep_seq: int,
    token: int,
    previous_seq: int = 0,
    trainer_step: int = 0,
) -> Plain:
    """Have version `seq` written; returns once it is pinned. Every rank takes part.

    `operation` is the one that asks: asked again, it joins what is under way. `trainer_step` counts
    the optimizer steps in the weights.

    Raises:
        CheckpointExistsError: on every rank alike, unless `overwrite` is set.
        OverloadedError: likewise: too many checkpoints wait to be written.
        StateTierFullError: likewise: a rank's version has no room.
    """
    parts = backend.live_parts()

    def store() -> str:
        client.snapshot(
            seq=seq, keep_seq=keep_seq, token=token, parts=parts, previous_seq=previous_seq
        )
        return f"{client.stamp(seq)} {client.path}"

    ranks = [value.split(" ", 1) for value in agree(backend.gather, store)]
    sources = tuple(dict.fromkeys(path for _, path in ranks))
    request = WriteCheckpoint(
        deployment=client.deployment,
        seq=seq,
        name=params.name,
        sources=sources,
        stamps=tuple(stamp for stamp, _ in ranks),
        format=CheckpointFormat(params.format),
        model_dtype=None if params.dtype is None else MODEL_DTYPES[params.dtype],
        shard_bytes_max=params.shard_bytes_max,
        overwrite=params.overwrite,
        asked_by=operation,
        step=params.step,
        trainer_step=trainer_step,
        keep=params.keep,
        retention=_retention(params),
        upload=params.upload,
    )
    answers = agree(backend.gather, lambda: _ask(backend, client, request, params.dtype))
    report = msgspec.json.decode(answers[0], type=CheckpointReport)
    return {
        "path": report.path,
        "job": client.deployment.rpartition("/")[0],
        "name": report.name,
        "seq": seq,
        "durable": report.state == "durable",
    }


def _ask(
    backend: Backend, client: StateManagerClient, request: WriteCheckpoint, dtype: str | None
) -> str:
    """The first rank asks for all; returns the report as JSON there, and nothing elsewhere."""
    if client.rank != 0:
        return ""
    fd = packed(backend.checkpoint_extras(dtype))
    try:
        return msgspec.json.encode(client.request(request, (fd,))).decode()
    finally:
        os.close(fd)


def _retention(params: CheckpointParams) -> RetentionPolicy | None:
    if params.keep_last is None and params.keep_every is None:
        return None
    return RetentionPolicy(keep_last=params.keep_last, keep_every=params.keep_every)
