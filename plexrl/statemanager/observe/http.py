"""`/healthz` and `/metrics` over HTTP, on the loopback interface only."""

import json
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST = "127.0.0.1"
REQUEST_TIMEOUT_S = 5.0
"""Timeout of reading a request."""

LOG = logging.getLogger(__name__)


class ObservationServer:
    """Serves on its own threads, from construction until `close`."""

    def __init__(
        self, port: int, reasons: Callable[[], list[str]], metrics: Callable[[], bytes]
    ) -> None:
        """`port` 0: any free port. `reasons()` returns the problems, `metrics()` the Prometheus
        text."""
        self._server = ThreadingHTTPServer((HOST, port), _handler(reasons, metrics))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(
    reasons: Callable[[], list[str]], metrics: Callable[[], bytes]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            if self.path == "/healthz":
                found = reasons()
                status = HTTPStatus.SERVICE_UNAVAILABLE if found else HTTPStatus.OK
                body = json.dumps({"healthy": not found, "reasons": found}).encode()
                self._reply(status, "application/json", body)
            elif self.path == "/metrics":
                self._reply(HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", metrics())
            else:
                self.send_error(HTTPStatus.NOT_FOUND, "only /healthz and /metrics exist")

        def log_message(self, format: str, *args: object) -> None:
            LOG.debug(format, *args)

        def _reply(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
