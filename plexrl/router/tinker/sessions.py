"""Sessions, models, samplers and saved weights of Tinker clients, made of PlexRL's jobs."""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from plexrl.errors import (
    CheckpointNotFoundError,
    ConflictError,
    InvalidRequestError,
    JobEndedError,
    NotFoundError,
    PlexRLError,
    UnknownJobError,
)
from plexrl.model.lora import LoraSpec, linear_sizes
from plexrl.model.spec import ModelSpec
from plexrl.router.services.authentication import Caller
from plexrl.router.services.services import RouterServices
from plexrl.router.tinker.api import ClusterApi
from plexrl.router.tinker.completions import Completions
from plexrl.router.tinker.futures import Futures
from plexrl.router.tinker.messages.requests import CreateModel, CreateSession, LoraConfig
from plexrl.router.tinker.records import (
    FutureRecord,
    HeardRecord,
    ModelRecord,
    RecordFile,
    RecordT,
    RolloutRecord,
    SamplerRecord,
    SessionRecord,
    WaitingRecord,
    WeightsRecord,
    request_digest,
)

LOG = logging.getLogger(__name__)

SILENCE_S = 60.0
"""Silence after which a session's job is detached. The SDK sends a heartbeat every 10 s."""
REATTACH_S = 60.0
"""Time after that until the job is cancelled, and its GPUs are released."""
GONE_S = SILENCE_S + REATTACH_S + 30.0
"""Silence after which the router forgets a session, whose job has ended by then."""
FINISHED_KEPT_S = 86_400.0
"""How long a session that has ended is listed, and its trace can be exported."""
SWEEP_S = 60.0
"""Time between two searches for weights whose time to live has passed."""
LORA_ALPHA = 32.0
EPHEMERAL = "{model}.sampler.step-"
EPHEMERAL_KEPT = 8
"""Weights without a name that are kept for each model; older ones are deleted."""
CLIENT_KINDS = (FutureRecord, HeardRecord, SamplerRecord, RolloutRecord, WaitingRecord)
"""Records that a session has until it ends."""
BASES = "base models"
"""Lock of the deployments of base models."""
OPTIONS = {"train": "plexrl_train", "rollout": "plexrl_rollout"}
"""Keys of a client's `user_metadata` with options of its deployments, as JSON."""


