"""Anonymous and slow clients do not lock others out of a real router."""

import resource
import select
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPResponse

import pytest

from plexrl.router.server.guarded_protocol import READ_FACTOR
from plexrl.wire.links.credentials import Role
from tests.certificates import TestAuthority
from tests.router.live_router import OPERATOR_KEY, LiveRouter, live_router

PATIENCE_S = 30.0
KEY = f"Authorization: Bearer {OPERATOR_KEY}\r\n".encode()
FLOOD = 1200


@pytest.fixture(scope="module", params=["http", "https"])
def quick(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveRouter]:
    """A router with short deadlines."""
    https = None
    if request.param == "https":
        https = TestAuthority(tmp_path_factory.mktemp("tls")).files(Role.ROUTER, "r")
    with live_router(
        https_files=https, header_timeout_s=1.0, body_timeout_s=1.0, json_bytes_max=1 << 20
    ) as router:
        yield router


def connect(
    router: LiveRouter, source: str = "127.0.0.1", *, shakes_hands: bool = True
) -> socket.socket:
    address = ("127.0.0.1", router.port)
    raw = socket.create_connection(address, PATIENCE_S, source_address=(source, 0))
    if router.ca is None or not shakes_hands:
        return raw
    context = ssl.create_default_context(cafile=router.ca)
    context.check_hostname = False
    return context.wrap_socket(raw)


def status_of_answer(sock: socket.socket) -> int:
    """The status of a response, which is read to its end."""
    response = HTTPResponse(sock)
    response.begin()
    response.read()
    return response.status


def read_to_end(sock: socket.socket) -> bytes:
    """All bytes that the router sends until it closes the connection."""
    received = b""
    try:
        while chunk := sock.recv(65536):
            received += chunk
    except ConnectionResetError:
        # The router closed the connection while bytes of ours were in flight.
        pass
    return received


def drip(sock: socket.socket, byte: bytes) -> bytes:
    """Send single bytes until the router closes the connection; return its response."""
    sock.settimeout(0.05)
    received = b""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            sock.sendall(byte)
            chunk = sock.recv(65536)
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            return received
        if not chunk:
            return received
        received += chunk
    pytest.fail(f"the connection is still open after {PATIENCE_S:g} s")


def test_idle_connections_beyond_the_descriptors_lock_nobody_out() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with live_router(descriptors=1024) as router, ExitStack() as flood:
            for _ in range(FLOOD):
                flood.enter_context(connect(router))
            with router.client() as client:
                assert client.get("/v1/status").status_code == 200
                for _ in range(FLOOD):
                    flood.enter_context(connect(router))
                assert client.get("/v1/status").status_code == 200
            with router.client() as another:
                assert another.get("/v1/status").status_code == 200
            assert len(router.log.read_text()) < 10_000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_router_without_descriptors_closes_connections_and_logs_once() -> None:
    """Files and other connections take more descriptors than were reserved."""
    with live_router(descriptors=300, connections_max=64) as router, ExitStack() as flood:
        soft, hard = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (40, hard))
        for _ in range(64):
            flood.enter_context(connect(router))
        with router.client() as client:
            assert client.get("/v1/status").status_code == 200
        assert router.log.read_text().count("no connection can be accepted") == 1
        assert len(router.log.read_text()) < 10_000
        resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("beginning", [b"", b"GET /v1/status HTT", b"GET / HTTP/1.1\r\nX-A: "])
def test_a_connection_without_a_request_is_closed(quick: LiveRouter, beginning: bytes) -> None:
    with connect(quick) as sock:
        sock.sendall(beginning)
        assert read_to_end(sock) == b""


def test_a_handshake_that_does_not_end_is_closed(quick: LiveRouter) -> None:
    with connect(quick, shakes_hands=False) as sock:
        sock.sendall(b"\x16\x03\x01")
        assert not read_to_end(sock).startswith(b"HTTP/1.1 2")


def test_a_request_that_arrives_byte_by_byte_is_closed(quick: LiveRouter) -> None:
    with connect(quick) as sock:
        sock.sendall(b"GET /v1/status HTTP/1.1\r\nX-Slow: ")
        assert drip(sock, b"x") == b""


def test_a_slow_second_request_is_closed_though_the_first_had_a_key(
    quick: LiveRouter,
) -> None:
    with connect(quick) as sock:
        sock.sendall(b"GET /v1/status HTTP/1.1\r\nHost: a\r\n" + KEY + b"\r\n")
        assert status_of_answer(sock) == 200
        sock.sendall(b"GET /v1/status HTTP/1.1\r\nX-Slow: ")
        assert drip(sock, b"x") == b""


