"""Training requests of models, on their way to the scheduler.

The SDK numbers a model's requests from 1, sends the first part of a large batch last, and sends a
request again whose answer it has lost. Requests leave in the order of their numbers, each once. A
refused request has used its number.

Any router may receive any request. A request that waits is stored, and moved on by the router that
holds the model's lock. A router asks for the lock after it has stored a request, and at each poll
of one that waits, so that none is left behind by a router that is killed.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plexrl.errors import (
    ConflictError,
    InvalidRequestError,
    OverloadedError,
    PlexRLError,
    UnavailableError,
)
from plexrl.router.services.error_responses import RETRIABLE
from plexrl.router.tinker.api import ClusterApi
from plexrl.router.tinker.records import (
    FutureRecord,
    ModelRecord,
    RecordFile,
    SessionRecord,
    WaitingRecord,
    request_digest,
)
from plexrl.wire.tensors import Arrays, decode_body, encode_body

LOG = logging.getLogger(__name__)

ACCEPT_S = 10.0
"""How long the answer to a model's next request waits until the scheduler has the request."""
RETRY_S = 0.5
LOST_S = 60.0
"""Age of a request that no router has stored at which it counts as lost."""
WAITING_MAX = 1024
"""Requests of one model that may wait for an earlier one."""
WAITING_BYTES_MAX = 1 << 30
"""Bound on all batches that the scheduler does not have yet."""
TENANT_WAITING_BYTES_MAX = WAITING_BYTES_MAX // 2
"""Bound on those of one tenant."""
FOLDER = "tinker-batches"
"""Where batches of requests that wait are stored, beside the file of records."""


@dataclass(slots=True, kw_only=True)
class PendingRequest:
    """A training request that the scheduler does not have yet."""

    key: str
    """The client's `Authorization` header."""
    tenant: str
    kind: str
    """Kind of PlexRL's operation."""
    params: Mapping[str, Any]
    arrays: Arrays | None = None
    future: FutureRecord
    sent: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def nbytes(self) -> int:
        """Size of the batch."""
        return sum(array.nbytes for array in (self.arrays or {}).values())


