"""Ranks come with their arenas, and deployments go."""

import os
from collections.abc import Sequence

from plexrl.errors import InvalidRequestError, PermissionDeniedError
from plexrl.statemanager.handlers.caller import AGENTS, WORKERS, Caller, Reply, handles
from plexrl.statemanager.protocol import Register, Release
from plexrl.statemanager.registry import Registration, check_slices


def _register(caller: Caller, request: Register, fds: Sequence[int]) -> Reply:
    _check_is_own(caller, request)
    if len(fds) != 1:
        raise InvalidRequestError(f"register needs the arena's descriptor; {len(fds)} came")
    check_slices(request.slices, os.fstat(fds[0]).st_size)
    services = caller.services
    services.fencing.admit(request.group, request.token)
    registration = Registration(
        deployment=request.deployment,
        rank=request.rank,
        world_size=request.world_size,
        group=request.group,
        slices=request.slices,
        fd=os.dup(fds[0]),
    )
    former, caller.own = caller.own, registration
    services.registry.add(registration)
    if former is not None:
        services.registry.remove(former)
    return Reply({})


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
