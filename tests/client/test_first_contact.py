"""What `connect` says of a server that does not reply, or that is no router."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

import plexrl
from plexrl import errors
from plexrl.cli.app import app

WAIT_S = 3.0


class WebServer(SimpleHTTPRequestHandler):
    """Another web server: the same page for every path."""

    status = 404
    kind = "text/html"
    body = b"<html><body>welcome</body></html>"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("content-type", self.kind)
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def serve(handler: type[WebServer]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


PAGES = [(404, "text/html"), (200, "text/html"), (302, "text/html"), (200, "application/json")]


@pytest.fixture(params=PAGES)
def other_server(request: pytest.FixtureRequest) -> Iterator[str]:
    status, kind = request.param
    yield from serve(type("Page", (WebServer,), {"status": status, "kind": kind}))


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts connections and never replies."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_another_web_server_is_refused_at_once_by_name(other_server: str) -> None:
    """The default timeout holds: a retry would exceed the test's."""

    async def connect() -> None:
        await plexrl.connect_async(other_server, "key")

    said = f"{other_server} answers, but is no PlexRL router: it sent (text/html|application/json)"
    with pytest.raises(errors.InvalidRequestError, match=said) as refused:
        plexrl.connect(other_server, "key")
    assert "<html>" not in refused.value.message
    with pytest.raises(errors.InvalidRequestError, match=said):
        asyncio.run(connect())
    command = ["status", "--url", other_server]
    shown = CliRunner().invoke(app, command, env={"PLEXRL_API_KEY": "key"})
    assert shown.exit_code != 0
    assert "is no PlexRL router" in shown.output + str(shown.exception)


def test_a_failing_proxy_is_tried_again_and_its_page_is_not_shown() -> None:
    for url in serve(type("Proxy", (WebServer,), {"status": 502})):
        with pytest.raises(errors.ConnectionLostError, match=rf"{url}.*HTTP 502") as lost:
            plexrl.connect(url, "key", timeout_s=0.1)
        assert "<html>" not in lost.value.message


def connect_in_loop(url: str, api_key: str, timeout_s: float) -> None:
    async def connect() -> None:
        await plexrl.connect_async(url, api_key, timeout_s=timeout_s)

    asyncio.run(connect())


@pytest.mark.parametrize("connect", [plexrl.connect, connect_in_loop])
def test_a_cluster_that_does_not_reply_is_named_while_connect_waits(
    capfd: pytest.CaptureFixture[str], connect: Callable[..., object]
) -> None:
    url = "http://127.0.0.1:9"
    with pytest.raises(errors.ConnectionLostError, match=rf"{url}.*check that the cluster is up"):
        connect("http://me:secret@127.0.0.1:9", "key", timeout_s=WAIT_S)
    said = capfd.readouterr().err
    assert f"no PlexRL router replies at {url} yet; trying for {WAIT_S:g} s" in said
    assert "secret" not in said


def test_connect_async_can_be_cancelled_while_a_server_is_silent(silent: str) -> None:
    async def connect() -> None:
        async with asyncio.timeout(0.2):
            await plexrl.connect_async(silent, "key")

    with pytest.raises(TimeoutError):
        asyncio.run(connect())
