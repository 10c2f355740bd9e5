"""Memory of the host tier, lent to a rank whose optimizer's state stays there."""

from collections.abc import Sequence

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.daemon.handlers.caller import WORKERS, Caller, Reply, handles
from plexrl.statemanager.daemon.registry import Registration, check_slices
from plexrl.statemanager.host.allocations import HostState
from plexrl.statemanager.protocol.host_requests import (
    BorrowHost,
    Returned,
    ReturnHost,
    host_start,
)
from plexrl.statemanager.protocol.messages import Register
from plexrl.statemanager.store.versions.versions import Manifest, padded


def check_places(request: Register) -> None:
    """Refuse slices that lie neither in the arena nor in host memory.

    Raises:
        InvalidRequestError: likewise.
    """
    start = host_start(request.arena_bytes)
    if not request.host_bytes:
        check_slices(request.slices, request.arena_bytes)
        return
    in_arena = [piece for piece in request.slices if piece.arena_offset < start]
    check_slices(in_arena, request.arena_bytes)
    check_slices(request.slices, start + request.host_bytes)


def host_state(caller: Caller, request: Register) -> HostState | None:
    """What a rank that registers is to have in host memory."""
    if not request.host_bytes:
        return None
    return HostState(
        start=host_start(request.arena_bytes),
        nbytes=padded(request.host_bytes),
        tenant=caller.claims.tenant,
        owner=f"{request.deployment} rank {request.rank}",
    )


def adopt_host(own: Registration, fds: Sequence[int], request: Register) -> list[bool]:
    """Take up what the rank has mapped of a daemon before this one; says what of it is known."""
    first = len(request.segment_bytes)
    held = fds[first : first + request.host_held]
    if own.host is None or own.loans is None:
        return [False] * len(held)
    return [
        own.loans.adopt(fd, own.host) or own.loans.adopt_base(fd, own.host, own.shard)
        for fd in held
    ]


def keep_host(former: Registration, registration: Registration) -> None:
    """Give what the connection's former registration was lent to its next.

    Raises:
        InvalidRequestError: it is of another size.
    """
    assert former.host is not None
    if registration.host is None or registration.host.nbytes != former.host.nbytes:
        raise InvalidRequestError(
            f"rank {former.rank} of {former.deployment!r} has {former.host.nbytes} bytes of host "
            "memory: register the same again"
        )
    host, former.host = former.host, None
    host.start = registration.host.start
    registration.host = host


def in_host(manifest: Manifest, own: Registration) -> bool:
    """Whether a version's last section is in the rank's host memory."""
    host = own.host
    return host is not None and any(e.arena_offset >= host.start for e in manifest.extents)


def opened_host(own: Registration) -> list[int]:
    """Descriptors of the rank's host memory after a load: one to read with, and one to write with
    where it is a copy."""
    if own.host is None or own.loans is None:
        return []
    return own.loans.open(own.host, writable=own.host.loan is not None)


def _borrow(caller: Caller, request: BorrowHost, _: Sequence[int]) -> Reply:
    own = caller.registered()
    store = caller.services.store
    with own.in_turn():
        caller.services.fencing.admit(own.group, request.token)
        host = _host(own)
        holds = host.loan is not None
        if not holds:
            store.lend(host)
        return Reply({"holds": holds}, store.loans.open(host, writable=True))


def _return(caller: Caller, request: ReturnHost, _: Sequence[int]) -> Reply:
    own = caller.registered()
    with own.in_turn():
        host, loans = _host(own), caller.services.store.loans
        if request.what != Returned.LOAN:
            loans.let_go(host)
        if request.what != Returned.BASE:
            loans.take_back(host)
        return Reply({})


def _host(own: Registration) -> HostState:
    if own.host is None:
        raise InvalidRequestError(f"rank {own.rank} of {own.deployment!r} registered no host bytes")
    return own.host


ENTRIES = (
    handles(BorrowHost, _borrow, WORKERS),
    handles(ReturnHost, _return, WORKERS),
)
