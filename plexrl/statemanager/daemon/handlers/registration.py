"""Connections that identify themselves, ranks that register arenas, and deployments that end."""

from collections.abc import Sequence

from plexrl.errors import ConflictError, InvalidRequestError, PermissionDeniedError
from plexrl.statemanager.daemon.handlers.caller import (
    AGENTS,
    WORKERS,
    DaemonCaller,
    DaemonReply,
    handles,
)
from plexrl.statemanager.daemon.handlers.host_memory import (
    adopt_host,
    check_slice_offsets,
    host_state,
    keep_host,
)
from plexrl.statemanager.daemon.registry.registry import Registration
from plexrl.statemanager.protocol.messages import Hello, Register, Release
from plexrl.statemanager.protocol.tickets import Claims, TicketRole


def _hello(caller: DaemonCaller, request: Hello, _: Sequence[int]) -> DaemonReply:
    claims = caller.services.key.verify(request.ticket)
    if caller.shown_claims not in (None, claims):
        raise ConflictError(
            f"this connection belongs to {caller.claims.holder}: open another for {claims.holder}"
        )
    _check_user(caller, claims)
    if claims.role == TicketRole.WORKER:
        caller.services.incarnations.admit(claims)
    caller.shown_claims = claims
    return DaemonReply({})


def _register(caller: DaemonCaller, request: Register, fds: Sequence[int]) -> DaemonReply:
    _check_ticket_matches(caller, request)
    services = caller.services
    if request.kind != services.devices.kind:
        raise InvalidRequestError(
            f"the arena is on {request.kind.value}; this node's StateManager allocates "
            f"{services.devices.kind.value} memory: set `device` in its configuration"
        )
    check_slice_offsets(request)
    devices = services.devices
    device = devices.index_of(request.device_uuid) if request.device_uuid else request.device
    services.fencing.admit(request.group, request.token)
    near = services.store.place_rank((request.deployment, request.rank), device)
    registration = Registration(
        deployment=request.deployment,
        rank=request.rank,
        world_size=request.world_size,
        group=request.group,
        slices=request.slices,
        arena_bytes=request.arena_bytes,
        device=device,
        uid=caller.uid,
        pid=caller.pid,
        devices=devices,
        host=host_state(caller, request, near),
        host_allocations=services.store.host_allocations,
    )
    previous = caller.registration
    if request.keeps_memory:
        _hand_over(previous, registration)
    elif request.segment_bytes:
        if sum(request.segment_bytes) < request.arena_bytes:
            raise InvalidRequestError(
                f"segments of {sum(request.segment_bytes)} bytes do not hold an arena of "
                f"{request.arena_bytes}"
            )
        registration.allocation = services.devices.adopt(
            fds[: len(request.segment_bytes)],
            request.segment_bytes,
            device=device,
            uid=caller.uid,
        )
    known = [] if request.keeps_memory else adopt_host(registration, fds, request)
    caller.registration = registration
    services.registry.add(registration)
    if previous is not None:
        services.registry.remove(previous)
    return DaemonReply({"host_known": known})


def _hand_over(previous: Registration | None, registration: Registration) -> None:
    """Move the memory of the connection's previous registration to the new one.

    Raises:
        ConflictError: another process ended the previous registration.
        InvalidRequestError: the previous registration has no memory that fits.
    """
    if previous is None or previous.device != registration.device:
        raise InvalidRequestError("this connection registered no arena on that device before")
    with previous.exclusive_memory() as allocation:
        if allocation.nbytes < registration.arena_bytes:
            raise InvalidRequestError(
                f"an arena of {registration.arena_bytes} bytes does not fit into the "
                f"{allocation.nbytes} bytes that are allocated"
            )
        registration.allocation, previous.allocation = allocation, None
        if previous.host is not None:
            keep_host(previous, registration)


def _release(caller: DaemonCaller, request: Release, _: Sequence[int]) -> DaemonReply:
    services, kept_ranks = caller.services, request.kept_ranks
    if kept_ranks is not None:
        others = services.store.find(
            lambda found: found.deployment == request.deployment and found.rank not in kept_ranks
        )
        services.store.drop(version.manifest.name for version in others)
        return DaemonReply({})
    services.registry.remove_deployment(request.deployment)
    services.incarnations.forget(request.deployment)
    services.store.release(request.deployment)
    return DaemonReply({})


ENTRIES = (
    handles(Hello, _hello, ()),
    handles(Register, _register, WORKERS),
    handles(Release, _release, AGENTS),
)


def _check_user(caller: DaemonCaller, claims: Claims) -> None:
    """Refuse a tenant that does not match the client's user, where `tenant_uids` pairs the two."""
    tenant_uids = caller.services.config.tenant_uids
    own = tenant_uids.get(claims.tenant)
    tenants = [tenant for tenant, uid in tenant_uids.items() if uid == caller.uid]
    if (own is not None and own != caller.uid) or (tenants and claims.tenant not in tenants):
        raise PermissionDeniedError(
            f"user {caller.uid} shows a ticket of tenant {claims.tenant!r}, which is not its own: "
            f"run {claims.holder} as user {own if own is not None else 'of the StateManager'}",
            uid=caller.uid,
        )


def _check_ticket_matches(caller: DaemonCaller, request: Register) -> None:
    """Refuse a rank other than the one that the ticket names: a ticket is for one rank of one
    deployment, in one group."""
    claims = caller.claims
    named = (request.deployment, request.rank, request.world_size)
    if named != (claims.deployment, claims.rank, claims.world_size):
        raise PermissionDeniedError(
            f"rank {request.rank} of {request.world_size} of {request.deployment!r} cannot be "
            f"registered here: the ticket is for rank {claims.rank} of {claims.world_size} of "
            f"{claims.deployment!r}"
        )
    caller.check_group(request.group)
    caller.services.incarnations.admit(claims)
