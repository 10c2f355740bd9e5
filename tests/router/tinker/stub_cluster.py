"""The cluster's HTTP API as an ASGI application of a few lines, and requests of one model."""

import asyncio
import json
from typing import Any
from urllib.parse import parse_qs

from plexrl.router.tinker.records import FutureRecord
from plexrl.router.tinker.training_queue import PendingRequest
from plexrl.wire.tensors import Arrays, decode_body, encode_body

MODEL = "s:train:0"
KEY = "Bearer k"


class StubCluster:
    """What has been submitted, and the operations that the scheduler still knows."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        """Operations in the order of their first submissions."""
        self.batches: list[Arrays] = []
        self.known: set[str] = set()
        self.is_down = False
        self.refused_kind = ""
        """Kind of operations of which the queue is full; empty: none."""
        self.was_down = asyncio.Event()
        """A request was refused, as the cluster is down."""
        self.result: dict[str, Any] = {"metrics": {}}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Submissions are accepted, and done at once."""
        status, body = 200, encode_body({"result": self.result}, {})
        operation = scope["path"].rpartition("/")[2]
        if self.is_down:
            status, body = 503, _refusal("unavailable")
            self.was_down.set()
        elif operation == self.refused_kind:
            status, body = 429, _refusal("overloaded")
        elif scope["method"] == "POST":
            self._submit(scope, (await receive())["body"])
        elif operation not in self.known:
            status, body = 404, _refusal("unknown_operation")
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    def _submit(self, scope: Any, body: bytes) -> None:
        operation = parse_qs(scope["query_string"].decode())["operation"][0]
        if operation not in self.known:
            self.known.add(operation)
            self.submitted.append(operation)
            self.batches.append(decode_body(body)[1])


def _refusal(code: str) -> bytes:
    """The body of a refused request."""
    return json.dumps({"error": {"code": code, "message": "refused"}}).encode()


def step(seq: int, **fields: Any) -> PendingRequest:
    """A request of the model."""
    record = FutureRecord(
        id=f"{MODEL}:{seq}", session="s", kind="optim_step", operation=f"{MODEL}:{seq}"
    )
    given = {"key": KEY, "tenant": "t", "kind": "optim_step", "params": {}, "future": record}
    return PendingRequest(**{**given, **fields})
