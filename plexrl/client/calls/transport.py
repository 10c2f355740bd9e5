"""HTTP requests with retries, blocking and `async`.

Every request is safe to repeat: it identifies its job, deployment or operation by an id that the
client chose, and the router answers a repetition like the first request.

Three kinds of failure are retried:

* No cluster replies, or a proxy replies for it: retried for `timeout_s` seconds.
* The cluster is overloaded (429): retried for `timeout_s` seconds.
* The cluster is *unavailable for now*: it replies 503, 504 or 507 with `Retry-After`, because a
  disk is full, its database cannot be reached or a part does not reply. It loses nothing, so a
  request that carries work is retried until it succeeds or its own deadline has passed.
"""

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from urllib.parse import quote

from plexrl.client.calls.routes import Endpoints, Routes, no_router, no_router_yet
from plexrl.client.calls.server_certificate import refused_certificate, trusted_by
from plexrl.client.display.cluster_location import ClusterLocation
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
RETRY_AFTER_SPREAD = 1.5
"""`Retry-After` is multiplied by a random factor up to this, so that clients do not retry at once.
"""
LEFT_S_MIN = 0.001
CONTROLLER_HEADER = "plexrl-controller"
CONNECT_TIMEOUT_S = 10.0
UNAVAILABLE = frozenset({503, 504, 507})
"""With `Retry-After`: the cluster works, and the request succeeds later."""
UNTYPED_RETRIED = frozenset({429, 500, 502, 503, 504})
"""Without a typed error such a response is not from the cluster but from a proxy, or from a server
that is shutting down."""
NEXT_ROUTER = frozenset({500, 502, 503})
"""Statuses after which the retry goes to another router."""
WARN_AFTER_S = 5.0
"""A shorter wait for an unavailable cluster is not logged."""
LOG_PERIOD_S = 60.0
"""Time between two log messages about the same reason to wait."""
LOG = logging.getLogger(__name__)


Query = Mapping[str, str | float | bool | None]
"""Parameters of a request's query."""
TRACEBACK_VARIABLE = "PLEXRL_TRACEBACK"
"""`full` keeps the SDK's inner frames in tracebacks."""


