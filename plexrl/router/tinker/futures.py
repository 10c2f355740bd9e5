"""Samples on their way to the scheduler, and the answers to polls of all requests."""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from plexrl.client.futures.checkpoints import is_durable
from plexrl.errors import NotFoundError, PlexRLError, UnknownOperationError
from plexrl.router.services.error_responses import RETRIABLE
from plexrl.router.tinker.api import ClusterApi, Polled
from plexrl.router.tinker.messages.batches import sample_result, train_result
from plexrl.router.tinker.records import FutureRecord, RecordFile, RolloutRecord, WeightsRecord
from plexrl.router.tinker.training_queue import TrainingQueue, error_answer
from plexrl.wire.tensors import Arrays

LOG = logging.getLogger(__name__)

HOLD_S = 30.0
"""How long a poll is held. The SDK polls again at once, and gives a poll up after 45 s."""
RETRY_S = 0.5
PAUSES_S = (0.02, 0.5)
"""Shortest and longest pause between two looks at a request that waits for an earlier one, which
another router may submit."""
FORGOTTEN = frozenset({"sample", "forward", "forward_backward", "optim_step"})
"""Kinds whose answers are forgotten some time after they were sent."""
KEPT_S = 600.0
"""How long an answer that was sent can be asked for again."""
HALTING = frozenset({"forward_backward", "optim_step", "load_weights", "create_model"})
"""Kinds whose failure halts the deployment until it is acknowledged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureAnswer:
    """The answer to a poll: JSON, or protobuf."""

    json: Mapping[str, Any] | None = None
    protobuf: bytes = b""


class Futures:
    """Submits samples, and answers polls. Training requests are those of `queue`."""

    def __init__(self, api: ClusterApi, records: RecordFile) -> None:
        self._api = api
        self._records = records
        self.queue = TrainingQueue(api, records)
        self._loaded: set[str] = set()
        """Loads that have succeeded."""
        self._answered: dict[str, tuple[float, FutureRecord]] = {}
        """When each answer was sent, by the monotonic clock; oldest first."""

    async def close(self) -> None:
        """Stop submitting."""
        await self.queue.close()

    def forget_answered(self, now: float) -> None:
        """Drop what was answered `KEPT_S` seconds before `now`."""
        while self._answered:
            request, (at, record) = next(iter(self._answered.items()))
            if now - at < KEPT_S:
                return
            del self._answered[request]
            self._records.drop(record)

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
        # A base model's deployment loads nothing, so that its samples need no order.
        order = nullcontext() if checkpoint is None else self._records.exclusive(rollout.id)
        async with order:
            found = self._records.find(RolloutRecord, rollout.id) or rollout
            if found.loaded != checkpoint:
                assert checkpoint is not None, "a base model's deployment loads nothing"
                # A repetition of the request loads nothing twice, unless others have loaded since.
                name = f"{future.id}:load-{found.loads}"
                await self._load(key, found, checkpoint, name)
            if found.load not in self._loaded:
                future.after = found.load
            await self._api.submit(key, rollout.id, "generate", future.id, params, arrays)
            self._records.put(future)

    async def _load(
        self, key: str, rollout: RolloutRecord, checkpoint: tuple[str, str], load: str
    ) -> None:
        """Let the next samples of a deployment be of a checkpoint."""
        # If this router dies now, nobody knows which weights the next sample would be of.
        rollout.loaded, rollout.load = None, ""
        self._records.put(rollout)
        params = {"job": checkpoint[0], "name": checkpoint[1]}
        await self._api.submit(key, rollout.id, "load_checkpoint", load, params)
        rollout.loaded, rollout.load = checkpoint, load
        rollout.loads += 1
        self._records.put(rollout)

    async def poll(self, key: str, future: FutureRecord) -> FutureAnswer:
        """Wait for a future's answer, `HOLD_S` seconds at most.

        Raises:
            NotFoundError: the request is lost, and must be sent again.
        """
        deadline = time.monotonic() + HOLD_S
        reason = "the request waits for an earlier one of this model"
        pause_s = PAUSES_S[0]
        while (left := deadline - time.monotonic()) > 0:
            future = self._records.find(FutureRecord, future.id) or future
            try:
                if future.error is not None:
                    return FutureAnswer(json=future.error)
                if not future.operation:
                    return FutureAnswer(json=future.result)
                if self.queue.waits(future):
                    self.queue.advance(key, future.id.rpartition(":")[0])
                    await asyncio.sleep(min(pause_s, left))
                    pause_s = min(2 * pause_s, PAUSES_S[1])
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
                raise NotFoundError(f"{future.id} is lost: send the request again") from error
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
            async with self._records.exclusive(each.id):
                found = self._records.find(RolloutRecord, each.id)
                if found is not None and found.load == load:
                    found.loaded, found.load = None, ""
                    self._records.put(found)
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


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


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
