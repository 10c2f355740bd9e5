"""What a route handler knows of the client that asks."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import Depends, Query, Request

from plexrl.errors import JobEndedError, NotFoundError, OverloadedError, PayloadTooLargeError
from plexrl.limits import RECORDS_MAX
from plexrl.router.server.request_limits import BODY_KEY, LimitedBody
from plexrl.router.services.authentication import Caller
from plexrl.router.services.guarded_route import GuardedRoute
from plexrl.router.tinker.messages.codec import JsonRequest
from plexrl.router.tinker.records import FutureRecord, ModelRecord, SessionRecord
from plexrl.router.tinker.sessions import Sessions

if TYPE_CHECKING:
    from plexrl.router.services.services import RouterServices

BODY_BYTES_MAX = 64 << 20
"""Largest body. The SDK divides a batch into parts of about 5 MB."""
JSON_BYTES_MAX = 8 << 20
"""Largest body in JSON, which is decoded while no other request is served."""
SMALL_BYTES = 64 << 10
"""Bodies up to this size are admitted always."""
JsonT = TypeVar("JsonT", bound=JsonRequest)


class TinkerRoute(GuardedRoute):
    """A route of the Tinker API."""

    prefix = "/api/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A request, who sent it, and the state of all clients."""

    request: Request
    caller: Caller
    sessions: Sessions

    @property
    def key(self) -> str:
        """The `Authorization` header."""
        return self.request.headers["authorization"]

    async def body(self) -> bytes:
        """The request's body, within the router's bounds on payloads.

        Raises:
            BodyRefusedError: it is too large.
            OverloadedError: too many bytes are arriving already.
        """
        body = self.request.scope["state"][BODY_KEY]
        assert isinstance(body, LimitedBody)
        services: RouterServices = self.request.app.state.services
        declared = BODY_BYTES_MAX if body.content_length is None else body.content_length
        # Polls and heartbeats go on while large bodies wait.
        size = min(declared, BODY_BYTES_MAX) if declared > SMALL_BYTES else 0
        try:
            with services.uploads.admit(self.caller.tenant, size):
                async with asyncio.timeout(body.timeout_s):
                    return await self.request.body()
        except OverloadedError:
            # A client that is still sending does not read the response.
            await services.drain(body)
            raise

    async def json(self) -> bytes:
        """The same, of a request in JSON. Raises `PayloadTooLargeError`, and as `body`."""
        body = await self.body()
        if len(body) > JSON_BYTES_MAX:
            raise PayloadTooLargeError(
                f"the body is over {JSON_BYTES_MAX} bytes: send less, or split the request",
                body_bytes_max=JSON_BYTES_MAX,
            )
        return body

    async def read(self, kind: type[JsonT]) -> JsonT:
        """The request's JSON. Raises `InvalidRequestError`, and as `json`."""
        return kind.read(await self.json())

    def session(self, id: str) -> SessionRecord:
        """A session of the client that has not finished.

        Raises:
            JobEndedError: it has finished, or is not known.
        """
        try:
            found = self.sessions.find(SessionRecord, id, self.caller)
        except NotFoundError as error:
            raise JobEndedError(error.message) from error
        if found.is_finished:
            raise JobEndedError(f"session {id} has finished: begin another one")
        return found

    def model(self, id: str) -> ModelRecord:
        """A model of the client, of a session that has not finished. Raises as `session`."""
        found = self.sessions.find(ModelRecord, id, self.caller)
        self.session(found.session)
        return found

    def answered(self, id: str, session: str, result: dict[str, Any]) -> dict[str, Any]:
        """A future that has its answer already."""
        record = FutureRecord(id=id, session=session, kind="answered", result=result)
        self.sessions.records.put(record)
        return {"request_id": id}


async def client_of(request: Request) -> Client:
    """The client of a request."""
    services, sessions = request.app.state.services, request.app.state.sessions
    return Client(request=request, caller=await services.caller(request), sessions=sessions)


TinkerClient = Annotated[Client, Depends(client_of)]
"""Type of a route handler's parameter that receives the client."""
Limit = Annotated[int, Query(ge=0, le=1000)]
"""Type of a parameter: the length of a page of a list."""
Offset = Annotated[int, Query(ge=0, le=RECORDS_MAX)]
"""Type of a parameter: where a page begins."""
