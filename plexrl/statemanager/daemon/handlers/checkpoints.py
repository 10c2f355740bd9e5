"""Requests to write, list and cancel checkpoints."""

import os
from collections.abc import Sequence
from contextlib import ExitStack

from plexrl.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidRequestError,
    PermissionDeniedError,
    PlexRLError,
    StateLostError,
    StoreUnavailableError,
)
from plexrl.ids import JobId
from plexrl.statemanager.checkpoint.folder import checked_name, job_name
from plexrl.statemanager.checkpoint.format.record import CheckpointRecord
from plexrl.statemanager.checkpoint.jobs import Task
from plexrl.statemanager.checkpoint.places.place import CheckpointPlace, CheckpointRoot
from plexrl.statemanager.checkpoint.requests import (
    CancelCheckpoint,
    CheckpointState,
    CheckpointStatus,
    WriteCheckpoint,
    WriteFiles,
)
from plexrl.statemanager.checkpoint.write.files_job import FilesJob
from plexrl.statemanager.checkpoint.write.other_nodes import OtherNodes
from plexrl.statemanager.checkpoint.write.writer import CheckpointSpec
from plexrl.statemanager.daemon.handlers.caller import (
    TICKETS,
    DaemonCaller,
    DaemonReply,
    Services,
    handles,
)
from plexrl.statemanager.protocol.address import is_remote, nearest
from plexrl.statemanager.protocol.tickets import AGENT, TicketRole, job_of
from plexrl.statemanager.store.receiving.reader import StateReader
from plexrl.statemanager.store.versions.leasing import lease_states
from plexrl.statemanager.transfer.transport.choice import open_elsewhere
from plexrl.wire.messages.node_queries import CheckpointView


def _write(caller: DaemonCaller, request: WriteCheckpoint, fds: Sequence[int]) -> DaemonReply:
    services, claims = caller.services, caller.claims
    target = _target(caller, request.deployment, request.name)
    if claims.role == TicketRole.WORKER and claims.deployment != request.deployment:
        raise PermissionDeniedError(
            f"{claims.holder} may not checkpoint {request.deployment!r}: its ticket is for "
            f"{claims.deployment!r}"
        )
    # The leases end with this block, unless the writer has taken them over.
    with ExitStack() as guard:
        held = guard.enter_context(ExitStack())
        readers, elsewhere = _open(services, held, request)
        ranks = _one_reader_per_rank(request, request.stamps, readers)
        stamps = tuple(reader.stamp for reader in ranks)
        found = _find_same(caller, request, target, stamps)
        if found is not None:
            return DaemonReply({**found})
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
            others=_others(services, request, stamps, elsewhere),
        )
        report = services.checkpoints.submit(task)
        guard.pop_all()
        return DaemonReply({**report})


def begin_files(services: Services, request: WriteFiles) -> FilesJob:
    """Begin to write some files of a checkpoint for another node, which holds an agent's ticket.

    Raises:
        StateLostError: a rank's version is not here nor at the given sources.
        UnavailableError: a source cannot be reached.
        InvalidRequestError: there is no `checkpoint_url`.
    """
    target = _root(services).place(job_name(request.deployment), checked_name(request.name))
    with ExitStack() as guard:
        held = guard.enter_context(ExitStack())
        readers, _ = _open(services, held, request)
        ranks = _one_reader_per_rank(request, request.stamps, readers)
        wanted = CheckpointSpec(
            target=target,
            node=request.node,
            format=request.format,
            model_dtype=request.model_dtype,
            model_type=request.model_type,
            shard_bytes_max=request.shard_bytes_max,
            overwrite=False,
        )
        bytes_per_s = services.config.checkpoint_bytes_per_s or None
        job = FilesJob(wanted, request.files, ranks, held, bytes_per_s=bytes_per_s)
        guard.pop_all()
        return job


def _open(
    services: Services, held: ExitStack, request: WriteCheckpoint | WriteFiles
) -> tuple[list[StateReader], list[str]]:
    """Readers of the version here and at the given sources, and those sources on other nodes."""
    deployment, seq = request.deployment, request.seq
    readers: list[StateReader] = [*lease_states(services.store, held, deployment, seq)]
    near = dict.fromkeys(nearest(address) for address in request.sources)
    elsewhere = [address for address in near if address != services.config.listen]
    ticket = services.key.mint(AGENT)
    for address in elsewhere:
        readers += open_elsewhere(held, services.network, address, ticket, deployment, seq)
    return readers, elsewhere


def _others(
    services: Services,
    request: WriteCheckpoint,
    stamps: tuple[str, ...],
    elsewhere: Sequence[str],
) -> OtherNodes | None:
    """The sources on other machines; those on this one have the same disk."""
    addresses = [address for address in elsewhere if is_remote(address)]
    if not addresses:
        return None
    part = WriteFiles(
        deployment=request.deployment,
        seq=request.seq,
        name=request.name,
        node=services.config.node,
        sources=request.sources,
        stamps=stamps,
        format=request.format,
        model_dtype=request.model_dtype,
        model_type=request.model_type,
        shard_bytes_max=request.shard_bytes_max,
    )
    return OtherNodes(services.network, addresses, services.key.mint(AGENT), part)


