"""HTTP with patience: requests are repeated until there is an answer or no hope.

Every request is safe to repeat: it names its job, deployment or operation by an id that the client
chose, and the router answers a repetition as it answered the first.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from plexrl.errors import ConnectionLostError, InvalidRequestError, PlexRLError, from_wire

if TYPE_CHECKING:
    import httpx

BACKOFF_S = 0.05
BACKOFF_S_MAX = 2.0
ASKED_SPREAD = 1.5
"""A wait that the cluster asks for is made longer by up to this factor."""
LEFT_S_MIN = 0.001
CONNECT_TIMEOUT_S = 10.0
RETRIED = frozenset({429, 502, 503, 504})
ELSEWHERE = frozenset({502, 503})
"""Answers after which another router is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request."""

    method: str
    path: str
    query: dict[str, Any] = field(default_factory=dict)
    json: Any = None
    content: bytes | None = None
    content_type: str | None = None
    read_timeout_s: float = 60.0
    deadline_at: float | None = None
    """By the monotonic clock: when an operation is to have begun, and no try is made any more."""

    def within(self, deadline_s: float | None) -> "Call":
        """The same request with a deadline, if one is given, that many seconds from now."""
        if deadline_s is None:
            return self
        return replace(self, deadline_at=time.monotonic() + deadline_s)


class Endpoints:
    """The routers of one cluster: one of them is asked until it fails, then the next."""

    def __init__(self, urls: str | Sequence[str]) -> None:
        listed = urls.split(",") if isinstance(urls, str) else urls
        self.urls = tuple(url.strip().rstrip("/") for url in listed if url.strip())
        if not self.urls:
            raise InvalidRequestError("there is no URL of a router: give one at least")
        self._at = 0

    def __str__(self) -> str:
        return ",".join(self.urls)

    @property
    def current(self) -> str:
        """Whom to ask."""
        return self.urls[self._at]

    def failed(self, url: str) -> None:
        """It did not answer: ask the next one, unless another caller has come to that already."""
        if url == self.current:
            self._at = (self._at + 1) % len(self.urls)


class Patience:
    """When to try again, and when to give up."""

    def __init__(self, timeout_s: float, deadline_at: float | None = None) -> None:
        self._deadline = time.monotonic() + timeout_s
        if deadline_at is not None:
            self._deadline = min(self._deadline, deadline_at)
        self._backoff_s = BACKOFF_S

    def pause_s(self, error: PlexRLError) -> float:
        """Seconds to wait before the next try.

        Raises:
            PlexRLError: `error`, where there is no time left.
        """
        asked = error.details.get("retry_after_s")
        pause_s = self._backoff_s * random.uniform(0.5, 1.0)
        if isinstance(asked, int | float):
            # Not all who were told the same are to come back at the same time.
            pause_s = max(pause_s, float(asked) * random.uniform(1.0, ASKED_SPREAD))
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_S_MAX)
        if time.monotonic() + pause_s > self._deadline:
            raise error
        return pause_s


class Transport:
    """Blocking requests to one cluster. Safe for use by several threads."""

    def __init__(self, url: str | Sequence[str], api_key: str, timeout_s: float) -> None:
        import httpx

        self._endpoints = Endpoints(url)
        self.url = str(self._endpoints)
        """Of all routers, with commas between."""
        self.api_key = api_key
        self.timeout_s = timeout_s
        self._client = httpx.Client(
            headers=_headers(api_key),
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=64),
        )

    def request(self, call: Call) -> "httpx.Response":
        """The answer to `call`, if it is a good one.

        Raises:
            PlexRLError: the cluster refused it.
            ConnectionLostError: no cluster answered for `timeout_s` seconds.
        """
        patience = Patience(self.timeout_s, call.deadline_at)
        while True:
            error = self._try(call)
            if not isinstance(error, PlexRLError):
                return error
            time.sleep(patience.pause_s(error))

    def _try(self, call: Call) -> "httpx.Response | PlexRLError":
        import httpx

        if self.is_closed:
            raise ConnectionLostError(f"the connection to {self.url} was closed: connect again")
        url = self._endpoints.current
        try:
            response = self._client.send(_build(self._client, url, call))
        except httpx.TransportError as error:
            self._endpoints.failed(url)
            return _lost(url, error)
        if response.status_code in ELSEWHERE:
            self._endpoints.failed(url)
        return checked(response)

    def lines(self, call: Call) -> Iterator[str]:
        """The lines of a streamed answer, as they come. Raises as `request`, but tries once."""
        import httpx

        if self.is_closed:
            raise ConnectionLostError(f"the connection to {self.url} was closed: connect again")
        url = self._endpoints.current
        try:
            with self._client.stream(
                call.method, url + call.path, params=call.query, timeout=_timeout(call)
            ) as response:
                if response.status_code >= 400:
                    response.read()
                    if response.status_code in ELSEWHERE:
                        self._endpoints.failed(url)
                    raise error_of(response)
                yield from response.iter_lines()
        except httpx.TransportError as error:
            self._endpoints.failed(url)
            raise _lost(url, error) from error

    @property
    def is_closed(self) -> bool:
        """No request can be sent any more."""
        return self._client.is_closed

    def close(self) -> None:
        """Close all connections."""
        self._client.close()


class AsyncTransport:
    """As `Transport`, for one event loop."""

    def __init__(self, url: str | Sequence[str], api_key: str, timeout_s: float) -> None:
        import httpx

        self._endpoints = Endpoints(url)
        self.url = str(self._endpoints)
        self.timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            headers=_headers(api_key),
            limits=httpx.Limits(max_connections=2048, max_keepalive_connections=256),
        )

    async def request(self, call: Call) -> "httpx.Response":
        """The answer to `call`, if it is a good one. Raises as `Transport.request`."""
        import httpx

        patience = Patience(self.timeout_s, call.deadline_at)
        while True:
            url = self._endpoints.current
            response: httpx.Response | PlexRLError
            try:
                found = await self._client.send(_build(self._client, url, call))
            except httpx.TransportError as error:
                self._endpoints.failed(url)
                response = _lost(url, error)
            else:
                if found.status_code in ELSEWHERE:
                    self._endpoints.failed(url)
                response = checked(found)
            if not isinstance(response, PlexRLError):
                return response
            await asyncio.sleep(patience.pause_s(response))

    async def lines(self, call: Call) -> AsyncIterator[str]:
        """As `Transport.lines`."""
        import httpx

        url = self._endpoints.current
        try:
            async with self._client.stream(
                call.method, url + call.path, params=call.query, timeout=_timeout(call)
            ) as response:
                if response.status_code >= 400:
                    await response.aread()
                    if response.status_code in ELSEWHERE:
                        self._endpoints.failed(url)
                    raise error_of(response)
                async for line in response.aiter_lines():
                    yield line
        except httpx.TransportError as error:
            self._endpoints.failed(url)
            raise _lost(url, error) from error

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


def checked(response: "httpx.Response") -> "httpx.Response | PlexRLError":
    """A good response as it is; an error worth another try is returned, any other raised."""
    if response.status_code < 400:
        return response
    error = error_of(response)
    if response.status_code not in RETRIED or error.code == "deadline_exceeded":
        raise error
    after = response.headers.get("retry-after", "")
    if after.isdigit():
        error.details.setdefault("retry_after_s", float(after))
    return error


def error_of(response: "httpx.Response") -> PlexRLError:
    """The typed error of a bad response."""
    try:
        body = json.loads(response.content)["error"]
    except (ValueError, KeyError, TypeError):
        text = response.text[:200]
        return PlexRLError(f"HTTP {response.status_code} from {response.url}: {text}")
    return from_wire(body)


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"}


def _timeout(call: Call) -> "httpx.Timeout":
    import httpx

    return httpx.Timeout(call.read_timeout_s, connect=CONNECT_TIMEOUT_S)


def _build(client: "httpx.Client | httpx.AsyncClient", url: str, call: Call) -> "httpx.Request":
    query = call.query
    if call.deadline_at is not None:
        # What is left of it: the tries so far, and their pauses, are in it.
        query = {**query, "deadline_s": max(call.deadline_at - time.monotonic(), LEFT_S_MIN)}
    headers = {} if call.content_type is None else {"content-type": call.content_type}
    return client.build_request(
        call.method,
        url + call.path,
        params=query,
        json=call.json,
        content=call.content,
        headers=headers,
        timeout=_timeout(call),
    )


def _lost(url: str, error: Exception) -> ConnectionLostError:
    return ConnectionLostError(
        f"no answer from {url} ({type(error).__name__}: {error}): is the cluster up, and the URL "
        "right?"
    )
