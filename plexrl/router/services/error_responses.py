"""Errors as HTTP responses.

`Retry-After` means that the same request succeeds later. Only a refusal carries the header, never
the error with which an operation has ended.
"""

from fastapi import Request
from fastapi.responses import JSONResponse

from plexrl.errors import (
    ConnectionLostError,
    LeaseLostError,
    OverloadedError,
    PlexRLError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    UnavailableError,
)

RETRIABLE = (
    *(ConnectionLostError, LeaseLostError, OverloadedError),
    *(StorageFullError, StorageUnavailableError, UnavailableError),
)
"""Refusals after which the same request, unchanged, succeeds later."""

RETRY_AFTER_S = 1.0
"""Used if the error has no `retry_after_s` of its own."""

SHOWN = frozenset({"state_lost", "corrupt_state"})
"""Codes of storage errors that concern the tenant's own state."""

INTERNAL = frozenset({"lease_held", "store_unavailable"})
"""Codes of other errors whose messages name parts of the cluster."""


def error_response(error: PlexRLError) -> JSONResponse:
    """The response to a request that was refused."""
    after_s = error.details.get("retry_after_s")
    headers = {}
    if isinstance(after_s, int | float):
        headers["Retry-After"] = str(max(1, round(after_s)))
    elif isinstance(error, RETRIABLE):
        headers["Retry-After"] = str(max(1, round(RETRY_AFTER_S)))
    return JSONResponse({"error": error.to_wire()}, status_code=error.status, headers=headers)


def final_response(error: PlexRLError) -> JSONResponse:
    """The error with which an operation has ended; a retry of the request returns the same."""
    return JSONResponse({"error": error.to_wire()}, status_code=error.status)


def error_for(request: Request, error: PlexRLError) -> PlexRLError:
    """`error` as the sender of a request may see it."""
    caller = getattr(request.state, "caller", None)
    return error if caller is not None and caller.sees_all else public_error(error)


def public_error(error: PlexRLError) -> PlexRLError:
    """`error` as a tenant may see it; class and code stay.

    Messages about the cluster's storage name databases, hosts and folders. Only the operator can
    mend these, and finds the messages in the logs and in `plexrl status`.
    """
    is_internal = isinstance(error, StorageError) or error.code in INTERNAL
    if not is_internal or error.code in SHOWN:
        return error
    message = (
        f"the cluster cannot accept this now ({error.code}); nothing was changed. The same request "
        "succeeds once the operator has fixed the cause: `plexrl status` and the scheduler's log "
        "show it"
    )
    kept = {name: value for name, value in error.details.items() if name == "retry_after_s"}
    return type(error)(message, **kept)
