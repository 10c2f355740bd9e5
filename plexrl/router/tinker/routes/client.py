"""What a route handler knows of the client that asks."""

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from plexrl.errors import JobEndedError, NotFoundError
from plexrl.router.server.request_limits import BODY_KEY, LimitedBody
from plexrl.router.services.authentication import Caller
from plexrl.router.tinker.messages.codec import JsonRequest
from plexrl.router.tinker.records import FutureRecord, ModelRecord, SessionRecord
from plexrl.router.tinker.sessions import Sessions

JsonT = TypeVar("JsonT", bound=JsonRequest)


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
        """The request's body, within the router's bound on payloads. Raises `BodyRefusedError`."""
        body = self.request.scope["state"][BODY_KEY]
        assert isinstance(body, LimitedBody)
        async with asyncio.timeout(body.timeout_s):
            return await self.request.body()

    async def read(self, kind: type[JsonT]) -> JsonT:
        """The request's JSON. Raises `InvalidRequestError`."""
        return kind.read(await self.body())

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