def without_steps(error: PlexRLError) -> PlexRLError:
    """The error without the frames of the steps that raised it: its message says what happened, and
    a controller's traceback ends near the controller's own call."""
    if os.environ.get(TRACEBACK_VARIABLE) == "full":
        return error
    return error.with_traceback(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request."""

    method: str
    path: str
    query: Query = field(default_factory=dict)
    json: Any = None
    content: bytes | None = None
    content_type: str | None = None
    read_timeout_s: float = 60.0
    deadline_at: float | None = None
    """Monotonic time by which the operation must have begun; no retry after it."""
    is_poll: bool = False
    """It requests the outcome of work that was submitted before."""
    give_up_at: float | None = None
    """Monotonic time at which the caller stops waiting for an unavailable cluster."""
    on_unavailable: Callable[[PlexRLError], None] | None = None
    """Called before each wait with the error of an unavailable cluster."""

    @property
    def carries_work(self) -> bool:
        """Whether to retry for as long as the cluster is unavailable; other requests are retried
        for `timeout_s` seconds."""
        return self.is_poll or self.method != "GET"

    def within(self, deadline_s: float | None) -> "Call":
        """The same request with a deadline `deadline_s` seconds from now, if given."""
        if deadline_s is None:
            return self
        return replace(self, deadline_at=time.monotonic() + deadline_s)

    def limited_to(self, seconds: float) -> "Call":
        """The same request for a caller that waits at most `seconds` for the response."""
        return replace(self, read_timeout_s=seconds, give_up_at=time.monotonic() + seconds)


def deployment_path(deployment: str) -> str:
    """The path of the deployment `<job>/<name>` in the HTTP API."""
    job, _, name = deployment.rpartition("/")
    return f"/v1/jobs/{quote(job)}/deployments/{quote(name)}"


class RetryTimer:
    """Computes the pauses between retries, and when to give up."""

    def __init__(self, timeout_s: float, deadline_at: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._began_at = time.monotonic()
        self._silent_until = self._began_at + timeout_s
        self._deadline_at = deadline_at
        self._backoff_s = BACKOFF_S

    @property
    def waited_s(self) -> float:
        """Seconds since the first try."""
        return time.monotonic() - self._began_at

    def pause_s(self, error: PlexRLError, *, unbounded: bool = False) -> float:
        """Seconds to wait before the next try. With `unbounded` only the deadline ends the retries,
        and the time of silence restarts.

        Raises:
            PlexRLError: `error`, if there is no time left.
        """
        asked = error.details.get("retry_after_s")
        pause_s = self._backoff_s * random.uniform(0.5, 1.0)
        if isinstance(asked, int | float):
            pause_s = max(pause_s, float(asked) * random.uniform(1.0, RETRY_AFTER_SPREAD))
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


class RetryPolicy:
    """Decides on the retries of one transport's requests, and logs why they wait."""

    def __init__(self) -> None:
        self._log_at: dict[str, float] = {}

    def pause_s(self, call: Call, timer: RetryTimer, error: PlexRLError) -> float:
        """Seconds to wait before `call` is tried again. Raises as `RetryTimer.pause_s`."""
        if not (call.carries_work and is_unavailable(error)):
            return timer.pause_s(error)
        if call.on_unavailable is not None:
            call.on_unavailable(error)
        now = time.monotonic()
        # A part that restarts is back before anybody can act on a message.
        is_long = timer.waited_s >= WARN_AFTER_S
        if is_long and now >= self._log_at.get(error.code, 0.0):
            self._log_at[error.code] = now + LOG_PERIOD_S
            LOG.warning("the cluster is unavailable for now, nothing is lost: %s", error)
        pause_s = timer.pause_s(error, unbounded=True)
        if call.give_up_at is not None and now + pause_s > call.give_up_at:
            raise error
        return pause_s


def is_unavailable(error: PlexRLError) -> bool:
    """Whether `error` means that the cluster works and the same request succeeds later."""
    return error.status in UNAVAILABLE and "retry_after_s" in error.details


CaFile = str | os.PathLike[str] | None
"""A PEM file of authorities to trust; None: the public ones."""
ClientT = TypeVar("ClientT", bound="httpx.Client | httpx.AsyncClient")
ResultT = TypeVar("ResultT")

Steps = Generator[Call | float, Any, ResultT]
"""A request of several steps, without I/O: yields each `Call`, gets its response or its
error, and yields a float to pause for so many seconds. `Transport.run` and `AsyncTransport.run`
carry the steps out."""


class _Connections(Generic[ClientT]):
    """The state of either transport."""

    def __init__(
        self,
        client: ClientT,
        endpoints: Endpoints,
        api_key: str,
        timeout_s: float,
        ca: CaFile,
        routes: Routes,
    ) -> None:
        self._client = client
        self._routes = routes
        self._pid = os.getpid()
        self.ca = ca
        self._client.headers["Authorization"] = f"Bearer {api_key}"
        self._endpoints = endpoints
        self.url = str(self._endpoints)
        """URLs of all routers, separated by commas."""
        self.timeout_s = timeout_s
        self._retries = RetryPolicy()
        self.controller: Controller | None = None
        """The controller that sends the requests; absent: the sender controls no job."""

    def for_controller(self, controller: "Controller | None") -> Self:
        """The same connections, for the requests of `controller`."""
        other = copy(self)
        other.controller = controller
        return other

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that connected: what it ends is not its own."""
        return self._pid != os.getpid()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._client.is_closed

    def _check_open(self) -> None:
        if self.is_closed:
            raise ConnectionLostError(f"the connection to {self.url} is closed: connect again")

    def _build(self, url: str, call: Call) -> "httpx.Request":
        import httpx

        query = call.query
        if call.deadline_at is not None:
            # The time left: earlier tries and their pauses count.
            query = {**query, "deadline_s": max(call.deadline_at - time.monotonic(), LEFT_S_MIN)}
        headers = {} if self.controller is None else {CONTROLLER_HEADER: self.controller.token}
        if call.content_type is not None:
            headers["content-type"] = call.content_type
        try:
            return self._client.build_request(
                call.method,
                url + call.path,
                params=query,
                json=call.json,
                content=call.content,
                headers=headers,
                timeout=httpx.Timeout(call.read_timeout_s, connect=CONNECT_TIMEOUT_S),
            )
        except ValueError as error:
            message = f"the request has a number that is not finite: leave it out ({error})"
            raise NonFiniteInputError(message) from error

    def _received(self, url: str, response: "httpx.Response") -> "httpx.Response | PlexRLError":
        if response.status_code in NEXT_ROUTER:
            self._endpoints.failed(url)
        return checked(response, self._routes.describe(url))

    def _refused(self, url: str, response: "httpx.Response") -> PlexRLError:
        """The error of a refused request for a stream."""
        found = self._received(url, response)
        assert isinstance(found, PlexRLError), "called with a good response"
        return found

    def _lost(self, url: str, error: Exception) -> ConnectionLostError:
        """Raises `AuthenticationError` if the server's certificate was refused."""
        refused = refused_certificate(url, self.ca, error)
        if refused is not None:
            raise refused from error
        self._endpoints.failed(url)
        return ConnectionLostError(
            f"no response from {without_credentials(url)} ({type(error).__name__}: {error}): check "
            "that the cluster is up and the URL is right, with its http:// or https://"
            + self._routes.describe(url)
        )


class Transport(_Connections["httpx.Client"]):
    """Blocking requests to one cluster. Thread-safe."""

    def __init__(
        self, url: str | Sequence[str], api_key: str, timeout_s: float, ca: CaFile = None
    ) -> None:
        import httpx

        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64)
        endpoints = Endpoints(url)
        routes = Routes(endpoints.urls)
        make = partial(httpx.HTTPTransport, verify=trusted_by(ca, endpoints.urls), limits=limits)
        client = httpx.Client(transport=make(), mounts=routes.mounts(make))
        super().__init__(client, endpoints, api_key, timeout_s, ca, routes)
        self.location = ClusterLocation(without_credentials(self.url))
        """How another process finds the cluster."""
        self.api_key = api_key

    def without_retries(self) -> "Transport":
        """The same connections, for requests that are tried once."""
        other = copy(self)
        other.timeout_s = 0.0
        return other

    def request(self, call: Call) -> "httpx.Response":
        """Send `call`, with retries, and return the successful response.

        Raises:
            PlexRLError: the cluster refused the request.
            ConnectionLostError: no cluster replied for `timeout_s` seconds.
        """
        import httpx

        timer = RetryTimer(self.timeout_s, call.deadline_at)
        while True:
            self._check_open()
            url = self._endpoints.current
            found: httpx.Response | PlexRLError
            try:
                found = self._received(url, self._client.send(self._build(url, call)))
            except httpx.TransportError as error:
                found = self._lost(url, error)
            if not isinstance(found, PlexRLError):
                return found
            time.sleep(self._retries.pause_s(call, timer, found))

    def ask(self, method: str, path: str, *, query: Query | None = None, body: Any = None) -> Any:
        """Send a request and return the JSON object of the response, a view of the type that the
        request is for; an empty one without content. Raises as `request`."""
        call = Call(method=method, path=path, query=query or {}, json=body)
        response = self.request(call)
        return dict(response.json()) if response.content else {}

    def run(self, steps: Steps[ResultT]) -> ResultT:
        """Carry out the steps and return their result. Raises what they raise."""
        advance: Callable[[], Call | float] = partial(next, steps)
        with closing(steps):
            while True:
                try:
                    step = advance()
                except StopIteration as end:
                    result: ResultT = end.value
                    return result
                except PlexRLError as error:
                    raise without_steps(error) from error.__cause__
                try:
                    if isinstance(step, Call):
                        advance = partial(steps.send, self.request(step))
                    else:
                        time.sleep(step)
                        advance = partial(next, steps)
                except PlexRLError as error:
                    advance = partial(steps.throw, error)

    def lines(self, call: Call) -> Iterator[str]:
        """Yield the lines of a streamed response. Raises as `request`, without retries."""
        import httpx

        self._check_open()
        url = self._endpoints.current
        try:
            response = self._client.send(self._build(url, call), stream=True)
            with closing(response):
                if response.status_code >= 400:
                    response.read()
                    raise self._refused(url, response)
                yield from response.iter_lines()
        except httpx.TransportError as error:
            raise self._lost(url, error) from error

    def close(self) -> None:
        """Close all connections; no effect in a fork, whose parent uses them."""
        if not self.is_inherited:
            self._client.close()


