"""Ranks come with their arenas, and deployments go."""

from collections.abc import Sequence

from plexrl.errors import InvalidRequestError, PermissionDeniedError
from plexrl.statemanager.daemon.handlers.caller import AGENTS, WORKERS, Caller, Reply, handles
from plexrl.statemanager.daemon.handlers.host_memory import (
    adopt_host,
    check_places,
    host_state,
    keep_host,
)
from plexrl.statemanager.daemon.registry import Registration
from plexrl.statemanager.protocol.messages import Register, Release


def _register(caller: Caller, request: Register, fds: Sequence[int]) -> Reply:
    _check_is_own(caller, request)
    services = caller.services
    if request.kind != services.devices.kind:
        raise InvalidRequestError(
            f"the arena is on {request.kind.value}; this node's StateManager lends "
            f"{services.devices.kind.value} memory: set `device` of its configuration"
        )
    check_places(request)
    services.fencing.admit(request.group, request.token)
    registration = Registration(
        deployment=request.deployment,
        rank=request.rank,
        world_size=request.world_size,
        group=request.group,
        slices=request.slices,
        arena_bytes=request.arena_bytes,
        device=request.device,
        uid=caller.uid,
        devices=services.devices,
        host=host_state(caller, request),
        loans=services.store.loans,
    )
    former = caller.own
    if request.keeps_memory:
        _hand_over(former, registration)
    elif request.segment_bytes:
        if sum(request.segment_bytes) < request.arena_bytes:
            raise InvalidRequestError(
                f"segments of {sum(request.segment_bytes)} bytes do not hold an arena of "
                f"{request.arena_bytes}"
            )
        registration.loan = services.devices.adopt(
            fds[: len(request.segment_bytes)],
            request.segment_bytes,
            device=request.device,
            uid=caller.uid,
        )
    known = [] if request.keeps_memory else adopt_host(registration, fds, request)
    caller.own = registration
    services.registry.add(registration)
    if former is not None:
        services.registry.remove(former)
    return Reply({"host_known": known})


def _hand_over(former: Registration | None, registration: Registration) -> None:
    """Give the memory of the connection's former registration to its next.

    Raises:
        ConflictError: the former one was ended by another process.
        InvalidRequestError: it has no memory that suits.
    """
    if former is None or former.device != registration.device:
        raise InvalidRequestError("this connection registered no arena on that device before")
    with former.moving() as loan:
        if loan.nbytes < registration.arena_bytes:
            raise InvalidRequestError(
                f"an arena of {registration.arena_bytes} bytes has memory of {loan.nbytes} only"
            )
        registration.loan, former.loan = loan, None
        if former.host is not None:
            keep_host(former, registration)


def _release(caller: Caller, request: Release, _: Sequence[int]) -> Reply:
    services = caller.services
    services.registry.remove_deployment(request.deployment)
    services.incarnations.forget(request.deployment)
    services.store.release(request.deployment)
    return Reply({})


ENTRIES = (handles(Register, _register, WORKERS), handles(Release, _release, AGENTS))


def _check_is_own(caller: Caller, request: Register) -> None:
    """A ticket is for one rank of one deployment, in one group."""
    claims = caller.claims
    asked = (request.deployment, request.rank, request.world_size)
    if asked != (claims.deployment, claims.rank, claims.world_size):
        raise PermissionDeniedError(
            f"rank {request.rank} of {request.world_size} of {request.deployment!r} cannot be "
            f"registered here: the ticket is for rank {claims.rank} of {claims.world_size} of "
            f"{claims.deployment!r}"
        )
    if claims.group and request.group != claims.group:
        raise PermissionDeniedError(
            f"{claims.holder} is in group {claims.group!r}, by its ticket, not in "
            f"{request.group!r}: have the node agent start it anew"
        )
    caller.services.incarnations.admit(claims)
