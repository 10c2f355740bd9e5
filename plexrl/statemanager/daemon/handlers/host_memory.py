"""Host-tier memory, allocated to a rank whose optimizer state stays there."""

from collections.abc import Sequence

from plexrl.errors import ConflictError, InvalidRequestError
from plexrl.statemanager.daemon.handlers.caller import WORKERS, DaemonCaller, DaemonReply, handles
from plexrl.statemanager.daemon.registry.registry import Registration, check_slices
from plexrl.statemanager.device.memory import WritableDevice
from plexrl.statemanager.layout.versions import Manifest, padded
from plexrl.statemanager.protocol.host_requests import (
    BorrowHost,
    Returned,
    ReturnHost,
    host_start,
)
from plexrl.statemanager.protocol.messages import Register
from plexrl.statemanager.store.tiers.host.allocations import HostState


def check_slice_offsets(request: Register) -> None:
    """Refuse slices that lie neither in the arena nor in host memory.

    Raises:
        InvalidRequestError: a slice lies outside both.
    """
    start = host_start(request.arena_bytes)
    if not request.host_bytes:
        check_slices(request.slices, request.arena_bytes)
        return
    in_arena = [piece for piece in request.slices if piece.arena_offset < start]
    check_slices(in_arena, request.arena_bytes)
    check_slices(request.slices, start + request.host_bytes)


def host_state(caller: DaemonCaller, request: Register, near: int | None) -> HostState | None:
    """The host-memory record of a rank that registers; None if the rank wants no host memory.
    `near`: memory node of its GPU."""
    if not request.host_bytes:
        return None
    return HostState(
        start=host_start(request.arena_bytes),
        nbytes=padded(request.host_bytes),
        tenant=caller.claims.tenant,
        owner=f"{request.deployment} rank {request.rank}",
        near=near,
    )


def adopt_host(registration: Registration, fds: Sequence[int], request: Register) -> list[bool]:
    """Adopt host memory that the rank mapped before the daemon restarted; return which of the
    descriptors are recognised."""
    first = len(request.segment_bytes)
    held = fds[first : first + request.host_held]
    host, allocations = registration.host, registration.host_allocations
    if host is None or allocations is None:
        return [False] * len(held)
    return [
        allocations.adopt(fd, host) or allocations.adopt_snapshot(fd, host, registration.shard)
        for fd in held
    ]


def keep_host(previous: Registration, registration: Registration) -> None:
    """Move the host memory of the connection's previous registration to the new one.

    Raises:
        InvalidRequestError: the new registration names another size.
    """
    assert previous.host is not None
    if registration.host is None or registration.host.nbytes != previous.host.nbytes:
        raise InvalidRequestError(
            f"{previous.description} has {previous.host.nbytes} bytes of host memory: register the "
            "same size again"
        )
    host, previous.host = previous.host, None
    host.start = registration.host.start
    registration.host = host


def is_in_host(manifest: Manifest, registration: Registration) -> bool:
    """Whether a version's last section is in the rank's host memory."""
    host = registration.host
    return host is not None and any(e.arena_offset >= host.start for e in manifest.extents)


def open_host(registration: Registration) -> list[int]:
    """Descriptors of the rank's host memory after a load: one to read, and one to write if the
    memory is the rank's own allocation."""
    host, allocations = registration.host, registration.host_allocations
    if host is None or allocations is None:
        return []
    return allocations.open(host, writable=host.allocation is not None)


def allocate_step(caller: DaemonCaller, rank: Registration, arena_bytes: int) -> WritableDevice:
    """Allocate host memory for a step of the rank's stored state; returns it as one arena.

    Raises:
        ConflictError: the state is on the device, or no part of it stays in host memory.
        InvalidRequestError: no size is named.
        StateTierFullError: the host tier has no space; what was allocated is still the rank's.
    """
    if arena_bytes <= 0:
        raise InvalidRequestError(f"a step in {arena_bytes} bytes: name the memory for its slices")
    if rank.host is None or rank.allocation is not None:
        raise ConflictError(
            f"{rank.description} cannot step its stored state: it is loaded, or has no optimizer "
            "in host memory"
        )
    store = caller.services.store
    rank.release_host()
    rank.step = HostState(
        start=0,
        nbytes=padded(arena_bytes),
        tenant=rank.host.tenant,
        owner=f"{rank.host.owner} step",
        near=rank.host.near,
    )
    for state in (rank.step, rank.host):
        store.allocate_host(state)
    allocations = store.host_allocations
    return allocations.joined_memory(rank.host, allocations.memory(rank.step))


def clear_padding(rank: Registration, manifest: Manifest) -> None:
    """Zero what a reused file has outside of the version that was loaded into it: an earlier step
    of the rank, of another layout, may have left slices there, and a norm reads all of it."""
    allocations, host, step = rank.host_allocations, rank.host, rank.step
    assert allocations is not None
    assert host is not None
    assert step is not None
    ranges = [(extent.arena_offset, extent.nbytes) for extent in manifest.extents]
    there = [(offset - host.start, nbytes) for offset, nbytes in ranges if offset >= host.start]
    allocations.clear(step, [each for each in ranges if each[0] < host.start])
    allocations.clear(host, there)


def stepped_memory(rank: Registration) -> WritableDevice:
    """The memory for the arena's slices, to which the rank can no longer write.

    Raises:
        ConflictError: no step was begun, or the rank can still write to the memory.
    """
    if rank.step is None or rank.host_allocations is None:
        raise ConflictError(f"{rank.description} has begun no step of its stored state")
    rank.host_allocations.check_unwritten(rank.step)
    return rank.host_allocations.memory(rank.step)


def open_step(rank: Registration) -> list[int]:
    """Descriptors of the memory of a step: to read and to write the arena's slices, then the same
    of the host memory."""
    assert rank.host_allocations is not None
    assert rank.step is not None
    step = rank.host_allocations.open(rank.step, writable=True)
    return [*step, *open_host(rank)]


def _borrow(caller: DaemonCaller, request: BorrowHost, _: Sequence[int]) -> DaemonReply:
    registration = caller.registered()
    store = caller.services.store
    with registration.exclusive():
        caller.services.fencing.admit(registration.group, request.token)
        host = _host(registration)
        holds = host.allocation is not None
        if not holds:
            store.allocate_host(host)
        return DaemonReply({"holds": holds}, store.host_allocations.open(host, writable=True))


def _return(caller: DaemonCaller, request: ReturnHost, _: Sequence[int]) -> DaemonReply:
    registration = caller.registered()
    with registration.exclusive():
        host, allocations = _host(registration), caller.services.store.host_allocations
        if request.what == Returned.ALL:
            registration.release_host()
            return DaemonReply({})
        if request.what != Returned.LOAN:
            allocations.release_snapshot(host)
        if request.what != Returned.BASE:
            allocations.release_allocation(host)
        return DaemonReply({})


def _host(registration: Registration) -> HostState:
    if registration.host is None:
        raise InvalidRequestError(
            f"{registration.description} registered no host memory: register it with host_bytes"
        )
    return registration.host


ENTRIES = (
    handles(BorrowHost, _borrow, WORKERS),
    handles(ReturnHost, _return, WORKERS),
)
