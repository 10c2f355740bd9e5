"""A router that misbehaves on purpose."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import numpy as np

from plexrl import errors
from plexrl.ids import JobId, TenantId
from plexrl.wire.messages.views import JobView
from plexrl.wire.tensors import MEDIA_TYPE, encode_body

if TYPE_CHECKING:
    from collections.abc import Callable

JOB: JobView = {
    "job": JobId("j"),
    "tenant": TenantId("t"),
    "name": "j",
    "state": "RUNNING",
    "attached": True,
    "reason": "",
    "failure": None,
    "priority": 0,
    "slo": 0.5,
    "gpu_seconds": 0.0,
    "controller_timeout_s": 60.0,
    "submitted_at": 0.0,
    "ended_at": None,
    "deployments": [],
}


class FakeRouter(ThreadingHTTPServer):
    """A fake API; `faults` lists faults to inject, one for each request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.faults: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self.polls_until_done = 1
        self.job = JOB
        self.beaten = threading.Event()
        """Set by a heartbeat."""
        self.bodies: dict[str, Any] = {}
        """The last JSON body received, by path."""
        self.tokens: list[str | None] = []
        self.on_poll: Callable[[], None] = lambda: None
        self.result: dict[str, Any] = {"metrics": {"loss": 0.5}}
        self.lost_payloads: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeRouter
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        length = int(self.headers.get("content-length", 0))
        sent = self.rfile.read(length)
        if self.headers.get("content-type") == "application/json":
            self.server.bodies[self.path] = json.loads(sent)
        self.server.tokens.append(self.headers.get("plexrl-controller"))
        self.server.requests.append((self.command, self.path))
        if self.path.endswith("/heartbeat"):
            self.server.beaten.set()
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "reset":
            self.connection.close()
            self.close_connection = True
        elif fault == "untyped":
            # As the response of a server that cuts off requests while it shuts down.
            self.answer(500, b"Internal Server Error")
        elif fault:
            # A fault that is final has no Retry-After, whatever its code.
            code, _, final = fault.partition(" ")
            error = {"code": code, "message": "injected", "details": {"retry_after_s": 0.01}}
            self.answer(errors.from_wire(error).status, {"error": error}, is_final=bool(final))
        elif "/operations/" in self.path and self.command == "POST":
            operation = self.path.partition("operation=")[2]
            self.answer(202, {"operation": operation, "state": "pending", "explanation": None})
        elif self.path.partition("?")[0].endswith("/stream"):
            self.answer(200, {"done": True})
        elif "/v1/operations/" in self.path:
            self.poll()
        else:
            logs = {"logs": [], "failed": [{"node": "n7", "reason": "it is silent"}]}
            checkpoints = [{"name": "c", "seq": 1, "state": "durable"}]
            body: dict[str, Any] = {**self.server.job, "deployment": "j/actor", "jobs": []}
            body |= {"operations": [], **logs}
            if self.path.endswith("/finish"):
                body["state"] = "COMPLETED"
            body["lost_payloads"] = self.server.lost_payloads
            self.answer(200, {**body, "checkpoints": checkpoints})

    do_GET = do_POST = do_DELETE = handle_any

    def poll(self) -> None:
        view: dict[str, Any] = {"operation": "o", "state": "running"}
        self.server.on_poll()
        self.server.polls_until_done -= 1
        if self.server.polls_until_done > 0:
            reason = {"reason": "b has the group", "rule": "burst", "eta_s": 2.0}
            self.answer(202, {**view, "state": "pending", "explanation": reason})
            return
        body = encode_body(
            {"operation": {**view, "state": "finished"}, "result": self.server.result},
            {"logprobs": np.arange(5, dtype=np.float32)},
        )
        self.answer(200, body)

    def answer(self, status: int, body: dict[str, Any] | bytes, *, is_final: bool = False) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        kind = MEDIA_TYPE if isinstance(body, bytes) else "application/json"
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(raw)))
        if status >= 429 and not is_final:
            self.send_header("retry-after", "1")
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Log nothing."""
