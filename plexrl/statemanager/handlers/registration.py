"""Ranks come with their arenas, and deployments go."""

import os
from collections.abc import Sequence

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.handlers.caller import Caller, Reply, handles
from plexrl.statemanager.protocol import Register, Release
from plexrl.statemanager.registry import Registration, check_slices


def _register(caller: Caller, request: Register, fds: Sequence[int]) -> Reply:
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
    services.store.release(request.deployment)
    return Reply({})


ENTRIES = (handles(Register, _register), handles(Release, _release))