class AsyncTransport(_Connections["httpx.AsyncClient"]):
    """Like `Transport`, for one event loop."""

    def __init__(
        self,
        url: str | Sequence[str],
        api_key: str,
        timeout_s: float,
        ca: CaFile = None,
        auth: "httpx.Auth | None" = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """`auth` replaces `api_key` in each request. `environment` may name a proxy."""
        import httpx

        limits = httpx.Limits(max_connections=2048, max_keepalive_connections=256)
        endpoints = Endpoints(url)
        routes = Routes(endpoints.urls, environment)
        verify = trusted_by(ca, endpoints.urls)
        make = partial(httpx.AsyncHTTPTransport, verify=verify, limits=limits)
        client = httpx.AsyncClient(transport=make(), mounts=routes.mounts(make), auth=auth)
        super().__init__(client, endpoints, api_key, timeout_s, ca, routes)

    async def request(self, call: Call) -> "httpx.Response":
        """As `Transport.request`."""
        import httpx

        timer = RetryTimer(self.timeout_s, call.deadline_at)
        while True:
            self._check_open()
            url = self._endpoints.current
            found: httpx.Response | PlexRLError
            try:
                found = self._received(url, await self._client.send(self._build(url, call)))
            except httpx.TransportError as error:
                found = self._lost(url, error)
            if not isinstance(found, PlexRLError):
                return found
            await asyncio.sleep(self._retries.pause_s(call, timer, found))

    async def run(self, steps: Steps[ResultT]) -> ResultT:
        """As `Transport.run`."""
        advance: Callable[[], Call | float] = partial(next, steps)
        with closing(steps):
            while True:
                try:
                    step = advance()
                except StopIteration as end:
                    result: ResultT = end.value
                    return result
                except PlexRLError as error:
                    raise without_steps(error) from error.__cause__
                try:
                    if isinstance(step, Call):
                        advance = partial(steps.send, await self.request(step))
                    else:
                        await asyncio.sleep(step)
                        advance = partial(next, steps)
                except PlexRLError as error:
                    advance = partial(steps.throw, error)

    async def lines(self, call: Call) -> AsyncIterator[str]:
        """As `Transport.lines`."""
        import httpx

        self._check_open()
        url = self._endpoints.current
        try:
            response = await self._client.send(self._build(url, call), stream=True)
            async with aclosing(response):
                if response.status_code >= 400:
                    await response.aread()
                    raise self._refused(url, response)
                async for line in response.aiter_lines():
                    yield line
        except httpx.TransportError as error:
            raise self._lost(url, error) from error

    async def close(self) -> None:
        """As `Transport.close`."""
        if not self.is_inherited:
            await self._client.aclose()


def checked(response: "httpx.Response", route: str = "") -> "httpx.Response | PlexRLError":
    """Return a good response, or an error worth a retry; raise any other error. `route` is what a
    message adds about a response that is not the cluster's."""
    if response.status_code < 400:
        return response
    typed = _typed_error(response)
    if typed is None:
        if response.status_code not in UNTYPED_RETRIED:
            raise InvalidRequestError(no_router(response) + route)
        return ConnectionLostError(no_router_yet(response) + route)
    after = response.headers.get("retry-after", "")
    if not after.isdigit():
        # A final refusal, or an operation's own error.
        raise typed
    typed.details.setdefault("retry_after_s", float(after))
    return typed


def _typed_error(response: "httpx.Response") -> PlexRLError | None:
    """The cluster's own error; None if the response is not the cluster's."""
    try:
        body = json.loads(response.content)["error"]
    except (ValueError, KeyError, TypeError):
        return None
    return from_wire(body) if isinstance(body, dict) else None
