"""The operator's page without a cluster: of a journal on disk, or of a cluster that is made up.

A router and a scheduler that stands still run in this process, on this machine's own address. They
work on a copy, so the journal of a running cluster may be shown, and no file of it is changed.
"""

import asyncio
import hashlib
import secrets
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from plexrl.errors import InvalidRequestError, PermissionDeniedError, StorageError
from plexrl.ids import TenantId
from plexrl.router.http.app import make_app
from plexrl.router.server.config import RouterConfig
from plexrl.router.services.error_responses import error_response
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.service.connections.stored_state import serving
from plexrl.scheduler.service.journal.recovery import restore
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from plexrl.scheduler.service.service import OPERATOR
from plexrl.scheduler.state.messages import events as ev
from plexrl.sim.engine.trace_run import TraceRun
from plexrl.sim.workload.scenario import Pool, Scenario
from plexrl.sim.workload.source.trace_source import PublishedSource
from plexrl.traces import Shape

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

HOST = "127.0.0.1"
JOURNAL_NAMES = ("journal.sqlite", "journal.db")
LEASE_S = 1e6
DEMO_S = 3600.0
"""Time that the demo's cluster has been at work."""
DEMO_NODES = 4
DEMO_SPAN_S = 8 * 86_400.0
"""The jobs of so much time, all submitted at the beginning: more than fit."""
DEMO_JOBS = Shape(cap_s=6 * 3600.0, backlog=True)
CALLS_PER_CHECK = 50


@dataclass(slots=True)
class StoredState:
    """A core, and what belongs to it."""

    core: SchedulerCore
    config: SchedulerConfig
    journal: SqlJournal
    at: float
    label: str
    key: str
    """The operator's key for this page."""


def state_of_journal(path: Path, folder: Path) -> StoredState:
    """What the journal at `path` says, a file or a data directory; `folder`: for the copy.

    Raises:
        InvalidRequestError: there is no journal.
        StorageError: it cannot be read, or a newer version of PlexRL wrote it.
    """
    found = _journal_at(path)
    copy = folder / "journal.sqlite"
    _copy(found, copy)
    key, history = secrets.token_urlsafe(24), found.parent / "history"
    archive = str(history.resolve()) if history.is_dir() else ""
    config = replace(_config(folder, key), archive_url=archive)
    journal = SqlJournal(str(copy))
    journal.acquire("page", LEASE_S)
    restored = restore(config, journal)
    _let_in(restored.core, key, restored.at)
    label = f"this is what {found} says of {_text(restored.at)}: no cluster runs here"
    return StoredState(restored.core, config, journal, restored.at, label, key)


def state_of_demo(folder: Path) -> StoredState:
    """A busy cluster in the simulator, whose core is the scheduler's own."""
    scenario = Scenario(
        source=PublishedSource(span_s=DEMO_SPAN_S, shape=DEMO_JOBS, seed=1),
        pools=(Pool(nodes=DEMO_NODES),),
        detail="operation",
    )
    key, at = secrets.token_urlsafe(24), time.time()
    config = _config(folder, key)
    remembered = {"history": config.history, "ended_jobs": config.ended_jobs}
    run = TraceRun(scenario, settings=remembered)
    # All jobs are submitted at once, so that the run may begin at any time.
    run.shell.now = at - DEMO_S
    run.start()
    while run.shell.now < at and run.shell.run(CALLS_PER_CHECK) == CALLS_PER_CHECK:
        pass
    core, at = run.shell.core, run.shell.now
    _let_in(core, key, at)
    journal = SqlJournal(str(folder / "journal.sqlite"))
    label = "this cluster is made up by the simulator: nothing runs here"
    return StoredState(core, config, journal, at, label, key)


async def serve_page(
    state: StoredState,
    folder: Path,
    port: int,
    ready: Callable[[str], None],
    stop: asyncio.Event,
) -> None:
    """Serve the page of `state` until `stop`; `ready` gets its address."""
    router = RouterConfig(
        router="page",
        scheduler=state.config.listen,
        host=HOST,
        port=port,
        data_dir=str(folder / "router"),
    )
    async with serving(state.config, state.core, state.journal, state.at, state.label):
        app, services = make_app(router)
        app.add_middleware(ReadOnly)
        settings = uvicorn.Config(app, host=HOST, port=port, log_level="warning", ws="none")
        server = uvicorn.Server(settings)
        running = asyncio.create_task(server._serve())
        stopping = asyncio.create_task(stop.wait())
        connected = asyncio.create_task(services.scheduler.connected.wait())
        await asyncio.wait({running, connected}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            (listening,) = server.servers
            ready(f"http://{HOST}:{listening.sockets[0].getsockname()[1]}/dashboard")
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        services.shutdown.begin()
        server.should_exit = True
        connected.cancel()
        stopping.cancel()
        await running
    state.journal.close()


class ReadOnly:
    """Refuses all requests that would change something."""

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Pass a reading request on."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        refusal = PermissionDeniedError("this page shows a stored state: nothing can be changed")
        await error_response(refusal)(scope, receive, send)


def _journal_at(path: Path) -> Path:
    candidates = [path / name for name in JOURNAL_NAMES] if path.is_dir() else [path]
    for found in candidates:
        if found.is_file():
            return found
    raise InvalidRequestError(
        f"there is no journal at {path}: name a file such as journal.sqlite, or a data directory"
    )


def _copy(path: Path, copy: Path) -> None:
    """Copy a journal, of a running cluster too, as it is at one moment."""
    failure: sqlite3.Error | None = None
    # Without its log a file is not in use: opened as immutable, nothing is written beside it.
    is_used = path.with_name(f"{path.name}-wal").exists()
    immutable = "mode=ro&immutable=1"
    for options in ("mode=ro", immutable) if is_used else (immutable,):
        try:
            with (
                closing(
                    sqlite3.connect(f"{path.resolve().as_uri()}?{options}", uri=True)
                ) as source,
                closing(sqlite3.connect(copy)) as target,
            ):
                source.backup(target)
            return
        except sqlite3.Error as error:
            failure = error
    raise StorageError(f"{path} cannot be read as a journal: {failure}")


def _config(folder: Path, key: str) -> SchedulerConfig:
    return SchedulerConfig(
        listen=(f"unix:{folder}/scheduler.sock",),
        journal=str(folder / "journal.sqlite"),
        operator_key_digest=_digest(key),
    )


def _let_in(core: SchedulerCore, key: str, at: float) -> None:
    """Accept the page's key as the operator's, in this copy."""
    if OPERATOR in core.tenants():
        core.handle(ev.ApiKeyAdded(tenant=OPERATOR, key_digest=_digest(key)), at)
        return
    created = ev.TenantCreated(tenant=TenantId(OPERATOR), key_digest=_digest(key), is_operator=True)
    core.handle(created, at)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _text(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