class TrainingQueue:
    """The training requests of all models, for all routers that share a file of records."""

    def __init__(self, api: ClusterApi, records: RecordFile) -> None:
        self._api = api
        self._records = records
        self._folder = records.folder / FOLDER
        self._held: dict[str, PendingRequest] = {}
        """Next requests of their models, which this router is submitting."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Stop submitting."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def is_known(self, model_id: str, seq: int) -> bool:
        """Whether a model's request of this number has arrived before, and is not lost."""
        request = f"{model_id}:{seq}"
        if seq < self._next_seq(model_id) or request in self._held:
            return True
        future = self._records.find(FutureRecord, request)
        is_refused = future is not None and future.error is not None
        return is_refused or self._records.find(WaitingRecord, request) is not None

    def waits(self, future: FutureRecord) -> bool:
        """Whether the scheduler does not have a model's request yet."""
        model_id, _, number = future.id.rpartition(":")
        if future.kind == "sample" or not number.isdecimal():
            return False
        model = self._records.find(ModelRecord, model_id)
        return model is not None and int(number) >= model.next_seq

    def refuse(self, key: str, model: ModelRecord, seq: int, error: PlexRLError) -> None:
        """A request was refused: it has used its number, and polls of its future say why.

        Raises:
            InvalidRequestError: the number is below 1.
        """
        _check_number(seq)
        answer = error_answer(error)
        name = f"{model.id}:{seq}"
        self._records.add(
            FutureRecord(id=name, session=model.session, kind="refused", error=answer)
        )
        self.advance(key, model.id)

    async def accept(self, model: ModelRecord, seq: int, pending: PendingRequest) -> None:
        """Accept a request of a model. The same number again is the same request.

        Raises:
            InvalidRequestError: the number is below 1.
            OverloadedError: too much waits for earlier requests, or for the scheduler.
        """
        _check_number(seq)
        if self.is_known(model.id, seq):
            self.advance(pending.key, model.id)
            return
        is_next = seq == self._next_seq(model.id)
        if not is_next:
            self._check_waiting(model, pending)
        self._records.add(pending.future)
        if is_next:
            await self._submit_at_once(model, seq, pending)
        else:
            await self._store(model, seq, pending)
            self.advance(pending.key, model.id)

    def advance(self, key: str, model_id: str) -> None:
        """Submit the requests of a model whose turn it is, with a client's key."""
        running = self._tasks.get(model_id)
        if running is None or running.done():
            self._tasks[model_id] = asyncio.create_task(self._advance(key, model_id))

    def forget_model(self, model_id: str) -> None:
        """Drop what waits of a model whose session has ended."""
        if (task := self._tasks.pop(model_id, None)) is not None:
            task.cancel()
        for request in [each for each in self._held if each.rpartition(":")[0] == model_id]:
            self._held.pop(request).sent.set()
        for waiting in self._records.all(WaitingRecord):
            if waiting.model == model_id:
                self._drop(waiting)

    def drop_orphans(self, older_than: float) -> None:
        """Delete batches of before `older_than`, in seconds since the epoch, that nothing waits
        for: a router was killed between the two."""
        kept = {self._file(each.id) for each in self._records.all(WaitingRecord)}
        for file in set(self._folder.glob("*")) - kept:
            with suppress(FileNotFoundError):
                if file.stat().st_mtime < older_than:
                    file.unlink()

    def _next_seq(self, model_id: str) -> int:
        model = self._records.find(ModelRecord, model_id)
        return 1 if model is None else model.next_seq

    def _check_waiting(self, model: ModelRecord, pending: PendingRequest) -> None:
        waiting = self._records.all(WaitingRecord)
        if sum(each.model == model.id for each in waiting) >= WAITING_MAX:
            raise OverloadedError(
                f"{WAITING_MAX} requests of this model wait for request {model.next_seq}",
                retry_after_s=1.0,
            )
        own = sum(each.nbytes for each in waiting if each.tenant == pending.tenant)
        for count, most in (
            (own, TENANT_WAITING_BYTES_MAX),
            (sum(each.nbytes for each in waiting), WAITING_BYTES_MAX),
        ):
            if count + pending.nbytes > most:
                raise OverloadedError(
                    f"{count} bytes of batches wait for the scheduler, or for earlier requests",
                    retry_after_s=1.0,
                )

    async def _submit_at_once(self, model: ModelRecord, seq: int, pending: PendingRequest) -> None:
        """Submit a request that need not wait: its batch is stored only if the scheduler does not
        take it soon."""
        self._held[pending.future.id] = pending
        self.advance(pending.key, model.id)
        try:
            async with asyncio.timeout(ACCEPT_S):
                await pending.sent.wait()
        except TimeoutError:
            LOG.info("%s waits for the scheduler", pending.future.id)
            await self._store(model, seq, pending)

    async def _store(self, model: ModelRecord, seq: int, pending: PendingRequest) -> None:
        """Store a request, so that any router can submit it."""
        waiting = WaitingRecord(
            id=pending.future.id,
            session=model.session,
            model=model.id,
            tenant=pending.tenant,
            kind=pending.kind,
            nbytes=pending.nbytes,
        )
        await asyncio.to_thread(self._write, waiting.id, pending)
        # A file that nothing waits for is deleted later.
        if seq >= self._next_seq(model.id) and not self._is_over(model):
            self._records.put(waiting)

    def _write(self, request: str, pending: PendingRequest) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        file = self._file(request)
        part = file.with_suffix(f".{time.monotonic_ns()}")
        part.write_bytes(encode_body(pending.params, pending.arrays))
        part.replace(file)

    def _file(self, request: str) -> Path:
        return self._folder / request_digest(request)

    async def _advance(self, key: str, model_id: str) -> None:
        async with self._records.exclusive(model_id):
            while (model := self._records.find(ModelRecord, model_id)) is not None:
                request = f"{model_id}:{model.next_seq}"
                future = self._records.find(FutureRecord, request)
                if future is None:
                    break
                if future.error is None and not await self._submit(key, model, future):
                    break
                self._pass(model, request)
            self._release(model_id)

    async def _submit(self, key: str, model: ModelRecord, future: FutureRecord) -> bool:
        """Submit a model's next request. False: it has not arrived, or the session has ended."""
        try:
            pending = self._held.get(future.id) or await self._load(key, future)
            if pending is None:
                return False
            return await self._send(model, pending)
        except Exception as error:
            if not isinstance(error, PlexRLError):
                LOG.exception("%s was not submitted", future.id)
                error = PlexRLError("the router could not submit the request: see its log")
            future.error = error_answer(error)
            self._records.update(future)
            return True

    async def _load(self, key: str, future: FutureRecord) -> PendingRequest | None:
        """A request that was stored; None: a router may still store it.

        Raises:
            UnavailableError: it is lost.
        """
        waiting = self._records.find(WaitingRecord, future.id)
        if waiting is None and time.time() - future.made_at < LOST_S:
            return None
        try:
            if waiting is None:
                raise FileNotFoundError
            params, arrays = decode_body(await asyncio.to_thread(self._file(future.id).read_bytes))
        except (OSError, PlexRLError, ValueError) as error:
            raise UnavailableError(
                f"{future.id} was lost with the router that had it, before the scheduler did: send "
                "the batch again"
            ) from error
        return PendingRequest(
            key=key,
            tenant=waiting.tenant,
            kind=waiting.kind,
            params=params,
            arrays=arrays,
            future=future,
        )

    async def _send(self, model: ModelRecord, pending: PendingRequest) -> bool:
        operation = pending.future.operation
        while True:
            try:
                await self._api.submit(
                    pending.key,
                    model.deployment,
                    pending.kind,
                    operation,
                    pending.params,
                    pending.arrays,
                )
                return True
            except RETRIABLE:
                if self._is_over(model):
                    if self._held.pop(operation, None) is not None:
                        pending.sent.set()
                    return False
                await asyncio.sleep(RETRY_S)

    def _pass(self, model: ModelRecord, request: str) -> None:
        """The next request of the model is another one."""
        model.next_seq += 1
        self._records.update(model)
        if (waiting := self._records.find(WaitingRecord, request)) is not None:
            self._drop(waiting)
        if (held := self._held.pop(request, None)) is not None:
            held.sent.set()

    def _release(self, model_id: str) -> None:
        """Let go of requests that another router has submitted, or whose session it has ended."""
        model = self._records.find(ModelRecord, model_id)
        is_over = model is None or self._is_over(model)
        for request in list(self._held):
            owner, _, number = request.rpartition(":")
            if owner == model_id and (is_over or int(number) < self._next_seq(model_id)):
                self._held.pop(request).sent.set()

    def _is_over(self, model: ModelRecord) -> bool:
        """Whether the model's session has ended."""
        session = self._records.find(SessionRecord, model.session)
        return session is not None and session.is_finished

    def _drop(self, waiting: WaitingRecord) -> None:
        self._records.drop(waiting)
        self._file(waiting.id).unlink(missing_ok=True)


def _check_number(seq: int) -> None:
    if seq < 1:
        raise InvalidRequestError(f"seq_id is {seq}: number a model's requests from 1")


def error_answer(error: PlexRLError) -> dict[str, Any]:
    """The answer to a poll whose request has failed."""
    is_users = error.status < 500 and not isinstance(error, ConflictError)
    return {
        "error": f"{error.message} ({error.code})",
        "category": "user" if is_users else "server",
    }
