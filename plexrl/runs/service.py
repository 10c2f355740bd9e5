"""Keeps the cluster's controllers running: `python -m plexrl.runs --config FILE`.

All it knows is in files, so after `kill -9` it goes on where it was: a controller that has ended
with it is started again, with the same job id, and takes over its job.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from msgspec.structs import replace

from plexrl.errors import InvalidRequestError, SandboxError
from plexrl.process.folders.operator_key import operator_key
from plexrl.runs.controller_process import CA_FILE, ControllerProcess
from plexrl.runs.records import ENDED, FOLDER, RunRecords, RunSpec, RunState

LOG = logging.getLogger(__name__)

LOOK_S = 0.3
RESTART_S, RESTART_S_MAX = 1.0, 60.0
ROUTER_RETRY_S = 1.0
LOG_BYTES_MAX = 64 << 20
"""A log that is larger is begun anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsConfig:
    """Settings of the service."""

    data_dir: str
    """The cluster's directory on this machine."""
    routers: tuple[str, ...]
    """URLs of the routers, by which it makes keys and controllers reach the cluster."""
    ca: str = ""
    """PEM file of the authority of the routers' certificates; empty: the public ones."""
    at_once: int = 8
    """Controllers that run at the same time; others wait."""


class RunService:
    """The service of one cluster."""

    def __init__(self, config: RunsConfig) -> None:
        self._config = config
        self._records = RunRecords(Path(config.data_dir) / FOLDER)
        self._kept: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(config.at_once)
        self._client = httpx.AsyncClient(verify=config.ca or True, timeout=30.0)

    async def serve(self, stop: asyncio.Event) -> None:
        """Keep all runs until `stop`; controllers end with it, and are started again later."""
        async with asyncio.TaskGroup() as tasks:
            while not stop.is_set():
                self._look(tasks)
                await asyncio.sleep(LOOK_S)
            for task in self._kept.values():
                task.cancel()
        await self._client.aclose()

    def _look(self, tasks: asyncio.TaskGroup) -> None:
        self._kept = {run: task for run, task in self._kept.items() if not task.done()}
        for run in self._records.names():
            if run not in self._kept and self._records.state(run).state not in ENDED:
                self._kept[run] = tasks.create_task(self._keep(run))

    async def _keep(self, run: str) -> None:
        """Start a run's controller until it has completed, failed too often, or shall stop."""
        try:
            spec = self._records.spec(run)
            async with self._slot(run):
                while (state := await self._attempt(spec)).state not in ENDED:
                    pause_s = min(RESTART_S_MAX, RESTART_S * 2 ** (state.attempts - 1))
                    await self._pause(run, pause_s)
        except OSError as error:
            # A full disk, for one; a later look begins again.
            LOG.error("run %s: %s", run, error)
            await asyncio.sleep(RESTART_S)
        except Exception:
            # A fault of one run must not end those of others. A later look begins again.
            LOG.exception("run %s", run)
            await asyncio.sleep(RESTART_S)

    @asynccontextmanager
    async def _slot(self, run: str) -> AsyncIterator[None]:
        """Wait until it may run; a run that shall stop waits for nothing."""
        waiting = asyncio.ensure_future(self._slots.acquire())
        try:
            while not waiting.done() and not self._records.shall_stop(run):
                await asyncio.wait([waiting], timeout=LOOK_S)
            yield
        finally:
            if waiting.done() and not waiting.cancelled():
                self._slots.release()
            waiting.cancel()

    async def _pause(self, run: str, pause_s: float) -> None:
        """Wait so long, or until it shall stop."""
        for _ in range(math.ceil(pause_s / LOOK_S)):
            if self._records.shall_stop(run):
                return
            await asyncio.sleep(LOOK_S)

    async def _attempt(self, spec: RunSpec) -> RunState:
        state = self._records.state(spec.run)
        await self._revoke(spec, state)
        if self._records.shall_stop(spec.run):
            return await self._end(spec, state, "stopped", "plexrl runs stop")
        if state.started_at is not None and (ended := await self._ended_job(spec)):
            how, reason = ended
            return await self._end(spec, state, how, reason)
        made = await self._make_key(spec)
        if made is None:
            reason = "it waits for an API key: the tenant has as many as it may"
            state = replace(state, state="waiting", reason=reason, key="")
            self._write(spec, state)
            return state
        key, secret = made
        now = time.time()
        state = replace(state, state="running", started_at=state.started_at or now, key=key)
        try:
            self._write(spec, state)
        except OSError:
            # Nothing else knows this key.
            await self._revoke(spec, state)
            raise
        try:
            process = ControllerProcess(
                spec,
                self._environment(spec, secret),
                self._records.log_path(spec.run),
                ca=self._config.ca,
            )
        except (SandboxError, InvalidRequestError, ValueError) as error:
            return await self._end(spec, state, "failed", str(error))
        try:
            why = await self._watch(spec, state, process)
        finally:
            process.kill()
        await self._revoke(spec, state)
        code = process.exit_code()
        state = replace(state, attempts=state.attempts + 1, exit_code=code, key="")
        if why:
            return await self._end(spec, state, "stopped" if "stop" in why else "failed", why)
        if code == 0:
            return await self._end(spec, state, "completed", "")
        reason = f"attempt {state.attempts} ended with {code}"
        if state.attempts > spec.restarts:
            return await self._end(spec, state, "failed", reason)
        state = replace(state, state="waiting", reason=reason)
        self._write(spec, state)
        return state

    async def _watch(self, spec: RunSpec, state: RunState, process: ControllerProcess) -> str:
        """Wait for the controller's end. Returns why it has to be killed; empty: it ended."""
        log = self._records.log_path(spec.run)
        assert state.started_at is not None
        while process.exit_code() is None:
            if self._records.shall_stop(spec.run):
                return "plexrl runs stop"
            if time.time() - state.started_at > spec.wall_s:
                return f"it has run for {spec.wall_s:g} s"
            if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
                log.write_bytes(b"")
            await asyncio.sleep(LOOK_S)
        return ""

    async def _end(self, spec: RunSpec, state: RunState, how: Any, reason: str) -> RunState:
        """Record the end. Its key is revoked, and a job that it has left is ended."""
        await self._revoke(spec, state)
        if how != "completed":
            outcome = {"outcome": "cancelled" if how == "stopped" else "failed", "reason": reason}
            await self._ask("POST", f"/v1/jobs/{quote(spec.run)}/finish", outcome)
        state = replace(state, state=how, reason=reason, ended_at=time.time(), key="")
        self._records.cut_log(spec.run)
        self._write(spec, state)
        return state

    async def _ended_job(self, spec: RunSpec) -> tuple[str, str] | None:
        """How the run ends whose job has ended: another start could only fail. None: the job has
        not, or there is none."""
        job = await self._ask("GET", f"/v1/jobs/{quote(spec.run)}")
        if job is None or job["state"] not in ("COMPLETED", "FAILED", "CANCELLED"):
            return None
        if job["state"] == "COMPLETED":
            return "completed", ""
        return "failed", f"its job has ended: {job['state']}"

    def _write(self, spec: RunSpec, state: RunState) -> None:
        self._records.write_state(spec.run, state)
        LOG.info("run %s is %s %s", spec.run, state.state, state.reason)

    def _environment(self, spec: RunSpec, secret: str) -> dict[str, str]:
        return {
            "PLEXRL_URL": ",".join(self._config.routers),
            "PLEXRL_API_KEY": secret,
            "PLEXRL_JOB_ID": spec.run,
            **({"PLEXRL_CA_FILE": CA_FILE} if self._config.ca else {}),
        }

    async def _make_key(self, spec: RunSpec) -> tuple[str, str] | None:
        """A key of the tenant for one attempt: its id, and the key. None: it gets no further."""
        body = {"user": spec.user, "name": spec.run}
        made = await self._ask("POST", f"/v1/tenants/{quote(spec.tenant)}/keys", body)
        return None if made is None else (made["key"], made["api_key"])

    async def _revoke(self, spec: RunSpec, state: RunState) -> None:
        if state.key:
            await self._ask("DELETE", f"/v1/tenants/{quote(spec.tenant)}/keys/{quote(state.key)}")

    async def _ask(self, method: str, path: str, body: Mapping[str, str] | None = None) -> Any:
        """A request as the operator, repeated until a router answers. None: it was refused, such as
        for what is not there."""
        while True:
            for url in self._config.routers:
                key = operator_key(Path(self._config.data_dir))
                try:
                    answer = await self._client.request(
                        method, url + path, json=body, headers={"Authorization": f"Bearer {key}"}
                    )
                except httpx.TransportError:
                    continue
                if answer.status_code < 500 and answer.status_code != 429:
                    return answer.json() if answer.is_success and answer.content else None
            await asyncio.sleep(ROUTER_RETRY_S)
