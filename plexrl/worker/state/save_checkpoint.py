"""`save_checkpoint`: the ranks of a deployment save a checkpoint together.

Each rank has its StateManager store the state on the device, unless that is stored already, as it
is if the deployment is offloaded. Then the first rank's StateManager pins all ranks' state and
writes it while the ranks continue (PlexRL §4.5.3). It reads the state of ranks on other machines
from their StateManagers.
"""

import os

import msgspec

from plexrl.statemanager.checkpoint.format.plan import CheckpointFormat
from plexrl.statemanager.checkpoint.format.retention import RetentionPolicy
from plexrl.statemanager.checkpoint.requests import CheckpointState, WriteCheckpoint
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.wire.messages import SaveCheckpoint
from plexrl.wire.messages.node_queries import CheckpointView
from plexrl.wire.messages.workers import RunResult
from plexrl.wire.operations import CheckpointParams
from plexrl.worker.interface.backend import Backend
from plexrl.worker.state.checkpoint_files import pack_files
from plexrl.worker.state.rank_agreement import on_all_ranks

MODEL_DTYPES = {"bfloat16": "BF16", "float16": "F16"}


def save_checkpoint(
    backend: Backend,
    client: StateManagerClient,
    command: SaveCheckpoint,
    *,
    offloaded_step: int | None = None,
) -> RunResult:
    """Start to write version `command.seq`; returns when it is pinned. Every rank takes part.

    `offloaded_step`: the state was offloaded as that version, with so many optimizer steps, and is
    written from there; nothing of the arena is read. None: the state is on the device.

    A repeated call with the same operation joins the write that it started.

    Raises:
        CheckpointExistsError: the name is taken and `overwrite` is not set; on every rank.
        OverloadedError: too many checkpoints wait to be written; on every rank.
        StateTierFullError: there is no space for a rank's version; on every rank.
        StateLostError: the offloaded state is another version, or gone; on every rank.
    """
    seq, params = command.seq, command.params
    assert params is not None, "the router checks that a checkpoint has a name"

    def store() -> str:
        if offloaded_step is not None:
            return f"{client.offloaded_stamp(seq)} {client.address}"
        client.snapshot(command.save, parts=backend.live_parts())
        return f"{client.stamp(seq)} {client.address}"

    ranks = [value.split(" ", 1) for value in on_all_ranks(backend.gather, store)]
    sources = tuple(dict.fromkeys(address for _, address in ranks))
    request = WriteCheckpoint(
        deployment=client.deployment,
        seq=seq,
        name=params.name,
        sources=sources,
        stamps=tuple(stamp for stamp, _ in ranks),
        format=CheckpointFormat(params.format),
        model_dtype=None if params.dtype is None else MODEL_DTYPES[params.dtype],
        model_type=backend.model_type,
        shard_bytes_max=params.shard_bytes_max,
        overwrite=params.overwrite,
        asked_by=command.operation,
        step=params.step,
        trainer_step=backend.trainer_step if offloaded_step is None else offloaded_step,
        keep=params.keep,
        retention=_retention(params),
    )
    answers = on_all_ranks(
        backend.gather, lambda: _request_write(backend, client, request, params.dtype)
    )
    report = msgspec.json.decode(answers[0], type=CheckpointView)
    return {
        "path": report["path"],
        "job": client.deployment.rpartition("/")[0],
        "name": report["name"],
        "seq": seq,
        "durable": report["state"] == CheckpointState.DURABLE,
    }


def _request_write(
    backend: Backend, client: StateManagerClient, request: WriteCheckpoint, dtype: str | None
) -> str:
    """Send the request on the first rank; returns the report as JSON there, "" on other ranks."""
    if client.rank != 0:
        return ""
    fd = pack_files(backend.checkpoint_extras(dtype))
    try:
        return msgspec.json.encode(client.request(request, (fd,))).decode()
    finally:
        os.close(fd)


def _retention(params: CheckpointParams) -> RetentionPolicy | None:
    if (params.keep_last, params.keep_every, params.keep_bytes) == (None, None, None):
        return None
    return RetentionPolicy(
        keep_last=params.keep_last,
        keep_every=params.keep_every,
        bytes_max=params.keep_bytes,
        prefix=params.keep_prefix,
    )
