"""The Tinker API as an ASGI application, in front of PlexRL's own API.

Requests below `/api/v1` are the SDK's; all others go on to PlexRL. An API key `tml-KEY` in the
header `X-API-Key` is PlexRL's key KEY.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from plexrl.errors import JobEndedError, PlexRLError
from plexrl.router.server.request_limits import BodyRefusedError, RequestLimits, close_after
from plexrl.router.services.access_table import needs_key
from plexrl.router.services.error_responses import RETRIABLE, RETRY_AFTER_S, error_for
from plexrl.router.services.guarded_route import include_guarded
from plexrl.router.services.services import RouterServices
from plexrl.router.tinker.api import ClusterApi
from plexrl.router.tinker.records import RecordFile
from plexrl.router.tinker.routes import checkpoints, sampling, traces, training
from plexrl.router.tinker.routes import sessions as session_routes
from plexrl.router.tinker.routes.client import BODY_BYTES_MAX, TinkerRoute
from plexrl.router.tinker.sessions import Sessions

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LOG = logging.getLogger(__name__)

PREFIX = f"{TinkerRoute.prefix}/"
KEY_PREFIX = "tml-"
"""The SDK refuses a key that begins otherwise."""
POLLS = (f"{PREFIX}retrieve_future", f"{PREFIX}retrieve_futures")
"""The SDK repeats a poll that fails with 5xx without a pause, and after 429 with one."""
SUBJECTS = tuple(
    subject.ROUTES for subject in (session_routes, sampling, training, traces, checkpoints)
)
"""All routes. The last ones, of `checkpoints`, refuse what no other has."""
RECORDS = "tinker.sqlite"
KEPT_STATUSES = (401, 403, 404, 413, 429)
"""Statuses of errors that keep their meaning. The SDK sends a request again after 408, 409 and 429,
so that other refusals have 422."""


class TinkerApi:
    """ASGI middleware that answers the requests of the Tinker SDK."""

    def __init__(self, app: "ASGIApp", *, services: RouterServices, timeout_s: float) -> None:
        self._app = app
        self._tinker = _make_app(services, timeout_s)
        self._services = services

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer a request of the SDK, or pass it on."""
        if scope["type"] == "lifespan":
            await self._run_with(scope, receive, send)
        elif scope["type"] == "http" and scope["path"].startswith(PREFIX):
            await self._tinker(_with_bearer(scope), receive, send)
        else:
            await self._app(scope, receive, send)

    async def _run_with(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        # A line for each call would fill the log; failed ones are logged where they are handled.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        api = ClusterApi(scope["app"])
        records = RecordFile(self._services.data_dir / RECORDS)
        sessions = Sessions(self._services, api, records)
        self._tinker.state.sessions = sessions
        sweep = asyncio.create_task(sessions.run())
        try:
            await self._app(scope, receive, send)
        finally:
            sweep.cancel()
            await asyncio.gather(sweep, return_exceptions=True)
            await sessions.futures.close()
            await api.close()
            records.close()


def _make_app(services: RouterServices, timeout_s: float) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.services = services
    app.add_exception_handler(PlexRLError, _refused)
    app.add_exception_handler(BodyRefusedError, _refused_body)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(
        RequestLimits,
        authenticate=services.caller,
        needs_key=needs_key,
        error_response=_refused,
        bytes_max=min(services.body_bytes_max, BODY_BYTES_MAX),
        timeout_s=timeout_s,
    )
    include_guarded(app, *SUBJECTS)
    return app


def _with_bearer(scope: "Scope") -> "Scope":
    """The scope of a request whose `X-API-Key` is an `Authorization` header."""
    headers = [header for header in scope["headers"] if header[0] != b"authorization"]
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            key = value.decode("latin-1").removeprefix(KEY_PREFIX)
            headers.append((b"authorization", f"Bearer {key}".encode("latin-1")))
    return {**scope, "headers": headers}


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PlexRLError)
    shown = error_for(request, error)
    status = shown.status
    headers = {}
    if isinstance(error, JobEndedError):
        status = 410
    elif status >= 500 and request.url.path in POLLS:
        status = 429
    elif isinstance(error, RETRIABLE):
        after_s = shown.details.get("retry_after_s", RETRY_AFTER_S)
        headers["Retry-After"] = str(max(1, round(float(str(after_s)))))
    elif status < 500 and status not in KEPT_STATUSES:
        status = 422
    body = {"error": shown.message, "detail": shown.message, "code": shown.code}
    return JSONResponse(body, status_code=status, headers=headers)


async def _refused_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BodyRefusedError)
    return close_after(await _refused(request, error.cause))


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return await _refused(request, PlexRLError("the router failed on this request: see its log"))
