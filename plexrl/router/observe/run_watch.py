"""Watches the runs of jobs: reads finished operations, and keeps what other routers need.

The work is done in a thread, beside the operation, and an error in it is only logged. Each router
keeps what it saw of a job in a file beside those of the others, so that any router answers for all,
also after a restart.
"""

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec

from plexrl.errors import PlexRLError
from plexrl.model.text.files import text_files
from plexrl.model.text.tokenizer import EOS
from plexrl.router.job_files.record_store import JobKey, RecordStore
from plexrl.router.observe.run_figures import end_tokens, generated, stepped, trained
from plexrl.router.observe.run_health import (
    GivenRewards,
    Observation,
    RunHealth,
    merge_views,
    of_critic,
)
from plexrl.storage.model_folder import model_folder
from plexrl.wire.messages.commands import ForwardBackward, Generate, Sync
from plexrl.wire.messages.run_views import RunHealthView
from plexrl.wire.operations import OperationKind
from plexrl.wire.tensors import Body, decode_body

if TYPE_CHECKING:
    from plexrl.model.spec import ModelSpec
    from plexrl.router.execution.deployment_specs import OwnedSpec
    from plexrl.wire.messages import AnyRun

LOG = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

JOBS_MAX = 10_000
KEPT_S = 10.0
"""Time between two writes of a job's figures while its warnings do not change; also the age up to
which what other routers wrote is used."""
OTHERS_S = 600.0
"""Age from which what another router saw counts no more: it may serve the job no longer."""
WAITING_MAX = 64
"""Operations that wait to be looked at, with their batches in memory; more are not looked at."""
SETTINGS = "settings"
FOLDER = "health"
UNWATCHED: RunHealthView = {"watched": False, "warnings": [], "figures": {}, "kl": {}}
WATCHED = frozenset(
    {
        OperationKind.GENERATE,
        OperationKind.FORWARD_BACKWARD,
        OperationKind.OPTIM_STEP,
        OperationKind.SYNC_WEIGHTS,
    }
)

FindSpec = Callable[[str, int], "OwnedSpec | None"]
"""The specification of a deployment's incarnation and its tenant, if they are known here."""


class _Settings(msgspec.Struct):
    """A job's `run_warnings`."""

    on: bool = True
    limits: dict[str, float] = {}


class _Seen(msgspec.Struct):
    """What a router has seen of a job."""

    at: float
    """Unix time."""
    view: RunHealthView


