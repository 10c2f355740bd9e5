"""Bases that adapters lie on, lent to several ranks at once."""

from collections.abc import Sequence

from plexrl.errors import ConflictError
from plexrl.statemanager.daemon.handlers.caller import WORKERS, Caller, Reply, handles
from plexrl.statemanager.daemon.handlers.lending import segments_answer
from plexrl.statemanager.device.shared_bases import BaseKey
from plexrl.statemanager.protocol.messages import BaseIsWhole, BorrowBase, ReturnBase


def _borrow(caller: Caller, request: BorrowBase, _: Sequence[int]) -> Reply:
    own = caller.registered()
    key, bases = _key(caller, request), caller.services.bases
    while True:
        # Another may take minutes to fill it, and this rank can be released meanwhile.
        bases.await_turn(key, caller.base_user)
        with own.in_turn():
            caller.services.fencing.admit(own.group, request.token)
            lent = bases.borrow(key, caller.base_user)
        if lent is not None:
            return Reply({**segments_answer(lent.loan), "is_whole": lent.is_whole}, lent.fds)


def _is_whole(caller: Caller, request: BaseIsWhole, _: Sequence[int]) -> Reply:
    if not caller.services.bases.is_whole(_key(caller, request), caller.base_user):
        raise ConflictError("this connection was lent no such base to fill: borrow it again")
    return Reply({})


def _give_back(caller: Caller, _: ReturnBase, __: Sequence[int]) -> Reply:
    caller.services.bases.give_back(caller.base_user)
    return Reply({})


ENTRIES = (
    handles(BorrowBase, _borrow, WORKERS),
    handles(BaseIsWhole, _is_whole, WORKERS),
    handles(ReturnBase, _give_back, WORKERS),
)


def _key(caller: Caller, request: BorrowBase | BaseIsWhole) -> BaseKey:
    own = caller.registered()
    return BaseKey(caller.claims.tenant, own.uid, own.device, request.content, request.nbytes)
