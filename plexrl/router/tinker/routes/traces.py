"""Timelines of sessions, as files of Perfetto that their clients download."""

import asyncio
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response

from plexrl.errors import NotFoundError
from plexrl.router.tinker.messages.perfetto import Timeline, encode_trace
from plexrl.router.tinker.records import (
    FutureRecord,
    SamplerRecord,
    SessionRecord,
    request_digest,
)
from plexrl.router.tinker.routes.client import Client, TinkerClient, TinkerRoute

if TYPE_CHECKING:
    from plexrl.router.tinker.sessions import Sessions
    from plexrl.wire.messages.views import LoggedOperationView

ROUTES = APIRouter(route_class=TinkerRoute)
PREFIX = "/api/v1/traces/"
"""Where the files are. They need no key: their names are secrets."""
FOLDER, SUFFIX = "tinker-traces", ".pftrace"
KEPT_S = 3600.0
"""How long a file can be downloaded."""
KEPT_MAX = 16
"""Files of one tenant that are kept; an older one is deleted for each more, so that exports do not
fill the disk."""
PAGE = 1000


@ROUTES.get("/sessions/{session}/trace_export")
async def export(client: TinkerClient, session: str) -> dict[str, Any]:
    """Make the trace of a session, and say where it can be downloaded."""
    found = client.sessions.find(SessionRecord, session, client.caller)
    records = client.sessions.records
    name = f"{request_digest(found.tenant)}-{secrets.token_urlsafe(24)}{SUFFIX}"
    # A trace is held in memory while it is made.
    async with records.exclusive(f"traces of {found.tenant}"):
        timeline = await _timeline(client, found)
        await asyncio.to_thread(_write, records.folder / FOLDER, name, timeline)
    url = client.request.url
    scheme = client.request.headers.get("x-forwarded-proto", url.scheme)
    return {"status": "ready", "url": f"{scheme}://{url.netloc}{PREFIX}{name}"}


@ROUTES.get("/traces/{name}")
async def download(request: Request, name: str) -> Response:
    """The file of a trace; 404: its time has passed."""
    sessions: Sessions = request.app.state.sessions
    folder = sessions.records.folder / FOLDER
    file = folder / name
    if file.parent != folder or not await asyncio.to_thread(_is_kept, file):
        return PlainTextResponse("there is no such trace any more: export it again", 404)
    return FileResponse(file, media_type="application/octet-stream", filename=file.name)


async def _timeline(client: Client, session: SessionRecord) -> Timeline:
    records = client.sessions.records
    rows = await _rows(client, f"job={quote(session.id)}")
    shared = {
        each.deployment
        for each in records.all(SamplerRecord, session.id)
        if each.deployment.partition("/")[0] != session.id
    }
    for deployment in sorted(shared):
        others = await _rows(client, f"deployment={quote(deployment, safe='')}")
        rows += [row for row in others if row["operation"].startswith(f"{session.id}:")]
    known = {str(row["operation"]) for row in rows}
    return Timeline(
        session=session.id,
        began_at=session.made_at,
        ended_at=session.finished_at or time.time(),
        rows=rows,
        unfinished={
            each.id: each.made_at
            for each in records.all(FutureRecord, session.id)
            if each.operation and each.operation not in known and each.error is None
        },
    )


async def _rows(client: Client, query: str) -> "list[LoggedOperationView]":
    found: list[LoggedOperationView] = []
    after = 0
    while True:
        path = f"/v1/operations?{query}&after={after}&limit={PAGE}"
        try:
            page = await client.sessions.api.call(client.key, "GET", path)
        except NotFoundError:
            # The scheduler has forgotten the job.
            return found
        found += page["operations"]
        if len(page["operations"]) < PAGE:
            return found
        after = found[-1]["index"]


def _write(folder: Path, name: str, timeline: Timeline) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    oldest = time.time() - KEPT_S
    own: list[tuple[float, Path]] = []
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            made_at = file.stat().st_mtime
            if made_at < oldest:
                file.unlink()
            elif file.name.partition("-")[0] == name.partition("-")[0]:
                own.append((made_at, file))
    for _, file in sorted(own)[: max(0, len(own) + 1 - KEPT_MAX)]:
        file.unlink(missing_ok=True)
    (folder / name).write_bytes(encode_trace(timeline))


def _is_kept(file: Path) -> bool:
    return file.is_file() and file.stat().st_mtime > time.time() - KEPT_S