def test_only_connections_with_a_key_stay_open_when_idle(quick: LiveRouter) -> None:
    with connect(quick) as known:
        known.sendall(b"GET /v1/status HTTP/1.1\r\nHost: a\r\n" + KEY + b"\r\n")
        assert status_of_answer(known) == 200
        with connect(quick) as stranger:
            stranger.sendall(b"GET /v1/health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert read_to_end(stranger).startswith(b"HTTP/1.1 200")
        known.sendall(b"GET /v1/status HTTP/1.1\r\nHost: a\r\n" + KEY + b"\r\n")
        assert status_of_answer(known) == 200


@pytest.mark.parametrize("path", [b"/v1/status", b"/dashboard"])
def test_a_client_that_stops_to_read_is_dropped(quick: LiveRouter, path: bytes) -> None:
    """It would keep the slot of its stream for ever, with a key or without, and goes on to send."""
    with connect(quick) as sock:
        sock.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n" + KEY + b"\r\n")
        assert status_of_answer(sock) == 200
        # More than fits into all buffers of the answers and of the requests.
        sock.setblocking(False)
        sent, page = 0, b"GET /dashboard/style.css HTTP/1.1\r\nHost: a\r\n\r\n"
        ended = select.poll()
        ended.register(sock, select.POLLOUT)
        with suppress(OSError, ssl.SSLWantWriteError):
            while ended.poll(2000):
                sent += sock.send(page * 100)
        assert sent
        ended.modify(sock, 0)
        # An error or a hang-up is always polled for.
        assert ended.poll(1000 * (PATIENCE_S + READ_FACTOR))


@pytest.mark.parametrize("key", [b"", b"Authorization: Bearer wrong\r\n"])
@pytest.mark.parametrize("path", [b"/v1/jobs", b"/v1/jobs/j/deployments/d/operations/forward"])
def test_the_key_is_checked_before_a_byte_of_the_body_is_read(
    quick: LiveRouter, key: bytes, path: bytes
) -> None:
    with connect(quick) as sock:
        sock.sendall(
            b"POST " + path + b"?operation=o HTTP/1.1\r\nHost: a\r\n" + key + b"Content-Type: "
            b"application/json\r\nContent-Length: 268435456\r\n\r\n"
        )
        answer = read_to_end(sock)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b'"unauthenticated"' in answer


def test_a_body_that_arrives_byte_by_byte_is_refused(quick: LiveRouter) -> None:
    with connect(quick) as sock:
        sock.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\n" + KEY + b"Content-Type: application/json\r\n"
            b"Content-Length: 100000\r\n\r\n"
        )
        assert drip(sock, b" ").startswith(b"HTTP/1.1 503")


def test_the_rest_of_an_unread_body_has_a_deadline(quick: LiveRouter) -> None:
    with connect(quick) as sock:
        sock.sendall(
            b"GET /v1/status HTTP/1.1\r\nHost: a\r\n" + KEY + b"Content-Length: 100000\r\n\r\n"
        )
        assert drip(sock, b" ").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("size", [b"Content-Length: 268435456", b"Transfer-Encoding: chunked"])
def test_a_large_json_body_is_refused_before_it_is_whole(quick: LiveRouter, size: bytes) -> None:
    with connect(quick) as sock:
        sock.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\n"
            + KEY
            + b"Content-Type: application/json\r\n"
            + size
            + b"\r\n\r\n"
        )
        if b"chunked" in size:
            sock.sendall(b"110000\r\n" + 0x110000 * b" ")
        answer = read_to_end(sock)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"payload_too_large"' in answer


def test_malformed_requests_get_responses_and_one_log_message(quick: LiveRouter) -> None:
    for _ in range(50):
        with connect(quick) as sock:
            sock.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            assert read_to_end(sock).startswith(b"HTTP/1.1 400")
    assert quick.log.read_text().count("Invalid HTTP request") == 1


def test_one_address_cannot_take_all_connections() -> None:
    with live_router(connections_max=6, address_connections_max=3) as router, ExitStack() as stack:
        polls = [stack.enter_context(connect(router)) for _ in range(3)]
        for sock in polls:
            # A request in progress: its connection is not closed for another.
            sock.sendall(
                b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
                + KEY
                + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
            )
            assert sock.recv(65536).startswith(b"HTTP/1.1 100")
        with connect(router) as refused:
            assert read_to_end(refused) == b""
        with connect(router, source="127.0.0.2") as other:
            other.sendall(b"GET /v1/status HTTP/1.1\r\nHost: a\r\n" + KEY + b"\r\n")
            assert other.recv(65536).startswith(b"HTTP/1.1 200")