class Sessions:
    """All Tinker clients of the routers that share a file of records."""

    def __init__(self, services: RouterServices, api: ClusterApi, records: RecordFile) -> None:
        self.services = services
        self.api = api
        self.records = records
        self.futures = Futures(api, records)
        self.completions = Completions(api, records)
        self._heard: dict[str, tuple[float, float]] = {}
        """The last sign of life of each session that this router knows, and when it learnt of it by
        the monotonic clock: another router may have heard it, and the clock of records may jump."""

    async def run(self) -> None:
        """Forget clients that are gone, and delete weights whose time to live has passed, until
        cancelled."""
        while True:
            try:
                await self.sweep(time.monotonic(), time.time())
            except Exception:  # What failed once may succeed the next time; nobody else sweeps.
                LOG.exception("clients that are gone were not all forgotten")
            await asyncio.sleep(SWEEP_S)

    async def sweep(self, now: float, time_now: float) -> None:
        """One round of `run`. `now` is of the monotonic clock, `time_now` is in seconds since the
        epoch."""
        self.futures.forget_answered(now)
        self.futures.queue.drop_orphans(time_now - SWEEP_S)
        for session in self.records.all(SessionRecord):
            if not session.is_finished and now - self._heard_at(session, now) > GONE_S:
                LOG.info("the client of %s is gone", session.id)
                await self._end(session)
        for each in self.records.all(WeightsRecord):
            if each.expires_at is not None and each.expires_at < time_now:
                try:
                    await self._delete(each)
                except PlexRLError as error:
                    LOG.warning("%s was not deleted: %s", each.id, error)
        left_over = self.records.sessions_of(CLIENT_KINDS)
        for session in self.records.all(SessionRecord):
            if not session.is_finished or session.finished_at > time_now - SWEEP_S:
                continue
            if session.id in left_over:
                # Requests were on their way when it ended, or the router that ended it was killed.
                await self._clear(session)
            is_old = session.finished_at < time_now - FINISHED_KEPT_S
            if is_old and not self.records.all(WeightsRecord, session.id):
                self.records.drop_all(ModelRecord, session.id)
                self.records.drop(session)

    def _heard_at(self, session: SessionRecord, now: float) -> float:
        """When this router learnt of the last sign of life of a session."""
        heard = self.records.find(HeardRecord, session.id) or session
        known = self._heard.get(session.id)
        if known is None or known[0] != heard.made_at:
            known = self._heard[session.id] = (heard.made_at, now)
        return known[1]

    def find(self, kind: type[RecordT], id: str, caller: Caller) -> RecordT:
        """A record that the caller may see. Raises `NotFoundError`."""
        found = self.records.find(kind, id)
        session = None if found is None else self.records.find(SessionRecord, found.session)
        if found is None or session is None or caller.scope not in (None, session.tenant):
            name = kind.__name__.removesuffix("Record").lower()
            raise NotFoundError(f"there is no {name} {id!r}: it has ended, or was never made")
        return found

    def owned(self, kind: type[RecordT], caller: Caller) -> list[RecordT]:
        """The caller's records of a class, newest first."""
        mine = {
            each.id
            for each in self.records.all(SessionRecord)
            if caller.scope in (None, each.tenant)
        }
        return [each for each in reversed(self.records.all(kind)) if each.session in mine]

    async def begin(self, key: str, caller: Caller, asked: CreateSession, retry: str) -> str:
        """Make a session and its job; the same `retry` again is the same session."""
        name = request_digest(f"{caller.tenant} {retry}") if retry else secrets.token_hex(8)
        session = f"tinker-{name}"
        metadata = dict(asked.user_metadata or {})
        for option in OPTIONS.values():
            _options(metadata, option)
        await self._make_job(key, session, asked.display_name or "tinker client")
        if self.records.find(SessionRecord, session) is None:
            self.records.put(
                SessionRecord(
                    id=session,
                    session=session,
                    tenant=caller.tenant,
                    name=asked.display_name or "",
                    metadata=metadata,
                )
            )
        return session

    async def beat(self, key: str, session: SessionRecord) -> None:
        """A session lives. Raises `JobEndedError` if it has ended."""
        if session.is_finished:
            raise JobEndedError(f"session {session.id} has finished")
        self.records.put(HeardRecord(id=session.id, session=session.id))
        jobs = {session.id, *self._base_jobs(session.id)}
        replies = await asyncio.gather(
            *(self.api.call(key, "POST", f"/v1/jobs/{job}/heartbeat") for job in sorted(jobs)),
            return_exceptions=True,
        )
        own = replies[sorted(jobs).index(session.id)]
        if isinstance(own, ConflictError | UnknownJobError):
            await self._end(session)
            raise JobEndedError(f"session {session.id} has ended: {own.message}") from own
        if isinstance(own, BaseException):
            raise own

    async def finish(self, key: str, session: SessionRecord, outcome: str, detail: str) -> None:
        """End a session and its job. The first reason wins."""
        if session.is_finished:
            return
        body = {"outcome": outcome, "reason": detail}
        await self.api.call(key, "POST", f"/v1/jobs/{session.id}/finish", body)
        async with self.records.exclusive(BASES):
            bases = self._base_jobs(session.id)
            await self._end(session)
            for job in bases - self._used_bases():
                await self.api.call(key, "POST", f"/v1/jobs/{job}/finish", {"outcome": "completed"})

    async def create_model(self, key: str, caller: Caller, asked: CreateModel) -> ModelRecord:
        """Make a model of the name that follows from the request."""
        folder = await self.folder_of(asked.base_model, caller)
        name = f"{asked.session_id}:train:{asked.model_seq_id}"
        lora = await asyncio.to_thread(self._lora, folder, asked.lora_config, name)
        return await self.deploy_model(
            key,
            self.find(SessionRecord, asked.session_id, caller),
            asked.model_seq_id,
            ModelRecord(
                id=name,
                session=asked.session_id,
                deployment=f"{asked.session_id}/train-{asked.model_seq_id}",
                base_model=asked.base_model,
                folder=folder,
                lora=lora,
                trains_attention=asked.lora_config.train_attn,
                trains_mlp=asked.lora_config.train_mlp,
                metadata=dict(asked.user_metadata or {}),
            ),
        )

    async def deploy_model(
        self, key: str, session: SessionRecord, number: int, model: ModelRecord
    ) -> ModelRecord:
        """Make a model's train deployment, unless it exists."""
        if (known := self.records.find(ModelRecord, model.id)) is not None:
            return known
        if session.is_finished:
            raise JobEndedError(f"session {session.id} has finished: begin another one")
        body = {
            **_options(session.metadata, OPTIONS["train"]),
            **_options(model.metadata, OPTIONS["train"]),
            "name": f"train-{number}",
            "kind": "train",
            "model": {"path": model.folder},
            "lora": model.lora,
        }
        await self.api.call(key, "POST", f"/v1/jobs/{session.id}/deployments", body)
        self.records.put(model)
        return model

    async def create_sampler(
        self,
        key: str,
        caller: Caller,
        sampler: str,
        session: SessionRecord,
        base_model: str,
        weights: WeightsRecord | None,
    ) -> SamplerRecord:
        """A sampler of a base model, or of saved weights."""
        if (known := self.records.find(SamplerRecord, sampler)) is not None:
            return known
        if weights is not None:
            model = self.find(ModelRecord, weights.model, caller)
            checkpoint = (weights.session, weights.checkpoint)
            return await self.sampler_of(key, session, sampler, model, checkpoint, weights.id)
        folder = await self.folder_of(base_model, caller)
        async with self.records.exclusive(BASES):
            found = SamplerRecord(
                id=sampler,
                session=session.id,
                deployment=await self._base_deployment(key, session, folder),
                base_model=base_model,
            )
            self.records.put(found)
        return found

    async def sampler_of(
        self,
        key: str,
        session: SessionRecord,
        sampler: str,
        model: ModelRecord,
        checkpoint: tuple[str, str],
        path: str | None,
    ) -> SamplerRecord:
        """A sampler of a model's checkpoint. All of a session with the same base model and adapters
        share a deployment, which loads the weights of the request that comes next."""
        lora = without_seed(model.lora)
        kind = request_digest(f"{model.folder} {lora}")[:8]
        deployment = f"{session.id}/sampler-{kind}"
        await self._deploy_rollout(key, session, deployment, model.folder, lora)
        found = SamplerRecord(
            id=sampler,
            session=session.id,
            deployment=deployment,
            base_model=model.base_model,
            path=path,
            checkpoint=checkpoint,
        )
        self.records.put(found)
        return found

    def weights(self, path: str, caller: Caller) -> WeightsRecord:
        """Saved weights that the caller may read. Raises `NotFoundError`."""
        found = self.find(WeightsRecord, path, caller)
        if found.expires_at is not None and found.expires_at < time.time():
            raise NotFoundError(f"the time to live of {path} has passed: it is deleted")
        return found

    async def delete(self, key: str, found: WeightsRecord) -> None:
        """Delete saved weights. Raises `CheckpointNotFoundError`."""
        # The route checks the rights; a job that has ended keeps its checkpoints.
        await self.api.call(
            key, "DELETE", f"/v1/jobs/{found.session}/checkpoints/{found.checkpoint}"
        )
        self.records.drop(found)

    async def folder_of(self, name: str, caller: Caller) -> str:
        """The directory of a base model: an absolute path, or a name below one of the directories
        from which the caller may load models.

        Raises:
            NotFoundError: there is none.
        """
        if name.startswith("/"):
            await self.services.model_access.check(name, caller)
            return name
        roots = await self.roots(caller)
        for root in roots:
            folder = Path(root, name)
            if ".." not in folder.parts and await asyncio.to_thread(
                (folder / "config.json").is_file
            ):
                await self.services.model_access.check(str(folder), caller)
                return str(folder)
        below = " or ".join(roots) or "any directory, since the cluster has no model_roots"
        raise NotFoundError(
            f"there is no base model {name!r} below {below}: give the name of a Hugging Face "
            "directory there, or ask an operator to add one (plexrl tenants set --model-roots)"
        )

    async def roots(self, caller: Caller) -> tuple[str, ...]:
        """The directories below which the caller's base models are."""
        return await self.services.model_access.roots(caller)

    def _lora(self, folder: str, asked: LoraConfig, model: str) -> dict[str, Any] | None:
        if asked.rank == 0:
            return None
        if not (asked.train_attn or asked.train_mlp):
            raise InvalidRequestError(
                "train_unembed=True alone trains nothing, because PlexRL has no adapters of the "
                "unembedding: set train_attn or train_mlp",
                parameter="train_unembed",
            )
        layers = linear_sizes(ModelSpec(path=folder))
        attention = {
            name for name in layers if name in ("qkv_proj", "o_proj") or name[1:] == "_proj"
        }
        targets = [
            name for name in layers if (asked.train_attn if name in attention else asked.train_mlp)
        ]
        # A repetition of the request at another router draws the same values.
        drawn = int(request_digest(model), 16) >> 1
        seed = drawn if asked.seed is None else asked.seed
        lora = LoraSpec(rank=asked.rank, alpha=LORA_ALPHA, targets=tuple(targets), seed=seed)
        found: dict[str, Any] = msgspec.to_builtins(lora)
        return found

    async def _make_job(self, key: str, job: str, name: str) -> None:
        body = {
            "job": job,
            "name": name[:200],
            "controller_timeout_s": SILENCE_S,
            "reattach_timeout_s": REATTACH_S,
        }
        await self.api.call(key, "POST", "/v1/jobs", body)

    async def _deploy_rollout(
        self,
        key: str,
        session: SessionRecord,
        deployment: str,
        folder: str,
        lora: Mapping[str, Any] | None,
    ) -> None:
        if self.records.find(RolloutRecord, deployment) is not None:
            return
        job, _, name = deployment.partition("/")
        body = {
            **_options(session.metadata, OPTIONS["rollout"]),
            "name": name,
            "kind": "rollout",
            "model": {"path": folder},
            "lora": lora,
        }
        await self.api.call(key, "POST", f"/v1/jobs/{job}/deployments", body)
        self.records.put(RolloutRecord(id=deployment, session=session.id))

    async def _base_deployment(self, key: str, session: SessionRecord, folder: str) -> str:
        """The deployment of a base model that all sessions of a tenant share, in a job of its own.
        The caller holds `BASES` until the sampler is noted, so that nobody ends the job."""
        options = _options(session.metadata, OPTIONS["rollout"])
        kind = request_digest(f"{session.tenant} {folder} {options}")
        for sampler in self._live_samplers():
            job = sampler.deployment.partition("/")[0]
            if job.startswith(f"tinker-base-{kind}"):
                try:
                    await self.api.call(key, "POST", f"/v1/jobs/{job}/heartbeat")
                    return sampler.deployment
                except (ConflictError, UnknownJobError) as error:
                    LOG.info("%s has ended: %s", job, error)
        job = f"tinker-base-{kind}-{secrets.token_hex(4)}"
        await self._make_job(key, job, f"base model {Path(folder).name}")
        await self._deploy_rollout(key, session, f"{job}/base", folder, None)
        return f"{job}/base"

    def _live_samplers(self) -> Iterable[SamplerRecord]:
        live = {each.id for each in self.records.all(SessionRecord) if not each.is_finished}
        return [each for each in self.records.all(SamplerRecord) if each.session in live]

    def _used_bases(self) -> set[str]:
        return _jobs_of(self._live_samplers())

    def _base_jobs(self, session: str) -> set[str]:
        return _jobs_of(self.records.all(SamplerRecord, session))

    async def _end(self, session: SessionRecord) -> None:
        now = self.records.find(SessionRecord, session.id)
        if now is None or now.is_finished:
            return
        session.is_finished, session.finished_at = True, time.time()
        self.records.update(session)
        await self._clear(session)

    async def _clear(self, session: SessionRecord) -> None:
        """Forget what only a live session needs, and delete its weights without a name."""
        self._heard.pop(session.id, None)
        saves = []
        for future in self.records.all(FutureRecord, session.id):
            if "weights_record" in future.result:
                await self._keep_unpolled(future)
            elif future.kind == "save_for_sampler":
                saves.append(future.id)
        models = self.records.all(ModelRecord, session.id)
        for model in models:
            self.futures.queue.forget_model(model.id)
        for model in models:
            for save in saves:
                if save.startswith(f"{model.id}:"):
                    await self._delete_ephemeral(model, save.rpartition(":")[2])
        for kind in CLIENT_KINDS:
            self.records.drop_all(kind, session.id)

    async def _keep_unpolled(self, future: FutureRecord) -> None:
        """Note saved weights whose answer the client has not waited for."""
        found = WeightsRecord(**future.result["weights_record"])
        if future.result.get("is_kept") or self.records.find(WeightsRecord, found.id) is not None:
            return
        try:
            await self.services.checkpoint_quota.files(found.session, found.checkpoint)
        except PlexRLError as error:
            LOG.info("%s is not kept: %s", found.id, error)
            return
        self.records.put(found)

    async def _delete_ephemeral(self, model: ModelRecord, number: str) -> None:
        name = f"{ephemeral_prefix(model)}{number}"
        try:
            await self.services.checkpoint_quota.delete(model.session, name)
        except CheckpointNotFoundError:
            LOG.debug("%s was deleted before", name)
        except PlexRLError as error:
            LOG.warning("%s of %s was not deleted: %s", name, model.id, error)

    async def _delete(self, found: WeightsRecord) -> None:
        try:
            await self.services.checkpoint_quota.delete(found.session, found.checkpoint)
        except CheckpointNotFoundError as error:
            LOG.info("%s", error)
        self.records.drop(found)


def ephemeral_prefix(model: ModelRecord) -> str:
    """How the names of a model's checkpoints without a name of the client's begin."""
    return EPHEMERAL.format(model=model.id.rpartition(":")[2])


def without_seed(lora: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Adapters as a checkpoint has them, whatever the values with which they began."""
    return None if lora is None else {**lora, "seed": 0}


def _jobs_of(samplers: Iterable[SamplerRecord]) -> set[str]:
    jobs = {
        sampler.deployment.partition("/")[0] for sampler in samplers if sampler.checkpoint is None
    }
    return jobs


def _options(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Options of a deployment that a client gives as a JSON object in its metadata.

    Raises:
        InvalidRequestError: it is none.
    """
    text = metadata.get(name)
    if text is None:
        return {}
    try:
        return msgspec.json.decode(str(text), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidRequestError(
            f"user_metadata[{name!r}] is no JSON object: {error}; give options of a deployment, as "
            '{"workers": 2}'
        ) from error
