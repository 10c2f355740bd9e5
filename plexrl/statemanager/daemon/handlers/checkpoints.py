"""Requests to write, list and cancel checkpoints."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from plexrl.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidRequestError,
    PermissionDeniedError,
    PlexRLError,
    StateLostError,
)
from plexrl.statemanager.checkpoint.folder import checked_name, complete_checkpoints, job_folder
from plexrl.statemanager.checkpoint.format.record import RECORD, CheckpointRecord
from plexrl.statemanager.checkpoint.jobs import Task
from plexrl.statemanager.checkpoint.requests import (
    CancelCheckpoint,
    CheckpointReport,
    CheckpointState,
    CheckpointStatus,
    WriteCheckpoint,
)
from plexrl.statemanager.checkpoint.restore import read_record
from plexrl.statemanager.checkpoint.write.writer import CheckpointSpec
from plexrl.statemanager.daemon.handlers.caller import TICKETS, Caller, Reply, handles
from plexrl.statemanager.protocol.address import nearest
from plexrl.statemanager.protocol.tickets import AGENT, Role, job_of
from plexrl.statemanager.store.versions.leasing import lease_states
from plexrl.statemanager.transfer.transport.choice import open_elsewhere
from plexrl.statemanager.transfer.transport.reader import StateReader


def _write(caller: Caller, request: WriteCheckpoint, fds: Sequence[int]) -> Reply:
    services, claims = caller.services, caller.claims
    target = _target(caller, request.deployment, request.name)
    if claims.role == Role.WORKER and claims.deployment != request.deployment:
        raise PermissionDeniedError(
            f"{claims.holder} may not checkpoint {request.deployment!r}: its ticket is for "
            f"{claims.deployment!r}"
        )
    if request.upload and not services.config.checkpoint_upload_url:
        raise InvalidRequestError(
            "this cluster uploads no checkpoints: have its operator set checkpoint_upload_url"
        )
    # The leases end with this block, unless the writer has taken them over.
    with ExitStack() as guard:
        held = guard.enter_context(ExitStack())
        readers: list[StateReader] = [
            *lease_states(services.store, held, request.deployment, request.seq)
        ]
        elsewhere = [at for at in request.sources if nearest(at) != services.config.listen]
        ticket = services.key.mint(AGENT)
        for address in dict.fromkeys(elsewhere):
            readers += open_elsewhere(
                *(held, services.network, address, ticket, request.deployment, request.seq)
            )
        ranks = _one_reader_per_rank(request, readers)
        stamps = tuple(reader.stamp for reader in ranks)
        found = _find_same(caller, request, target, stamps)
        if found is not None:
            return Reply(msgspec.to_builtins(found))
        extras_fd = os.dup(fds[0]) if fds else None
        if extras_fd is not None:
            held.callback(os.close, extras_fd)
        task = Task(
            wanted=_wanted(request, target, services.config.node),
            seq=request.seq,
            stamps=stamps,
            readers=ranks,
            held=held,
            extras_fd=extras_fd,
            retention=request.retention,
        )
        report = services.checkpoints.submit(task)
        guard.pop_all()
        return Reply(msgspec.to_builtins(report))


def _status(caller: Caller, request: CheckpointStatus, _: Sequence[int]) -> Reply:
    if request.name is not None:
        target = _target(caller, request.deployment, request.name)
        report = caller.services.checkpoints.find(target)
        is_gone = (
            report is not None
            and report.state == CheckpointState.DURABLE
            # A retention policy or a user may have deleted it.
            and not target.exists()
        )
        if report is None or is_gone:
            record = _record(target)
            report = None if record is None else _complete(caller, target, record)
        if report is None:
            raise CheckpointNotFoundError(
                f"checkpoint {request.name!r} does not exist and is not being written"
            )
        reports = [report]
    else:
        _check_own_job(caller, request.deployment)
        folder = job_folder(caller.services.config.checkpoint_dir, request.deployment)
        jobs = caller.services.checkpoints
        known = {
            path: _complete(caller, path, record) for path, record in complete_checkpoints(folder)
        }
        for report in jobs.reports():
            path = Path(report.path)
            # A durable checkpoint without a folder was deleted.
            is_gone = report.state == CheckpointState.DURABLE and path not in known
            if path.parent == folder and not is_gone:
                known[path] = report
        reports = [known[path] for path in sorted(known)]
    return Reply({"checkpoints": msgspec.to_builtins(reports)})


def _cancel(caller: Caller, request: CancelCheckpoint, _: Sequence[int]) -> Reply:
    target = _target(caller, request.deployment, request.name)
    return Reply(msgspec.to_builtins(caller.services.checkpoints.cancel(target)))


ENTRIES = (
    handles(WriteCheckpoint, _write, TICKETS),
    handles(CheckpointStatus, _status, TICKETS),
    handles(CancelCheckpoint, _cancel, TICKETS),
)


def _target(caller: Caller, deployment: str, name: str) -> Path:
    _check_own_job(caller, deployment)
    folder = job_folder(caller.services.config.checkpoint_dir, deployment)
    return folder / checked_name(name)


def _check_own_job(caller: Caller, deployment: str) -> None:
    claims = caller.claims
    if claims.role == Role.WORKER and job_of(deployment) != claims.job:
        raise PermissionDeniedError(
            f"{claims.holder} may not use checkpoints of job {job_of(deployment)!r}: its ticket "
            f"is for job {claims.job!r}"
        )


def _one_reader_per_rank(
    request: WriteCheckpoint, readers: Sequence[StateReader]
) -> list[StateReader]:
    """The first reader of each rank, in rank order."""
    by_rank: dict[int, StateReader] = {}
    for reader in readers:
        manifest = reader.manifest
        if request.stamps is None or manifest.stamp in request.stamps:
            by_rank.setdefault(manifest.rank, reader)
    world_size = max((reader.manifest.world_size for reader in by_rank.values()), default=1)
    missing = [rank for rank in range(world_size) if rank not in by_rank]
    if missing:
        raise StateLostError(
            f"version {request.seq} of {request.deployment!r} rank {missing[0]} is not on this "
            "node nor at the given sources: take a snapshot of every rank first",
            deployment=request.deployment,
            seq=request.seq,
        )
    return [by_rank[rank] for rank in range(world_size)]


def _find_same(
    caller: Caller, request: WriteCheckpoint, target: Path, stamps: tuple[str, ...]
) -> CheckpointReport | None:
    """The report of the same checkpoint, if it is complete or being written.

    Raises:
        CheckpointExistsError: another checkpoint has the name, and `overwrite` is not set.
    """
    jobs = caller.services.checkpoints
    if jobs.is_active(target, stamps, request.asked_by):
        return jobs.find(target)
    report = jobs.find(target)
    is_active = report is not None and not report.state.is_final
    # A damaged checkpoint also occupies the name, and may be replaced.
    record = _record(target)
    if (
        not is_active
        and record is not None
        and (record.stamps, record.asked_by) == (stamps, request.asked_by)
    ):
        return _complete(caller, target, record)
    if (target.exists() or is_active) and not request.overwrite:
        raise CheckpointExistsError(
            f"checkpoint {request.name!r} exists: choose another name or set overwrite"
        )
    return None


def _record(target: Path) -> CheckpointRecord | None:
    try:
        return read_record(target)
    except PlexRLError:
        return None


def _complete(caller: Caller, target: Path, record: CheckpointRecord) -> CheckpointReport:
    nbytes = sum(file.nbytes for file in record.files)
    upload, upload_error = caller.services.checkpoints.upload_state(target)
    return CheckpointReport(
        job=target.parent.name,
        name=target.name,
        path=str(target),
        state=CheckpointState.DURABLE,
        seq=record.seq,
        step=record.step,
        bytes_done=nbytes,
        bytes_total=nbytes,
        seconds=0.0,
        as_of=(target / RECORD).stat().st_mtime,
        upload=upload,
        upload_error=upload_error,
    )


def _wanted(request: WriteCheckpoint, target: Path, node: str) -> CheckpointSpec:
    return CheckpointSpec(
        target=target,
        node=node,
        format=request.format,
        model_dtype=request.model_dtype,
        shard_bytes_max=request.shard_bytes_max,
        overwrite=request.overwrite,
        asked_by=request.asked_by,
        step=request.step,
        trainer_step=request.trainer_step,
        keep=request.keep,
        upload=request.upload,
    )
