"""Requests of models, refused, lost and forgotten ones among them. The cluster's HTTP API is an
ASGI application of a few lines; all else is real."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec
import numpy as np
import pytest

from plexrl.errors import InvalidRequestError, OverloadedError
from plexrl.router.tinker import futures as module
from plexrl.router.tinker.api import ClusterApi
from plexrl.router.tinker.futures import Futures, PendingRequest
from plexrl.router.tinker.records import (
    FutureRecord,
    ModelRecord,
    RecordFile,
    RolloutRecord,
    WeightsRecord,
)
from plexrl.wire.tensors import encode_body

MODEL = "s:train:0"
KEY = "Bearer k"


def refusal(code: str) -> bytes:
    """The body of a refused request."""
    return json.dumps({"error": {"code": code, "message": "refused"}}).encode()


class Cluster:
    """What has been submitted, and the operations that the scheduler still knows."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.known: set[str] = set()
        self.is_down = False
        self.result: dict[str, Any] = {"metrics": {}}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Submissions are accepted, and done at once."""
        del receive
        status, body = 200, encode_body({"result": self.result}, {})
        operation = scope["path"].rpartition("/")[2]
        if self.is_down:
            status, body = 503, refusal("unavailable")
        elif scope["method"] == "POST":
            operation = parse_qs(scope["query_string"].decode())["operation"][0]
            self.submitted.append(operation)
            self.known.add(operation)
        elif operation not in self.known:
            status, body = 404, refusal("unknown_operation")
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def records(tmp_path: Path) -> Iterator[RecordFile]:
    made = RecordFile(tmp_path / "tinker.sqlite")
    made.put(
        ModelRecord(id=MODEL, session="s", deployment="s/d", base_model="b", folder="f", lora=None)
    )
    yield made
    made.close()


def run(
    records: RecordFile, cluster: Cluster, work: Callable[[Futures, ModelRecord], Awaitable[None]]
) -> None:
    """Run `work` with a router that has just started."""

    async def main() -> None:
        api = ClusterApi(cluster)
        futures = Futures(api, records)
        try:
            model = records.find(ModelRecord, MODEL)
            assert model is not None
            async with asyncio.timeout(20):
                await work(futures, model)
        finally:
            await futures.close()
            await api.close()

    asyncio.run(main())


def step(seq: int, **fields: Any) -> PendingRequest:
    record = FutureRecord(
        id=f"{MODEL}:{seq}", session="s", kind="optim_step", operation=f"{MODEL}:{seq}"
    )
    given = {"key": KEY, "tenant": "t", "kind": "optim_step", "params": {}, "future": record}
    return PendingRequest(**{**given, **fields})


def found(records: RecordFile, seq: int) -> FutureRecord:
    record = records.find(FutureRecord, f"{MODEL}:{seq}")
    assert record is not None
    return record


def test_a_refused_number_is_used_also_over_a_restart_and_its_poll_says_why(
    records: RecordFile,
) -> None:
    cluster = Cluster()

    async def refuse(futures: Futures, model: ModelRecord) -> None:
        futures.refuse(model, 2, InvalidRequestError("no such loss"))
        assert futures.is_known(model, 2)

    async def train(futures: Futures, model: ModelRecord) -> None:
        assert futures.is_known(model, 2)
        for seq in (3, 1):
            await futures.train(model, seq, step(seq))
        assert (await futures.poll(KEY, found(records, 3))).json == {"metrics": {}}
        refused = (await futures.poll(KEY, found(records, 2))).json
        assert refused == {"error": "no such loss (invalid_request)", "category": "user"}

    run(records, cluster, refuse)
    run(records, cluster, train)
    assert cluster.submitted == [f"{MODEL}:1", f"{MODEL}:3"]


def test_a_request_that_waited_in_a_router_that_is_gone_fails_and_later_ones_go_on(
    records: RecordFile,
) -> None:
    cluster = Cluster()

    async def wait(futures: Futures, model: ModelRecord) -> None:
        await futures.train(model, 2, step(2))

    async def go_on(futures: Futures, model: ModelRecord) -> None:
        await futures.train(model, 3, step(3))
        await futures.train(model, 1, step(1))
        lost = (await futures.poll(KEY, found(records, 2))).json
        assert lost is not None
        assert "lost in a restart of the router" in lost["error"]
        assert (await futures.poll(KEY, found(records, 3))).json == {"metrics": {}}

    run(records, cluster, wait)
    run(records, cluster, go_on)
    assert cluster.submitted == [f"{MODEL}:1", f"{MODEL}:3"]


def test_a_sampler_is_polled_though_the_scheduler_has_forgotten_its_load(
    records: RecordFile,
) -> None:
    cluster = Cluster()
    rollout = RolloutRecord(id="s/r", session="s", loaded=("s", "c"), load="old:load")
    records.put(rollout)

    async def sample(futures: Futures, _: ModelRecord) -> None:
        future = FutureRecord(id="s:sample:0:1", session="s", kind="save", operation="s:sample:0:1")
        future.result = {"answer": {"done": True}}
        await futures.sample(KEY, rollout, ("s", "c"), future, {}, {})
        assert future.after == "old:load"
        assert (await futures.poll(KEY, future)).json == {"done": True}

    run(records, cluster, sample)


def test_a_poll_that_is_repeated_does_not_bring_deleted_weights_back(records: RecordFile) -> None:
    cluster = Cluster()
    cluster.result = {"durable": True}
    weights = WeightsRecord(id="tinker://w", session="s", model=MODEL, checkpoint="c")
    kept = {"weights_record": msgspec.to_builtins(weights), "overwrites": True, "answer": {}}

    async def save(futures: Futures, model: ModelRecord) -> None:
        pending = step(1)
        pending.future.kind, pending.future.result = "save_weights", kept
        await futures.train(model, 1, pending)
        assert (await futures.poll(KEY, found(records, 1))).json == {}
        [saved] = records.all(WeightsRecord)
        records.drop(saved)
        assert (await futures.poll(KEY, found(records, 1))).json == {}
        assert records.all(WeightsRecord) == []

    run(records, cluster, save)


def test_a_model_whose_session_has_ended_leaves_nothing_that_waits(
    records: RecordFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TENANT_WAITING_BYTES_MAX", 100)
    cluster = Cluster()
    batch = {"tokens": np.zeros(20, np.int32)}

    async def fill(futures: Futures, model: ModelRecord) -> None:
        await futures.train(model, 2, step(2, arrays=batch))
        with pytest.raises(OverloadedError, match="80 bytes"):
            await futures.train(model, 3, step(3, arrays=batch))
        await futures.train(model, 3, step(3, arrays=batch, tenant="other"))
        cluster.is_down = True
        held = asyncio.create_task(futures.train(model, 1, step(1, arrays=batch)))
        await asyncio.sleep(0)
        futures.forget_model(MODEL)
        await held
        # The bound is free again.
        await futures.train(model, 4, step(4, arrays=batch))

    run(records, cluster, fill)
    assert cluster.submitted == []
