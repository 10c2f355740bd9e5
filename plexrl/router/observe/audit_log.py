"""A log of the requests that change something: when, who, what, from where, and the answer.

    {"at": "2026-01-31T12:00:00.123+00:00", "tenant": "team", "key": "3f…", "from": "10.0.0.7",
     "method": "POST", "path": "/v1/jobs", "status": 201}

One JSON object a line, in `audit/<router>.log` of the data directory, rotated by size. `tenant` and
`key`, which is the key's id, are null if the request carried no valid key; `status` is null if the
client disconnected before the answer.
"""

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.process.folders.private_folder import make_private_folder
from plexrl.process.folders.rotated_log import RotatedLog

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

READING = frozenset({"GET", "HEAD", "OPTIONS"})
UNCHANGING = ("/heartbeat", "/exchange")
"""Ends of paths of requests that each controller sends every few seconds for as long as it runs."""
FOLDER = "audit"


class AuditLog:
    """ASGI middleware that writes the log."""

    def __init__(self, app: "ASGIApp", *, data_dir: Path, router: str, bytes_max: int) -> None:
        """The log takes `bytes_max` bytes at most, over all its files."""
        self._app = app
        make_private_folder(data_dir / FOLDER)
        self._log = RotatedLog(data_dir / FOLDER / f"{router}.log", bytes_max)
        self._log.setFormatter(logging.Formatter("%(message)s"))

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http" or not _is_audited(scope):
            await self._app(scope, receive, send)
            return
        is_written = False

        async def recording_send(message: "Message") -> None:
            nonlocal is_written
            if message["type"] == "http.response.start":
                # Before the answer is sent, so that whoever has it finds the line.
                is_written = True
                self._write(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, recording_send)
        finally:
            if not is_written:
                self._write(scope, None)

    def _write(self, scope: "Scope", status: int | None) -> None:
        state: dict[str, Any] = scope["state"]
        client = scope["client"]
        line = json.dumps(
            {
                "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "tenant": state.get("tenant"),
                "key": state.get("key"),
                "from": client[0] if client else None,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
            }
        )
        self._log.handle(logging.makeLogRecord({"msg": line}))


def _is_audited(scope: "Scope") -> bool:
    return scope["method"] not in READING and not scope["path"].endswith(UNCHANGING)
