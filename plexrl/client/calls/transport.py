"""HTTP with patience: requests are repeated until there is an answer or no hope.

Every request is safe to repeat: it names its job, deployment or operation by an id that the client
chose, and the router answers a repetition as it answered the first.

Three kinds of failure are repeated:

* No cluster answers, or a proxy answers for it: repeated for `timeout_s` seconds.
* The cluster is overloaded (429): repeated for `timeout_s` seconds.
* The cluster *holds*: it answers 503, 504 or 507 with `Retry-After`, because a disk is full, its
  database is away or a part is silent. It is alive and loses nothing, so a request that carries
  work is repeated until it succeeds or its own deadline has passed.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from plexrl.client.display.cluster_location import Place
from plexrl.client.display.handle_repr import without_credentials
from plexrl.errors import (
    ConnectionLostError,
    InvalidRequestError,
    NonFiniteInputError,
    PlexRLError,
    from_wire,
)

if TYPE_CHECKING:
    import httpx

    from plexrl.client.calls.controller import Controller

BACKOFF_S = 0.05
BACKOFF_S_MAX = 2.0
ASKED_SPREAD = 1.5
"""A wait that the cluster asks for is made longer by up to this factor."""
LEFT_S_MIN = 0.001
CONTROLLER_HEADER = "plexrl-controller"
CONNECT_TIMEOUT_S = 10.0
HOLDING = frozenset({503, 504, 507})
"""With `Retry-After`: the cluster is alive, and the request succeeds later."""
UNTYPED_RETRIED = frozenset({429, 500, 502, 503, 504})
"""Without a typed error such an answer is no word of the cluster: a proxy's, or that of a server
that is shutting down."""
ELSEWHERE = frozenset({500, 502, 503})
"""Answers after which another router is asked, if they are to be repeated."""
TELL_AGAIN_S = 60.0
"""Between two log messages about the same reason to wait."""

LOG = logging.getLogger(__name__)


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
    is_poll: bool = False
    """It asks for the outcome of work that was submitted before."""
    give_up_at: float | None = None
    """By the monotonic clock: when the caller stops waiting for a cluster that holds."""
    on_held: Callable[[PlexRLError], None] | None = None
    """Told why the cluster asks to wait, before each wait."""

    @property
    def carries_work(self) -> bool:
        """Whether to wait for as long as the cluster holds; mere views wait `timeout_s` seconds."""
        return self.is_poll or self.method != "GET"

    def within(self, deadline_s: float | None) -> "Call":
        """The same request with a deadline, if one is given, that many seconds from now."""
        if deadline_s is None:
            return self
        return replace(self, deadline_at=time.monotonic() + deadline_s)

    def tried_for(self, seconds: float) -> "Call":
        """The same request, for a caller who waits no longer than that for an answer."""
        return replace(self, read_timeout_s=seconds, give_up_at=time.monotonic() + seconds)


class Endpoints:
    """The routers of one cluster: one of them is asked until it fails, then the next."""

    def __init__(self, urls: str | Sequence[str]) -> None:
        listed = urls.split(",") if isinstance(urls, str) else urls
        self.urls = tuple(url.strip().rstrip("/") for url in listed if url.strip())
        if not self.urls:
            raise InvalidRequestError("there is no URL of a router: give one at least")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise InvalidRequestError(
                    f"{url!r} is no URL of a router: it begins with http:// or https://, as "
                    "http://localhost:8000 does"
                )
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
        self._timeout_s = timeout_s
        self._silent_until = time.monotonic() + timeout_s
        self._deadline_at = deadline_at
        self._backoff_s = BACKOFF_S

    def pause_s(self, error: PlexRLError, *, unbounded: bool = False) -> float:
        """Seconds to wait before the next try. `unbounded`: only the deadline ends the waiting, and
        the time of silence begins anew.

        Raises:
            PlexRLError: `error`, where there is no time left.
        """
        asked = error.details.get("retry_after_s")
        pause_s = self._backoff_s * random.uniform(0.5, 1.0)
        if isinstance(asked, int | float):
            # Not all who were told the same are to come back at the same time.
            pause_s = max(pause_s, float(asked) * random.uniform(1.0, ASKED_SPREAD))
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_S_MAX)
        now = time.monotonic()
        if unbounded:
            self._silent_until = now + pause_s + self._timeout_s
        limit = self._silent_until
        if self._deadline_at is not None:
            limit = min(limit, self._deadline_at)
        if now + pause_s > limit:
            raise error
        return pause_s


class Waiting:
    """The waiting of one transport's requests; says why in the log."""

    def __init__(self) -> None:
        self._tell_at: dict[str, float] = {}

    def pause_s(self, call: Call, patience: Patience, error: PlexRLError) -> float:
        """Seconds to wait before `call` is tried again. Raises as `Patience.pause_s`."""
        if not (call.carries_work and is_held(error)):
            return patience.pause_s(error)
        if call.on_held is not None:
            call.on_held(error)
        now = time.monotonic()
        if now >= self._tell_at.get(error.code, 0.0):
            self._tell_at[error.code] = now + TELL_AGAIN_S
            LOG.warning("the cluster asks to wait, nothing is lost: %s", error)
        pause_s = patience.pause_s(error, unbounded=True)
        if call.give_up_at is not None and now + pause_s > call.give_up_at:
            raise error
        return pause_s


def is_held(error: PlexRLError) -> bool:
    """Whether `error` was an answer that asks for the same request again: the cluster is alive."""
    return error.status in HOLDING and "retry_after_s" in error.details


