"""Who is at the other end."""

from collections.abc import Sequence

from plexrl.errors import ConflictError, PermissionDeniedError
from plexrl.statemanager.daemon.handlers.caller import Caller, Reply, handles
from plexrl.statemanager.protocol.messages import Hello
from plexrl.statemanager.protocol.tickets import Claims, Role


def _hello(caller: Caller, request: Hello, _: Sequence[int]) -> Reply:
    claims = caller.services.key.verify(request.ticket)
    if caller.said not in (None, claims):
        raise ConflictError(
            f"this connection is that of {caller.claims.holder}: open another for {claims.holder}"
        )
    _check_user(caller, claims)
    if claims.role == Role.WORKER:
        caller.services.incarnations.admit(claims)
    caller.said = claims
    return Reply({})


ENTRIES = (handles(Hello, _hello, ()),)


def _check_user(caller: Caller, claims: Claims) -> None:
    """A tenant with a user of its own is served as that user only, and that user as it only."""
    tenant_uids = caller.services.config.tenant_uids
    own = tenant_uids.get(claims.tenant)
    tenants = [tenant for tenant, uid in tenant_uids.items() if uid == caller.uid]
    if (own is not None and own != caller.uid) or (tenants and claims.tenant not in tenants):
        raise PermissionDeniedError(
            f"user {caller.uid} shows a ticket of tenant {claims.tenant!r}, which is not its own: "
            f"run {claims.holder} as user {own if own is not None else 'of the StateManager'}",
            uid=caller.uid,
        )
