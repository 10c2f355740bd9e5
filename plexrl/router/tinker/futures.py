"""Requests on their way to the scheduler, and the answers to polls of their results."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plexrl.client.futures.checkpoints import is_durable
from plexrl.errors import (
    ConflictError,
    NotFoundError,
    OverloadedError,
    PlexRLError,
    UnavailableError,
    UnknownOperationError,
)
from plexrl.router.services.error_responses import RETRIABLE
from plexrl.router.tinker.api import ClusterApi, Polled
from plexrl.router.tinker.messages.batches import sample_result, train_result
from plexrl.router.tinker.records import (
    FutureRecord,
    ModelRecord,
    RecordFile,
    RolloutRecord,
    WeightsRecord,
)
from plexrl.router.tinker.sequence import RequestSequence
from plexrl.wire.tensors import Arrays

LOG = logging.getLogger(__name__)

HOLD_S = 30.0
"""How long a poll is held. The SDK polls again at once, and gives a poll up after 45 s."""
ACCEPT_S = 10.0
"""How long the answer to a model's next request waits until the scheduler has the request."""
RETRY_S = 0.5
FORGOTTEN = frozenset({"sample", "forward", "forward_backward", "optim_step"})
"""Kinds whose answers are forgotten some time after they were sent."""
WAITING_BYTES_MAX = 1 << 30
"""Bound on all batches that the scheduler does not have yet."""
TENANT_WAITING_BYTES_MAX = WAITING_BYTES_MAX // 2
"""Bound on those of one tenant."""
KEPT_S = 600.0
"""How long an answer that was sent can be asked for again."""
HALTING = frozenset({"forward_backward", "optim_step", "load_weights", "create_model"})
"""Kinds whose failure halts the deployment until it is acknowledged."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureAnswer:
    """The answer to a poll: JSON, or protobuf."""

    json: Mapping[str, Any] | None = None
    protobuf: bytes = b""


class Futures:
    """Submits requests in order, and answers polls."""

    def __init__(self, api: ClusterApi, records: RecordFile) -> None:
        self._api = api
        self._records = records
        self._sequences: dict[str, RequestSequence[PendingRequest]] = {}
        self._waiting: dict[str, PendingRequest] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._loaded: set[str] = set()
        """Loads that have succeeded."""
        self._answered: dict[str, tuple[float, FutureRecord]] = {}
        """When each answer was sent, by the monotonic clock; oldest first."""

    async def close(self) -> None:
        """Stop submitting."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def forget_answered(self, now: float) -> None:
        """Drop what was answered `KEPT_S` seconds before `now`."""
        while self._answered:
            request, (at, record) = next(iter(self._answered.items()))
            if now - at < KEPT_S:
                return
            del self._answered[request]
            self._records.drop(record)

    def forget_model(self, model_id: str) -> None:
        """Drop what is known of a model whose session has ended, and what waits for it."""
        self._sequences.pop(model_id, None)
        if (task := self._tasks.pop(model_id, None)) is not None:
            task.cancel()
        for request in [each for each in self._waiting if each.rpartition(":")[0] == model_id]:
            self._waiting.pop(request).sent.set()

    def is_known(self, model: ModelRecord, seq: int) -> bool:
        """Whether a model's request of this number has arrived before."""
        return self._sequence(model).is_known(seq)

    def refuse(self, model: ModelRecord, seq: int, error: PlexRLError) -> None:
        """A request was refused: it has used its number, and polls of its future say why. Raises
        as `RequestSequence.add`."""
        if self._sequence(model).add(seq, None):
            self._records.put(
                FutureRecord(
                    id=f"{model.id}:{seq}",
                    session=model.session,
                    kind="refused",
                    error=error_answer(error),
                )
            )
            self._submit_next(model)

    async def train(self, model: ModelRecord, seq: int, pending: PendingRequest) -> str:
        """Accept a request of a model; return the name of its future. The same number again is the
        same request.

        Raises:
            OverloadedError: too much waits for earlier requests, or for the scheduler.
        """
        sequence = self._sequence(model)
        request = pending.future.id
        if seq != sequence.next_seq:
            self._check_waiting(pending)
        if not sequence.add(seq, pending):
            return request
        is_next = seq == sequence.next_seq
        self._waiting[request] = pending
        self._records.put(pending.future)
        self._submit_next(model)
        if is_next:
            try:
                async with asyncio.timeout(ACCEPT_S):
                    await pending.sent.wait()
            except TimeoutError:
                LOG.info("%s waits for the scheduler", request)
        return request

    def _check_waiting(self, pending: PendingRequest) -> None:
        waiting = self._waiting.values()
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

    async def sample(
        self,
        key: str,
        rollout: RolloutRecord,
        checkpoint: tuple[str, str] | None,
        future: FutureRecord,
        params: Mapping[str, Any],
        arrays: Arrays,
    ) -> None:
        """Submit a generation with a checkpoint's weights, or the base model's. Raises as
        `ClusterApi.call`."""
        if self._records.find(FutureRecord, future.id) is not None:
            return
        async with self._locks.setdefault(rollout.id, asyncio.Lock()):
            found = self._records.find(RolloutRecord, rollout.id) or rollout
            if found.loaded != checkpoint:
                assert checkpoint is not None, "a base model's deployment loads nothing"
                # The name follows from the request, so that a repetition loads nothing twice.
                load = f"{future.id}:load"
                await self._api.submit(
                    key,
                    rollout.id,
                    "load_checkpoint",
                    load,
                    {"job": checkpoint[0], "name": checkpoint[1]},
                )
                found.loaded, found.load = checkpoint, load
                self._records.put(found)
            if found.load not in self._loaded:
                future.after = found.load
            await self._api.submit(key, rollout.id, "generate", future.id, params, arrays)
            self._records.put(future)

    async def poll(self, key: str, future: FutureRecord) -> FutureAnswer:
        """Wait for a future's answer, `HOLD_S` seconds at most.

        Raises:
            NotFoundError: the request is lost, and must be sent again.
        """
        deadline = time.monotonic() + HOLD_S
        reason = "the request waits for an earlier one of this model"
        while (left := deadline - time.monotonic()) > 0:
            pending = self._waiting.get(future.id)
            future = self._records.find(FutureRecord, future.id) or future
            try:
                if pending is not None:
                    async with asyncio.timeout(left):
                        await pending.sent.wait()
                elif future.error is not None:
                    return FutureAnswer(json=future.error)
                elif not future.operation:
                    return FutureAnswer(json=future.result)
                else:
                    polled = await self._poll_operations(key, future, deadline)
                    if polled.view is not None:
                        return _try_again(future, polled.view)
                    if "weights_record" in future.result:
                        polled = await self._written(key, polled, deadline)
                    if polled.view is not None:
                        reason = "the weights are being written"
                        break
                    return await self._answer(key, future, polled)
            except UnknownOperationError as error:
                if self._refuse_lost(future):
                    continue
                raise NotFoundError(f"{future.id} is lost: send the request again") from error
            except TimeoutError:
                break
            except RETRIABLE as error:
                reason = error.message
                await asyncio.sleep(min(RETRY_S, left))
        return FutureAnswer(json=_paused(future.id, reason))

    async def _poll_operations(self, key: str, future: FutureRecord, deadline: float) -> Polled:
        if future.after and future.after not in self._loaded:
            try:
                polled = await self._api.poll(key, future.after, _left(deadline))
            except UnknownOperationError:
                # The scheduler has forgotten the load, which was long ago.
                polled = Polled()
            if polled.view is not None:
                return polled
            if polled.error is not None:
                await self._forget_load(key, future.after)
                return polled
            self._loaded.add(future.after)
        return await self._api.poll(key, future.operation, _left(deadline))

    async def _written(self, key: str, polled: Polled, deadline: float) -> Polled:
        """The same, once saved weights are on the disk; why they are not; or, at the deadline, an
        empty view."""
        saved = polled.result
        if saved is None or saved["durable"]:
            return polled
        pause_s = RETRY_S / 10
        while time.monotonic() < deadline:
            listed = await self._api.call(key, "GET", f"/v1/jobs/{saved['job']}/checkpoints")
            try:
                if is_durable(listed, saved["name"], saved["seq"]):
                    return polled
            except PlexRLError as error:
                return Polled(error=error)
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_S, 2 * pause_s)
        return Polled(view={})

    async def _forget_load(self, key: str, load: str) -> None:
        for each in self._records.all(RolloutRecord):
            if each.load == load:
                each.loaded, each.load = None, ""
                self._records.put(each)
        await self._acknowledge(key, load)

    async def _answer(self, key: str, future: FutureRecord, polled: Polled) -> FutureAnswer:
        if future.kind in FORGOTTEN:
            self._answered.setdefault(future.id, (time.monotonic(), future))
        if polled.error is not None:
            if future.kind in HALTING:
                # The client has its failure with this answer, and decides what comes next.
                await self._acknowledge(key, future.operation)
            return FutureAnswer(json=error_answer(polled.error))
        assert polled.result is not None
        assert polled.arrays is not None
        result = polled.result
        if result.get("error") is not None:
            return FutureAnswer(json={"error": result["error"]["message"], "category": "user"})
        kept = future.result
        try:
            match future.kind:
                case "sample":
                    return FutureAnswer(protobuf=sample_result(kept["last"], polled.arrays))
                case "forward" | "forward_backward":
                    return FutureAnswer(
                        protobuf=train_result(
                            kept["lengths"],
                            kept.get("weights"),
                            result.get("metrics", {}),
                            polled.arrays,
                        )
                    )
                case "optim_step":
                    named = {f"{name}:mean": value for name, value in result["metrics"].items()}
                    return FutureAnswer(json={"metrics": named})
        except PlexRLError as error:
            return FutureAnswer(json=error_answer(error))
        self._keep_weights(future)
        return FutureAnswer(json=kept["answer"])

    def _keep_weights(self, future: FutureRecord) -> None:
        """Note saved weights, once: a later poll does not bring deleted ones back."""
        now = self._records.find(FutureRecord, future.id)
        if now is None or "weights_record" not in now.result or now.result.get("is_kept"):
            return
        found = WeightsRecord(**now.result["weights_record"])
        if self._records.find(WeightsRecord, found.id) is None or now.result["overwrites"]:
            self._records.put(found)
        now.result["is_kept"] = True
        self._records.put(now)

    async def _acknowledge(self, key: str, operation: str) -> None:
        try:
            await self._api.call(key, "POST", f"/v1/operations/{operation}/acknowledge")
        except PlexRLError as error:
            LOG.warning("the failure of %s was not acknowledged: %s", operation, error)

    def _sequence(self, model: ModelRecord) -> RequestSequence[PendingRequest]:
        found = self._sequences.get(model.id)
        if found is None:
            found = self._sequences[model.id] = RequestSequence(model.next_seq)
            for each in self._records.all(FutureRecord, model.session):
                owner, _, number = each.id.rpartition(":")
                if owner == model.id and each.error is not None and number.isdecimal():
                    found.add(int(number), None)
        return found

    def _refuse_lost(self, future: FutureRecord) -> bool:
        """Refuse a training request that waited in a router that is gone, so that later ones do not
        wait for it. False: the future is none of these."""
        owner, _, number = future.id.rpartition(":")
        model = self._records.find(ModelRecord, owner)
        is_kept = self._records.find(FutureRecord, future.id) is not None
        if model is None or not is_kept or not number.isdecimal():
            return False
        if future.id in self._waiting or self._sequence(model).is_known(int(number)):
            return False
        error = UnavailableError(
            f"{future.id} was lost in a restart of the router, before the scheduler had it: send "
            "the batch again"
        )
        self.refuse(model, int(number), error)
        return True

    def _submit_next(self, model: ModelRecord) -> None:
        running = self._tasks.get(model.id)
        if running is None or running.done():
            task = asyncio.create_task(self._submit_all(model.id, self._sequence(model)))
            self._tasks[model.id] = task

    async def _submit_all(self, model_id: str, sequence: RequestSequence[PendingRequest]) -> None:
        while (pending := sequence.take()) is not None:
            try:
                await self._submit(model_id, pending)
                self._note_next(model_id, sequence)
            except Exception:  # The next requests of the model must not wait for ever.
                LOG.exception("%s was not noted", pending.future.id)
            self._waiting.pop(pending.future.id, None)
            pending.sent.set()
        self._note_next(model_id, sequence)
        if self._tasks.get(model_id) is asyncio.current_task():
            del self._tasks[model_id]

    def _note_next(self, model_id: str, sequence: RequestSequence[PendingRequest]) -> None:
        model = self._records.find(ModelRecord, model_id)
        if model is not None and model.next_seq != sequence.next_seq:
            model.next_seq = sequence.next_seq
            self._records.put(model)

    async def _submit(self, model_id: str, pending: PendingRequest) -> None:
        model = self._records.find(ModelRecord, model_id)
        assert model is not None
        while True:
            try:
                await self._api.submit(
                    pending.key,
                    model.deployment,
                    pending.kind,
                    pending.future.operation,
                    pending.params,
                    pending.arrays,
                )
                return
            except RETRIABLE:
                await asyncio.sleep(RETRY_S)
            except Exception as error:
                if not isinstance(error, PlexRLError):
                    LOG.exception("%s was not submitted", pending.future.id)
                    error = PlexRLError("the router could not submit the request: see its log")
                pending.future.error = error_answer(error)
                self._records.put(pending.future)
                return


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def request_digest(text: str) -> str:
    """A short name that follows from a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def error_answer(error: PlexRLError) -> dict[str, Any]:
    """The answer to a poll whose request has failed."""
    is_users = error.status < 500 and not isinstance(error, ConflictError)
    return {
        "error": f"{error.message} ({error.code})",
        "category": "user" if is_users else "server",
    }


def _try_again(future: FutureRecord, view: Mapping[str, Any]) -> FutureAnswer:
    """Why an operation is unfinished: what it waits for, who holds that, and until when."""
    told = view.get("explanation") or {}
    reason = str(told.get("reason") or "the request waits")
    if told.get("holder") not in (None, "", view["deployment"]):
        reason += f"; held by {told['holder']}"
    if told.get("eta_s") is not None:
        verb = "ends" if view["state"] == "running" else "starts"
        reason += f"; {verb} in about {told['eta_s']:.0f} s"
        if told.get("eta_low_s") is not None and told.get("eta_high_s") is not None:
            reason += f" ({told['eta_low_s']:.0f} to {told['eta_high_s']:.0f} s)"
    paused = _paused(future.id, reason)
    state = "active" if view["state"] == "running" else paused["queue_state"]
    return FutureAnswer(json={**paused, "queue_state": state})


def _paused(request: str, reason: str) -> dict[str, Any]:
    return {
        "type": "try_again",
        "request_id": request,
        "queue_state": "paused_capacity",
        "queue_state_reason": reason,
    }
