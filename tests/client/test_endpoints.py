"""Choice of the router, retries and deadlines of requests."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from plexrl.client.calls.routes import Endpoints
from plexrl.client.calls.transport import AsyncTransport, Call, RetryTimer, Transport
from plexrl.errors import (
    ConnectionLostError,
    InvalidRequestError,
    NonFiniteInputError,
    OverloadedError,
    UnavailableError,
)


def test_after_a_failure_the_next_router_is_used() -> None:
    endpoints = Endpoints(" http://a/ , http://b,http://c")
    assert str(endpoints) == "http://a,http://b,http://c"
    endpoints.failed("http://a")
    # Another thread met the same failure a moment later.
    endpoints.failed("http://a")
    assert endpoints.current == "http://b"
    endpoints.failed("http://b")
    endpoints.failed("http://c")
    assert endpoints.current == "http://a"


def test_urls_may_be_a_list_but_not_empty() -> None:
    assert Endpoints(["http://a", "http://b/"]).urls == ("http://a", "http://b")
    for nothing in ("", " , "):
        with pytest.raises(InvalidRequestError, match="no URL"):
            Endpoints(nothing)


@pytest.mark.parametrize("url", ["localhost:8000", "http:/a", "ftp://a", "http://a,b:8000"])
def test_a_url_without_http_is_refused_before_any_request(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="must begin with http:// or https://"):
        Endpoints(url)


@pytest.mark.parametrize(
    "url",
    [
        *("http://[::1", "http://h:port", "http://h:99999", "http://:80", "me:secret@head:8443"),
        *("http://me:sec/ret@head", "http://good,http://[bad"),
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_what_may_be_its_password(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not the URL of a router") as refused:
        Endpoints(url)
    assert "sec" not in refused.value.message


def test_a_number_that_is_not_finite_is_refused_before_it_is_sent() -> None:
    transport = Transport("http://127.0.0.1:1", "key", 1.0)
    with pytest.raises(NonFiniteInputError, match="not finite"):
        transport.request(Call(method="POST", path="/", json={"loss": float("nan")}))


def test_retries_wait_at_least_retry_after_with_jitter() -> None:
    error = OverloadedError("full", retry_after_s=4.0)
    pauses = {RetryTimer(1000.0).pause_s(error) for _ in range(20)}
    assert len(pauses) > 10
    assert all(4.0 <= pause <= 6.0 for pause in pauses)


def test_retries_end_with_the_timeout_or_the_deadline() -> None:
    error = OverloadedError("full", retry_after_s=5.0)
    with pytest.raises(OverloadedError):
        RetryTimer(4.0).pause_s(error)
    with pytest.raises(OverloadedError):
        RetryTimer(1000.0, time.monotonic() + 4.0).pause_s(error)


def test_only_the_deadline_ends_the_retries_while_the_cluster_is_unavailable() -> None:
    error = UnavailableError("the scheduler restarts", retry_after_s=10.0)
    timer = RetryTimer(5.0)
    for _ in range(3):
        assert 10.0 <= timer.pause_s(error, unbounded=True) <= 15.0
    with pytest.raises(UnavailableError):
        RetryTimer(5.0, time.monotonic() + 1.0).pause_s(error, unbounded=True)


def test_a_deadline_counts_from_the_call_not_from_each_try() -> None:
    transport = Transport("http://127.0.0.1:9", "key", 0.0)
    began_at = time.monotonic()
    call = Call(method="POST", path="/x", query={"a": 1}).within(50.0)
    assert call.deadline_at is not None
    assert began_at <= call.deadline_at - 50.0 <= time.monotonic()
    assert Call(method="POST", path="/x").within(None).deadline_at is None
    with pytest.raises(ConnectionLostError, match=r"127\.0\.0\.1:9"):
        transport.request(call)
    transport.close()


class Answers(BaseHTTPRequestHandler):
    """A router that replies 503, or one that streams."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Router)
        self.send_response(self.server.status)
        self.end_headers()
        error = {"code": "unavailable", "message": "no scheduler", "details": {}}
        body = {"error": error} if self.server.status >= 400 else {"done": True}
        self.wfile.write(json.dumps(body).encode() + b"\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
        del format, args


class Router(ThreadingHTTPServer):
    """Answers every request with one status."""

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.status = status
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def test_a_stream_is_retried_on_another_router() -> None:
    call = Call(method="GET", path="/x")

    async def lines_of(transport: AsyncTransport) -> list[str]:
        with pytest.raises(UnavailableError):
            [line async for line in transport.lines(call)]
        found = [line async for line in transport.lines(call)]
        await transport.close()
        return found

    with Router(503) as away, Router(200) as here:
        urls = f"{away.url},{here.url}"
        transport = Transport(urls, "key", 5.0)
        with pytest.raises(UnavailableError):
            list(transport.lines(call))
        assert list(transport.lines(call)) == ['{"done": true}']
        transport.close()
        assert asyncio.run(lines_of(AsyncTransport(urls, "key", 5.0))) == ['{"done": true}']
        for router in (away, here):
            router.shutdown()
