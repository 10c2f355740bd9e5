"""Errors as HTTP answers.

`Retry-After` says that the same request will be taken later. Only a refusal carries it, never the
error with which an operation has ended.
"""

from fastapi.responses import JSONResponse

from plexrl.errors import (
    ConnectionLostError,
    JournalUnavailableError,
    LeaseLostError,
    OverloadedError,
    PlexRLError,
    StorageFullError,
    UnavailableError,
)

ASKED_AGAIN = (
    *(ConnectionLostError, JournalUnavailableError, LeaseLostError),
    *(OverloadedError, StorageFullError, UnavailableError),
)
"""Refusals after which the same request, unchanged, is taken later."""

RETRY_AFTER_S = 1.0
"""Where the error does not say."""


def error_response(error: PlexRLError) -> JSONResponse:
    """The answer to a request that was refused."""
    after_s = error.details.get("retry_after_s")
    headers = {}
    if isinstance(after_s, int | float):
        headers["Retry-After"] = str(max(1, round(after_s)))
    elif isinstance(error, ASKED_AGAIN):
        headers["Retry-After"] = str(max(1, round(RETRY_AFTER_S)))
    return JSONResponse({"error": error.to_wire()}, status_code=error.status, headers=headers)


def final_response(error: PlexRLError) -> JSONResponse:
    """The error with which an operation has ended: to ask again changes nothing."""
    return JSONResponse({"error": error.to_wire()}, status_code=error.status)