class Transport:
    """Blocking requests to one cluster. Safe for use by several threads."""

    def __init__(self, url: str | Sequence[str], api_key: str, timeout_s: float) -> None:
        import httpx

        self._endpoints = Endpoints(url)
        self.url = str(self._endpoints)
        """Of all routers, with commas between."""
        self.place = Place(without_credentials(self.url))
        """Where another process finds the cluster."""
        self.api_key = api_key
        self.timeout_s = timeout_s
        self._waiting = Waiting()
        self.controller: Controller | None = None
        """Whose requests they are; absent: of nobody who controls a job."""
        self._client = httpx.Client(
            headers=_headers(api_key),
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=64),
        )

    def of(self, controller: "Controller") -> "Transport":
        """The same connections for the requests of a controller."""
        its = copy(self)
        its.controller = controller
        return its

    def impatient(self) -> "Transport":
        """The same connections, for requests that are tried once."""
        its = copy(self)
        its.timeout_s = 0.0
        return its

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
            time.sleep(self._waiting.pause_s(call, patience, error))

    def _try(self, call: Call) -> "httpx.Response | PlexRLError":
        import httpx

        if self.is_closed:
            raise ConnectionLostError(f"the connection to {self.url} was closed: connect again")
        url = self._endpoints.current
        try:
            response = self._client.send(_build(self._client, url, call, self.controller))
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
                call.method,
                url + call.path,
                params=call.query,
                headers=_controller_header(self.controller),
                timeout=_timeout(call),
            ) as response:
                if response.status_code >= 400:
                    response.read()
                    if response.status_code in ELSEWHERE:
                        self._endpoints.failed(url)
                    raise _broken(response)
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
        self._waiting = Waiting()
        self.controller: Controller | None = None
        """As that of `Transport`."""
        self._client = httpx.AsyncClient(
            headers=_headers(api_key),
            limits=httpx.Limits(max_connections=2048, max_keepalive_connections=256),
        )

    def of(self, controller: "Controller | None") -> "AsyncTransport":
        """As `Transport.of`."""
        its = copy(self)
        its.controller = controller
        return its

    async def request(self, call: Call) -> "httpx.Response":
        """The answer to `call`, if it is a good one. Raises as `Transport.request`."""
        import httpx

        patience = Patience(self.timeout_s, call.deadline_at)
        while True:
            url = self._endpoints.current
            response: httpx.Response | PlexRLError
            try:
                found = await self._client.send(_build(self._client, url, call, self.controller))
            except httpx.TransportError as error:
                self._endpoints.failed(url)
                response = _lost(url, error)
            else:
                if found.status_code in ELSEWHERE:
                    self._endpoints.failed(url)
                response = checked(found)
            if not isinstance(response, PlexRLError):
                return response
            await asyncio.sleep(self._waiting.pause_s(call, patience, response))

    async def lines(self, call: Call) -> AsyncIterator[str]:
        """As `Transport.lines`."""
        import httpx

        url = self._endpoints.current
        try:
            async with self._client.stream(
                call.method,
                url + call.path,
                params=call.query,
                headers=_controller_header(self.controller),
                timeout=_timeout(call),
            ) as response:
                if response.status_code >= 400:
                    await response.aread()
                    if response.status_code in ELSEWHERE:
                        self._endpoints.failed(url)
                    raise _broken(response)
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
    typed = _typed_error(response)
    if typed is None:
        if response.status_code not in UNTYPED_RETRIED:
            raise error_of(response)
        return ConnectionLostError(error_of(response).message)
    after = response.headers.get("retry-after", "")
    if not after.isdigit():
        # The cluster's last word, or an operation's own error.
        raise typed
    typed.details.setdefault("retry_after_s", float(after))
    return typed


def _broken(response: "httpx.Response") -> PlexRLError:
    """The error of a bad answer to a stream's request."""
    found = checked(response)
    assert isinstance(found, PlexRLError), "the answer is a good one"
    return found


def error_of(response: "httpx.Response") -> PlexRLError:
    """The error of a bad response."""
    typed = _typed_error(response)
    if typed is not None:
        return typed
    text = response.text[:200]
    return PlexRLError(f"HTTP {response.status_code} from {response.url}: {text}")


def _typed_error(response: "httpx.Response") -> PlexRLError | None:
    """The cluster's own word; None where the answer is not the cluster's."""
    try:
        body = json.loads(response.content)["error"]
    except (ValueError, KeyError, TypeError):
        return None
    return from_wire(body) if isinstance(body, dict) else None


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"}


def _controller_header(controller: "Controller | None") -> dict[str, str]:
    return {} if controller is None else {CONTROLLER_HEADER: controller.token}


def _timeout(call: Call) -> "httpx.Timeout":
    import httpx

    return httpx.Timeout(call.read_timeout_s, connect=CONNECT_TIMEOUT_S)


def _build(
    client: "httpx.Client | httpx.AsyncClient",
    url: str,
    call: Call,
    controller: "Controller | None",
) -> "httpx.Request":
    query = call.query
    if call.deadline_at is not None:
        # What is left of it: the tries so far, and their pauses, are in it.
        query = {**query, "deadline_s": max(call.deadline_at - time.monotonic(), LEFT_S_MIN)}
    headers = _controller_header(controller)
    if call.content_type is not None:
        headers["content-type"] = call.content_type
    try:
        return client.build_request(
            call.method,
            url + call.path,
            params=query,
            json=call.json,
            content=call.content,
            headers=headers,
            timeout=_timeout(call),
        )
    except ValueError as error:
        message = f"the request has a number that is not finite: leave it out ({error})"
        raise NonFiniteInputError(message) from error


def _lost(url: str, error: Exception) -> ConnectionLostError:
    return ConnectionLostError(
        f"no answer from {url} ({type(error).__name__}: {error}): is the cluster up, and the URL "
        "right?"
    )