class _Job:
    """What this router knows of one job."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings
        self.health = RunHealth(settings.limits)
        self.keeps_cache: dict[str, bool] = {}
        """By rollout deployment: the last sync kept the KV cache."""
        self.ends: dict[str, tuple[int, ...]] = {}
        """End tokens by rollout deployment."""
        self.writing = threading.Lock()
        """Held while its file is written: two writers would share a temporary file."""
        self.written_at = 0.0
        self.written_codes: list[str] = []
        self.read_at = 0.0
        self.others: list[RunHealthView] = []


class RunWatch:
    """The runs of all jobs, as this router sees them."""

    kinds = WATCHED
    """Kinds of operations that are looked at, if it is known whose job they are of."""

    def __init__(
        self, store: RecordStore, router: str, find_spec: FindSpec, threads: Executor
    ) -> None:
        self._store = store
        self._router = quote(router, safe="")
        self._find_spec = find_spec
        self._threads = threads
        self._jobs: OrderedDict[JobKey, _Job] = OrderedDict()
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(WAITING_MAX)

    def finished(
        self,
        command: "AnyRun",
        payloads: Sequence[Sequence[Body]],
        result: Mapping[str, Any],
        body: Sequence[Body],
        refusal: object,
    ) -> None:
        """An operation has finished, or has refused to change the state (`refusal`); returns at
        once."""
        if command.kind in WATCHED and not command.replay:
            self._submit(self._read, command, payloads, result, body, refusal is not None)

    def rewarded(self, job: JobKey, *, total: int, failed: int) -> None:
        """Rewards of a job have come; returns at once."""
        if total:
            self._submit(self._observe, job, GivenRewards(total=total, failed=failed))

    async def begin(self, job: JobKey, *, on: bool, limits: Mapping[str, float]) -> None:
        """Set the job's `run_warnings`, whose limits are checked."""
        settings = _Settings(on, dict(limits))
        await self._in_thread(lambda: self._set(job, settings))

    async def view(self, job: JobKey) -> RunHealthView:
        """What all routers have seen of the job; nothing, if that cannot be read now: no request
        fails for it."""
        try:
            return await self._in_thread(lambda: self._view(job))
        except (PlexRLError, OSError, msgspec.MsgspecError) as error:
            LOG.warning("what was seen of the run of %s cannot be read: %s", job.job, error)
            return UNWATCHED

    def own_views(self) -> dict[JobKey, RunHealthView]:
        """What this router has seen, by job."""
        with self._lock:
            return {name: job.health.view() for name, job in self._jobs.items() if job.settings.on}

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _submit(self, work: Callable[..., None], *arguments: Any) -> None:
        def guarded() -> None:
            try:
                work(*arguments)
            except Exception:
                LOG.exception("the watch of a run failed; the run itself goes on")
            finally:
                self._room.release()

        if not self._room.acquire(blocking=False):
            LOG.info("%d operations wait to be looked at: one is left out", WAITING_MAX)
            return
        try:
            self._threads.submit(guarded)
        except RuntimeError:
            self._room.release()
            # The router is stopping.
            LOG.info("the watch of runs has ended")

    def _read(
        self,
        command: "AnyRun",
        payloads: Sequence[Sequence[Body]],
        result: Mapping[str, Any],
        body: Sequence[Body],
        is_refused: bool,
    ) -> None:
        owned = self._find_spec(command.deployment, command.incarnation)
        if owned is None:
            # Nothing says any more whose job it is.
            return
        name = JobKey(owned.tenant, command.deployment.rpartition("/")[0])
        job = self._job(name)
        if not job.settings.on:
            return
        seen: Observation
        match command.kind:
            case OperationKind.SYNC_WEIGHTS:
                if isinstance(command, Sync) and command.params is not None:
                    kept = command.params.in_flight and not command.params.recompute_kv
                    job.keeps_cache[command.deployment] = kept
                return
            case OperationKind.GENERATE:
                if not body:
                    return
                arrays = decode_body(body[0] if len(body) == 1 else b"".join(body))[1]
                ends = self._ends(job, command, owned)
                kept = job.keeps_cache.get(command.deployment, False)
                params = command.params if isinstance(command, Generate) else None
                most = 0 if params is None else params.sampling.max_tokens
                seen = generated(arrays, result, ends, keeps_cache=kept, max_tokens=most)
            case OperationKind.FORWARD_BACKWARD:
                parts = {id(part): part for part in payloads}.values()
                batches = [
                    decode_body(part[0] if len(part) == 1 else b"".join(part))[1]
                    for part in parts
                    if part
                ]
                drawn = command.params if isinstance(command, ForwardBackward) else None
                step = None if drawn is None else drawn.sampled_step
                seen = trained(batches, result.get("metrics", {}), step)
            case _:
                seen = stepped(result, is_refused=is_refused)
        self._observe(name, of_critic(seen) if owned.spec.model.head == "value" else seen)

    def _ends(self, job: _Job, command: "AnyRun", owned: "OwnedSpec") -> tuple[int, ...]:
        known = job.ends.get(command.deployment)
        if known is None:
            known = job.ends[command.deployment] = _end_tokens(owned.spec.model)
        return known

    def _observe(self, name: JobKey, seen: Observation) -> None:
        job = self._job(name)
        if not job.settings.on:
            return
        with job.writing:
            with self._lock:
                job.health.observe(seen)
                view = job.health.view()
            codes = [warning["code"] for warning in view["warnings"]]
            now = time.monotonic()
            if codes != job.written_codes or now - job.written_at >= KEPT_S:
                job.written_at, job.written_codes = now, codes
                record = _Seen(at=time.time(), view=view)
                self._store.write(
                    f"{name.folder(FOLDER)}/{self._router}", msgspec.json.encode(record)
                )

    def _job(self, name: JobKey) -> _Job:
        with self._lock:
            known = self._jobs.get(name)
            if known is not None:
                self._jobs.move_to_end(name)
                return known
        text = self._store.read(f"{name.folder(FOLDER)}/{SETTINGS}")
        settings = _Settings() if text is None else msgspec.json.decode(text, type=_Settings)
        with self._lock:
            known = self._jobs.setdefault(name, _Job(settings))
            while len(self._jobs) > JOBS_MAX:
                self._jobs.popitem(last=False)
        return known

    def _set(self, name: JobKey, settings: _Settings) -> None:
        self._store.write(f"{name.folder(FOLDER)}/{SETTINGS}", msgspec.json.encode(settings))
        with self._lock:
            self._jobs[name] = _Job(settings)

    def _view(self, name: JobKey) -> RunHealthView:
        job = self._job(name)
        if not job.settings.on:
            return UNWATCHED
        now = time.monotonic()
        if not job.read_at or now - job.read_at >= KEPT_S:
            job.read_at = now
            folder = name.folder(FOLDER)
            # Before the first write, its own file is from before this router's restart.
            others = {SETTINGS, self._router} if job.written_at else {SETTINGS}
            keys = [each.key for each in self._store.find(folder)]
            texts = [self._store.read(key) for key in keys if key.rpartition("/")[2] not in others]
            found = [msgspec.json.decode(text, type=_Seen) for text in texts if text]
            job.others = [each.view for each in found if time.time() - each.at < OTHERS_S]
        with self._lock:
            own = job.health.view()
        return merge_views([own, *job.others])


def _end_tokens(model: "ModelSpec") -> tuple[int, ...]:
    """End tokens of a model; none if its files cannot be read here."""
    try:
        if model.path is None:
            return (EOS,)
        return end_tokens(text_files(model_folder(model.path, weights=False)))
    except (PlexRLError, OSError, UnicodeDecodeError) as error:
        LOG.info("end tokens of %s are unknown: %s", model.path, error)
        return ()
