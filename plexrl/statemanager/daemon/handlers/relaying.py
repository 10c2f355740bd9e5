"""Versions of other nodes, brought here once for all ranks of a deployment."""

from collections.abc import Sequence

from plexrl.errors import QuotaExceededError, StateTierFullError
from plexrl.statemanager.daemon.handlers.caller import WORKERS, Caller, Reply, handles
from plexrl.statemanager.protocol.messages import Relay
from plexrl.statemanager.transfer.relay import PUBLISHED_PARTS


def _relay(caller: Caller, request: Relay, _: Sequence[int]) -> Reply:
    own, services = caller.registered(), caller.services
    caller.claims.check_may_pull(request.source)
    ranks = [
        [piece for piece in registration.slices if piece.key.part in PUBLISHED_PARTS]
        for registration in services.registry.of(own.deployment)
    ]
    try:
        relayed = services.relays.bring(
            caller.claims,
            request.sources,
            (request.source, request.seq),
            ranks,
            request.delta,
        )
    except (StateTierFullError, QuotaExceededError) as error:
        # Without room for a copy here every rank can still pull for itself.
        return Reply({"relayed": False, "reason": error.message, "bytes_moved": 0})
    return Reply(
        {
            "relayed": relayed.choice.is_relayed,
            "reason": relayed.choice.reason,
            "bytes_moved": relayed.bytes_moved,
        }
    )


ENTRIES = (handles(Relay, _relay, WORKERS, is_move=True),)
