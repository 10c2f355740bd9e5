"""Memory of the device, lent to a rank's arena and taken back."""

from collections.abc import Sequence

from plexrl.errors import ConflictError, DeviceMemoryFullError
from plexrl.statemanager.daemon.handlers.caller import WORKERS, Caller, Reply, handles
from plexrl.statemanager.daemon.registry import Registration
from plexrl.statemanager.device.backend import Loan
from plexrl.statemanager.device.lending import Fill, lend
from plexrl.statemanager.device.shared_bases import SharedBases
from plexrl.statemanager.protocol.messages import Answer, Attach, Detach


def lend_to(own: Registration, bases: SharedBases, fill: Fill | None = None) -> Reply:
    """Lend the rank's arena memory, filled; what the worker needs to map it. Idle bases give way.

    Raises:
        DeviceMemoryFullError: others have too much of it; nothing has changed.
    """
    while True:
        try:
            loan = lend(own.devices, own.arena_bytes, device=own.device, uid=own.uid, fill=fill)
            break
        except DeviceMemoryFullError:
            # Raised before anything is filled.
            if not bases.make_room(own.device):
                raise
    try:
        fds = loan.descriptors()
    except BaseException:
        own.devices.recycle(loan)
        raise
    own.loan = loan
    return Reply(segments_answer(loan), fds)


def segments_answer(loan: Loan) -> Answer:
    """What the client reads beside the descriptors."""
    return {"segment_bytes": loan.segment_bytes}


def _attach(caller: Caller, request: Attach, _: Sequence[int]) -> Reply:
    own = caller.registered()
    with own.in_turn():
        caller.services.fencing.admit(own.group, request.token)
        if own.loan is not None:
            raise ConflictError(f"rank {own.rank} of {own.deployment!r} has its memory already")
        lent = lend_to(own, caller.services.bases)
    expect_offload(caller)
    return lent


def expect_offload(caller: Caller) -> None:
    """What is lent comes to the host tier sooner or later, whose pages had better be there then."""
    services = caller.services
    services.store.make_ready(sum(services.registry.resident_bytes().values()))


def _detach(caller: Caller, _: Detach, __: Sequence[int]) -> Reply:
    own = caller.registered()
    with own.in_turn():
        loan, own.loan = own.loan, None
        if loan is not None:
            own.devices.recycle(loan)
        return Reply({})


ENTRIES = (handles(Attach, _attach, WORKERS), handles(Detach, _detach, WORKERS))
