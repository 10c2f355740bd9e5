"""A log of the requests that change something, or are refused: when, who, from where, what, to
which object, and the outcome.

    {"at": "2026-01-31T12:00:00.123+00:00", "tenant": "team", "user": "ada", "role": "member",
     "key": "3f…", "from": "10.0.0.7", "action": "POST /v1/jobs/{job}/finish", "method": "POST",
     "path": "/v1/jobs/a/finish", "status": 200, "outcome": "done"}

One JSON object a line, in the folder `audit` of the data directory. Each router has three logs, for
its operators, its tenants and those without a valid key, so that many lines of one kind push out
none of another kind; all tenants share theirs. All are only appended to, and rotated by size.
`tenant`, `user`, `role` and `key`, which is the key's id, are null if the request carried no valid
key. `action` is null if there is no such route. `status` is null if there was no answer, or one
that a failure of the router made. Queries and bodies are not logged: they may hold secrets. A long
path is cut.
"""

import asyncio
import heapq
import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.errors import StorageUnavailableError
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.process.folders.rotated_log import FILES, RotatedLog

if TYPE_CHECKING:
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

READING = frozenset({"GET", "HEAD", "OPTIONS"})
REFUSED = (401, 403)
FOLDER = "audit"
KINDS = ("operators", "tenants", "strangers")
PATH_MAX = 1000
"""Characters of a path that are logged, so that few requests cannot fill a log."""
METHOD_MAX = 20


class AuditLog:
    """ASGI middleware that writes the log."""

    def __init__(
        self,
        app: "ASGIApp",
        *,
        data_dir: Path,
        router: str,
        bytes_max: int,
        error_response: "Callable[[Request, Exception], Awaitable[JSONResponse]]",
    ) -> None:
        """The log takes `bytes_max` bytes at most, over all its files."""
        self._app = app
        self._error_response = error_response
        make_private_folder(data_dir / FOLDER)
        self._logs = {
            kind: RotatedLog(data_dir / FOLDER / f"{router}.{kind}.log", bytes_max // len(KINDS))
            for kind in KINDS
        }
        for log in self._logs.values():
            _end_last_line(Path(log.baseFilename))
            log.setFormatter(logging.Formatter("%(message)s"))

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_written = is_replaced = False

        async def recording_send(message: "Message") -> None:
            nonlocal is_written, is_replaced
            if is_replaced:
                return
            if message["type"] == "http.response.start":
                # Before the answer is sent, so that whoever has it finds the line.
                is_written = True
                if _is_logged(scope, message["status"]):
                    try:
                        await self._write(scope, message["status"])
                    except OSError as error:
                        is_replaced = True
                        await self._answer_unrecorded(scope, receive, send, error)
                        return
            await send(message)

        try:
            await self._app(scope, receive, recording_send)
        finally:
            if not is_written and _is_logged(scope, None):
                await self._write(scope, None)

    async def _write(self, scope: "Scope", status: int | None) -> None:
        """Write a line; that of an administrative change is on the disk then. Raises `OSError`: it
        is not."""
        state: dict[str, Any] = scope["state"]
        caller, rule = state.get("caller"), state.get("rule")
        line = logging.makeLogRecord({"msg": json.dumps(_line(scope, status))})
        kind = "strangers" if caller is None else "operators" if caller.sees_all else "tenants"
        if rule is not None and rule.is_administrative and caller is not None:
            await asyncio.to_thread(self._logs[kind].handle_durably, line)
        else:
            self._logs[kind].handle(line)

    async def _answer_unrecorded(
        self, scope: "Scope", receive: "Receive", send: "Send", error: OSError
    ) -> None:
        from fastapi import Request

        refusal = StorageUnavailableError(
            "the request was handled, but the audit log cannot record it now, so that it is not "
            f"acknowledged: look what it has changed, and send it again later ({error})"
        )
        response = await self._error_response(Request(scope), refusal)
        await response(scope, receive, send)


def _end_last_line(path: Path) -> None:
    """End a line that a machine without power, or a full disk, has cut: the next line must not be
    its continuation."""
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")


def _line(scope: "Scope", status: int | None) -> dict[str, Any]:
    state: dict[str, Any] = scope["state"]
    caller, client, route = state.get("caller"), scope["client"], state.get("route")
    return {
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "tenant": None if caller is None else caller.tenant,
        "user": None if caller is None else caller.user,
        "role": None if caller is None else caller.role.value,
        "key": None if caller is None else caller.key,
        "from": client[0] if client else None,
        "action": route,
        "method": scope["method"][:METHOD_MAX],
        "path": scope["path"][:PATH_MAX],
        "status": status,
        "outcome": _outcome(status),
    }


def _outcome(status: int | None) -> str:
    if status is None:
        return "unknown"
    if status < 400:
        return "done"
    return "refused" if status < 500 else "failed"


def _is_logged(scope: "Scope", status: int | None) -> bool:
    rule = scope["state"].get("rule")
    if status in REFUSED:
        return True
    if rule is None:
        return scope["method"] not in READING
    return bool(rule.changes and rule.is_logged)


def read_audit(
    data_dir: Path, keep: Callable[[dict[str, Any]], bool], limit: int
) -> list[dict[str, Any]]:
    """The newest `limit` lines that `keep` accepts, newest first, of all routers that share the
    data directory. It reads the logs from their ends, one file at a time."""
    logs = [_newest_lines(path) for path in (data_dir / FOLDER).glob("*.log")]
    kept = [filter(keep, lines) for lines in logs]
    found = heapq.merge(*kept, key=lambda line: str(line.get("at")), reverse=True)
    return list(islice(found, limit))


def _newest_lines(path: Path) -> Iterator[dict[str, Any]]:
    older = [path.with_name(f"{path.name}.{number}") for number in range(1, FILES)]
    for file in (path, *older):
        try:
            lines = file.read_bytes().splitlines()
        except FileNotFoundError:
            continue
        for text in reversed(lines):
            try:
                line = json.loads(text)
            except ValueError:
                # The process was killed while it wrote.
                continue
            if isinstance(line, dict):
                yield line