def _status(caller: DaemonCaller, request: CheckpointStatus, _: Sequence[int]) -> DaemonReply:
    if request.name is not None:
        target = _target(caller, request.deployment, request.name)
        report = caller.services.checkpoints.find(target)
        # A retention policy or a user may have deleted it.
        is_gone = (
            report is not None
            and report["state"] == CheckpointState.DURABLE
            and not target.exists()
        )
        if report is None or is_gone:
            record = _record(target)
            report = None if record is None else _complete(target, record)
        if report is None:
            raise CheckpointNotFoundError(
                f"checkpoint {request.name!r} does not exist and is not being written"
            )
        reports = [report]
    else:
        _check_own_job(caller, request.deployment)
        job = job_name(request.deployment)
        # Before the listing, which takes a while: a checkpoint may become durable meanwhile.
        reports = caller.services.checkpoints.reports()
        known = {
            place.name: _complete(place, record)
            for place, record in _root(caller.services).complete(job)
        }
        for report in reports:
            # A durable checkpoint without a manifest was deleted.
            is_gone = report["state"] == CheckpointState.DURABLE and report["name"] not in known
            if report["job"] == job and not is_gone:
                known[report["name"]] = report
        reports = [known[name] for name in sorted(known)]
    return DaemonReply({"checkpoints": reports})


def _cancel(caller: DaemonCaller, request: CancelCheckpoint, _: Sequence[int]) -> DaemonReply:
    target = _target(caller, request.deployment, request.name)
    return DaemonReply({**caller.services.checkpoints.cancel(target)})


ENTRIES = (
    handles(WriteCheckpoint, _write, TICKETS),
    handles(CheckpointStatus, _status, TICKETS),
    handles(CancelCheckpoint, _cancel, TICKETS),
)


def _target(caller: DaemonCaller, deployment: str, name: str) -> CheckpointPlace:
    _check_own_job(caller, deployment)
    return _root(caller.services).place(job_name(deployment), checked_name(name))


def _root(services: Services) -> CheckpointRoot:
    root = services.checkpoints.root
    if root is None:
        raise InvalidRequestError(
            "this StateManager has no checkpoint_url: set one in its configuration"
        )
    return root


def _check_own_job(caller: DaemonCaller, deployment: str) -> None:
    claims = caller.claims
    if claims.role == TicketRole.WORKER and job_of(deployment) != claims.job:
        raise PermissionDeniedError(
            f"{claims.holder} may not use checkpoints of job {job_of(deployment)!r}: its ticket "
            f"is for job {claims.job!r}"
        )


def _one_reader_per_rank(
    request: WriteCheckpoint | WriteFiles,
    stamps: Sequence[str] | None,
    readers: Sequence[StateReader],
) -> list[StateReader]:
    """The first reader of each rank, in rank order."""
    by_rank: dict[int, StateReader] = {}
    for reader in readers:
        manifest = reader.manifest
        if stamps is None or manifest.stamp in stamps:
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
    caller: DaemonCaller, request: WriteCheckpoint, target: CheckpointPlace, stamps: tuple[str, ...]
) -> CheckpointView | None:
    """The report of the same checkpoint, if it is complete or being written.

    Raises:
        CheckpointExistsError: another checkpoint has the name, and `overwrite` is not set.
    """
    jobs = caller.services.checkpoints
    if jobs.is_active(target, stamps, request.asked_by):
        return jobs.find(target)
    report = jobs.find(target)
    is_active = report is not None and not CheckpointState(report["state"]).is_final
    # A damaged checkpoint also occupies the name, and may be replaced.
    record = _record(target)
    if (
        not is_active
        and record is not None
        and (record.stamps, record.asked_by) == (stamps, request.asked_by)
    ):
        return _complete(target, record)
    if (target.exists() or is_active) and not request.overwrite:
        raise CheckpointExistsError(
            f"checkpoint {request.name!r} exists: choose another name or set overwrite"
        )
    return None


def _record(target: CheckpointPlace) -> CheckpointRecord | None:
    """The manifest, unless it is missing or damaged. Raises `StoreUnavailableError`."""
    try:
        return target.read_record()
    except StoreUnavailableError:
        raise
    except PlexRLError:
        return None


def _complete(target: CheckpointPlace, record: CheckpointRecord) -> CheckpointView:
    nbytes = sum(file.nbytes for file in record.files)
    return CheckpointView(
        job=JobId(target.job),
        name=target.name,
        path=str(target),
        state=CheckpointState.DURABLE,
        seq=record.seq,
        step=record.step,
        bytes_done=nbytes,
        bytes_total=nbytes,
        seconds=0.0,
        as_of=target.written_ns() / 1e9,
        error=None,
    )


def _wanted(request: WriteCheckpoint, target: CheckpointPlace, node: str) -> CheckpointSpec:
    return CheckpointSpec(
        target=target,
        node=node,
        format=request.format,
        model_dtype=request.model_dtype,
        model_type=request.model_type,
        shard_bytes_max=request.shard_bytes_max,
        overwrite=request.overwrite,
        asked_by=request.asked_by,
        step=request.step,
        trainer_step=request.trainer_step,
        keep=request.keep,
    )
