"""Requests whose end is ambiguous are refused; a refused body does not reset the connection."""

import socket
from collections.abc import Iterator

import pytest

from tests.router.live_router import OPERATOR_KEY, LiveRouter, live_router

KEY = f"Authorization: Bearer {OPERATOR_KEY}\r\n".encode()


@pytest.fixture(scope="module")
def router() -> Iterator[LiveRouter]:
    with live_router(json_bytes_max=1 << 20) as live:
        yield live


def answer_to(router: LiveRouter, *parts: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", router.port), timeout=30) as sock:
        for part in parts:
            sock.sendall(part)
        found = b""
        while b"\r\n\r\n" not in found:
            more = sock.recv(65536)
            if not more:
                break
            found += more
        return found


HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\n" + KEY


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"Content-Length: 2, 2\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 2\n\r\n{}",
        HEAD + b"Content-Length: 2\r\n\n{}",
        HEAD.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\n") + b"\r\n",
        HEAD + b"X: a\r\n b\r\n\r\n",
        HEAD + b"X: a\r\n\tb\r\n\r\n",
        HEAD + b"X : a\r\n\r\n",
        b"\nGET /v1/health HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_ambiguous_requests_get_400(router: LiveRouter, request_bytes: bytes) -> None:
    assert answer_to(router, request_bytes).startswith(b"HTTP/1.1 400")


def test_bare_lf_in_trailers_is_refused(router: LiveRouter) -> None:
    body = b"2\r\n{}\r\n0\r\nX: a\n\r\n"
    answer = answer_to(router, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body)
    assert answer.startswith(b"HTTP/1.1 400")


def test_a_head_that_arrives_in_pieces_is_read(router: LiveRouter) -> None:
    head = b"GET /v1/jobs HTTP/1.1\r\nHost: a\r\n" + KEY + b"\r\n"
    pieces = [head[at : at + 7] for at in range(0, len(head), 7)]
    assert answer_to(router, *pieces).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("key", [OPERATOR_KEY, "wrong"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_client_that_sends_a_refused_body_reads_the_answer(
    router: LiveRouter, key: str, is_chunked: bool
) -> None:
    body = b" " * (32 << 20)
    content = (body[at : at + 65536] for at in range(0, len(body), 65536)) if is_chunked else body
    headers = {"Content-Type": "application/json"}
    with router.client(key) as client:
        answer = client.post("/v1/jobs", content=content, headers=headers)
    assert answer.status_code == (413 if key == OPERATOR_KEY else 401)
    assert answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"


def test_a_client_that_sends_without_end_is_reset(router: LiveRouter) -> None:
    def send_on(sock: socket.socket) -> None:
        while True:
            sock.sendall(b" " * (1 << 20))

    with socket.create_connection(("127.0.0.1", router.port), timeout=30) as sock:
        sock.sendall(HEAD + b"Content-Length: 10000000000\r\n\r\n")
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            send_on(sock)
