"""The proxies that an environment names, and what they are asked for."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.client.calls.transport import AsyncTransport, Call, Transport
from plexrl.errors import ConnectionLostError, InvalidRequestError
from plexrl.proxies import is_own_address, proxy_for

PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY")
DEAD = "http://user:secret@127.0.0.1:9"


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server that answers as a router does; no variable names a proxy."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"path": self.path}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    for name in (*PROXIES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(url: str) -> None:
    transport = Transport(url, "key", 0.0)
    try:
        assert transport.ask("GET", "/v1/x") == {"path": "/v1/x"}
    finally:
        transport.close()


async def ask_async(url: str) -> None:
    transport = AsyncTransport(url, "key", 0.0)
    try:
        response = await transport.request(Call(method="GET", path="/v1/x"))
        assert response.json() == {"path": "/v1/x"}
    finally:
        await transport.close()


@pytest.mark.parametrize("proxy", [DEAD, "socks5://127.0.0.1:9", "127.0.0.1:9", "ftp://x:9"])
@pytest.mark.parametrize("variable", PROXIES)
def test_a_cluster_on_this_machine_is_reached_directly(
    router: str, variable: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, proxy)
    ask(router)
    asyncio.run(ask_async(router))


def test_a_proxy_is_used_and_a_failure_names_it_without_its_password(
    router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = router.rpartition(":")[2]
    monkeypatch.setenv("ALL_PROXY", f"127.0.0.1:{port}")
    # The server is asked as a proxy is: for the whole URL.
    assert Transport("http://192.0.2.7:8000", "key", 0.0).ask("GET", "/v1/x") == {
        "path": "http://192.0.2.7:8000/v1/x"
    }
    monkeypatch.setenv("http_proxy", DEAD)
    with pytest.raises(ConnectionLostError) as lost:
        ask("http://192.0.2.7:8000")
    assert "the proxy http://127.0.0.1:9 of http_proxy" in lost.value.message
    assert "add it to no_proxy" in lost.value.message
    assert "secret" not in lost.value.message
    with pytest.raises(ConnectionLostError) as lost:
        asyncio.run(ask_async("http://192.0.2.7:8000"))
    assert "of http_proxy" in lost.value.message


def test_a_proxy_that_cannot_be_used_is_refused_with_its_variable(
    router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del router
    for value in ("socks5://127.0.0.1:9", "ftp://127.0.0.1:9"):
        monkeypatch.setenv("all_proxy", value)
        with pytest.raises(InvalidRequestError, match=r"of all_proxy .*192\.0\.2\.7 to no_proxy"):
            Transport("http://192.0.2.7:8000", "key", 0.0)


@pytest.mark.parametrize(
    ("no_proxy", "host", "is_direct"),
    [
        ("*", "a.example", True),
        ("192.0.2.0/24", "192.0.2.7", True),
        ("198.51.100.0/24, 192.0.2.7", "192.0.2.7", True),
        ("192.0.2.0/28", "192.0.2.77", False),
        ("example", "a.example", True),
        (".example", "a.example", True),
        ("*.example", "A.example", True),
        ("example", "aexample", False),
        ("a.example:8000", "a.example", True),
        ("a.example:9", "a.example", False),
        ("2001:db8::/32", "[2001:db8::1]", True),
        ("", "a.example", False),
        (",", "a.example", False),
    ],
)
def test_no_proxy_names_hosts_domains_and_networks(
    no_proxy: str, host: str, is_direct: bool
) -> None:
    environment = {"http_proxy": DEAD, "NO_PROXY": no_proxy}
    assert (proxy_for(f"http://{host}:8000", environment) is None) == is_direct


@given(st.ip_addresses(v=4, network="127.0.0.0/8"), st.sampled_from(PROXIES))
def test_loopback_has_no_proxy(address: object, variable: str) -> None:
    assert proxy_for(f"http://{address}:1", {variable: DEAD}) is None


def test_addresses_of_this_machine_are_its_own() -> None:
    found = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    assert all(is_own_address(str(address)) for address in found)
    assert is_own_address("::1")
    assert is_own_address("localhost")
    assert not is_own_address("192.0.2.7")
    assert not is_own_address("localhost.example")
