"""Calls of PlexRL's own HTTP API inside the router's process.

A Tinker client is a client of PlexRL: what it asks for passes the same checks, quotas and audit log
as a request of PlexRL's own SDK, with the client's own key.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from plexrl.errors import InvalidRequestError, PlexRLError, UnavailableError, from_wire
from plexrl.wire.tensors import MEDIA_TYPE, Arrays, decode_body, encode_body

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

RESULT_KEY = "result"


@dataclass(frozen=True, slots=True, kw_only=True)
class Polled:
    """The answer to a poll of an operation."""

    view: Mapping[str, Any] | None = None
    """The operation's view, if it is unfinished."""
    result: Mapping[str, Any] | None = None
    arrays: Arrays | None = None
    error: PlexRLError | None = None
    """The operation's own error."""


class ClusterApi:
    """PlexRL's API, called with a client's key."""

    def __init__(self, app: "ASGIApp") -> None:
        async def with_state(scope: "Scope", receive: "Receive", send: "Send") -> None:
            await app({**scope, "state": {}}, receive, send)

        transport = httpx.ASGITransport(with_state, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://plexrl")

    async def close(self) -> None:
        """End the client."""
        await self._client.aclose()

    async def call(
        self, key: str, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Any:
        """Send a request and return its JSON. `key` is an `Authorization` header.

        Raises:
            PlexRLError: the error of the response; `UnavailableError` and others of
                `error_responses.RETRIABLE` mean that the same request may succeed later.
        """
        response = await self._client.request(
            method, path, json=body, headers={"authorization": key}
        )
        _check(response)
        return response.json() if response.content else None

    async def submit(
        self,
        key: str,
        deployment: str,
        kind: str,
        operation: str,
        params: Mapping[str, Any],
        arrays: Arrays | None = None,
    ) -> None:
        """Submit an operation; the same id again is the same operation. Raises as `call`."""
        job, _, name = deployment.partition("/")
        response = await self._client.post(
            f"/v1/jobs/{quote(job)}/deployments/{quote(name)}/operations/{kind}",
            params={"operation": operation},
            content=encode_body(params, arrays),
            headers={"authorization": key, "content-type": MEDIA_TYPE},
        )
        _check(response)

    async def poll(self, key: str, operation: str, wait_s: float) -> Polled:
        """Wait up to `wait_s` seconds for an operation.

        Raises:
            UnavailableError: the cluster does not answer now.
            PlexRLError: the request was refused, as `UnknownOperationError`.
        """
        response = await self._client.get(
            f"/v1/operations/{quote(operation, safe='')}",
            params={"wait_s": wait_s},
            headers={"authorization": key},
        )
        if response.status_code == 202:
            return Polled(view=response.json())
        if response.status_code == 200:
            params, arrays = decode_body(response.content)
            return Polled(result=params[RESULT_KEY], arrays=arrays)
        error = _error(response)
        if response.headers.get("retry-after") or error.code == "unknown_operation":
            raise error
        return Polled(error=error)


def _check(response: httpx.Response) -> None:
    if response.status_code >= 400:
        raise _error(response)


def _error(response: httpx.Response) -> PlexRLError:
    try:
        return from_wire(response.json()["error"])
    except (ValueError, KeyError, json.JSONDecodeError):
        if response.status_code < 500:
            return InvalidRequestError(f"the request was refused: {response.text[:200]}")
        return UnavailableError(f"the router failed: {response.status_code}")
