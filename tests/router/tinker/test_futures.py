"""Requests of models, refused, lost and forgotten ones among them. The cluster's HTTP API is an
ASGI application of a few lines; all else is real."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from plexrl.errors import InvalidRequestError, OverloadedError
from plexrl.router.tinker.api import ClusterApi
from plexrl.router.tinker.futures import Futures
from plexrl.router.tinker.records import (
    FutureRecord,
    ModelRecord,
    RecordFile,
    RolloutRecord,
    WeightsRecord,
)
from tests.router.tinker.stub_cluster import KEY, MODEL, StubCluster, step


@pytest.fixture
def records(tmp_path: Path) -> Iterator[RecordFile]:
    made = RecordFile(tmp_path / "tinker.sqlite")
    made.put(
        ModelRecord(id=MODEL, session="s", deployment="s/d", base_model="b", folder="f", lora=None)
    )
    yield made
    made.close()


def run(
    records: RecordFile,
    cluster: StubCluster,
    work: Callable[[Futures, ModelRecord], Awaitable[None]],
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


def found(records: RecordFile, seq: int) -> FutureRecord:
    record = records.find(FutureRecord, f"{MODEL}:{seq}")
    assert record is not None
    return record


def test_a_refused_number_is_used_also_over_a_restart_and_its_poll_says_why(
    records: RecordFile,
) -> None:
    cluster = StubCluster()

    async def refuse(futures: Futures, model: ModelRecord) -> None:
        futures.queue.refuse(KEY, model, 2, InvalidRequestError("no such loss"))
        assert futures.queue.is_known(MODEL, 2)

    async def train(futures: Futures, model: ModelRecord) -> None:
        assert futures.queue.is_known(MODEL, 2)
        for seq in (3, 1):
            await futures.queue.accept(model, seq, step(seq))
        assert (await futures.poll(KEY, found(records, 3))).json == {"metrics": {}}
        refused = (await futures.poll(KEY, found(records, 2))).json
        assert refused == {"error": "no such loss (invalid_request)", "category": "user"}

    run(records, cluster, refuse)
    run(records, cluster, train)
    assert cluster.submitted == [f"{MODEL}:1", f"{MODEL}:3"]


def test_a_sampler_is_polled_though_the_scheduler_has_forgotten_its_load(
    records: RecordFile,
) -> None:
    cluster = StubCluster()
    rollout = RolloutRecord(id="s/r", session="s", loaded=("s", "c"), load="old:load")
    records.put(rollout)

    async def sample(futures: Futures, _: ModelRecord) -> None:
        future = FutureRecord(id="s:sample:0:1", session="s", kind="save", operation="s:sample:0:1")
        future.result = {"answer": {"done": True}}
        await futures.sample(KEY, rollout, ("s", "c"), future, {}, {})
        assert future.after == "old:load"
        assert (await futures.poll(KEY, future)).json == {"done": True}

    run(records, cluster, sample)


def test_a_sample_that_is_sent_again_is_of_its_weights_though_others_were_loaded_meanwhile(
    records: RecordFile,
) -> None:
    cluster = StubCluster()
    rollout = RolloutRecord(id="s/r", session="s")
    records.put(rollout)

    async def draw(futures: Futures, sampler: int, seq: int) -> None:
        request = f"s:sample:{sampler}:{seq}"
        future = FutureRecord(id=request, session="s", kind="sample", operation=request)
        await futures.sample(KEY, rollout, ("s", f"c{sampler}"), future, {}, {})

    async def main(futures: Futures, _: ModelRecord) -> None:
        cluster.refused_kind = "generate"
        with pytest.raises(OverloadedError):
            await draw(futures, 0, 1)
        cluster.refused_kind = ""
        await draw(futures, 1, 1)
        await draw(futures, 0, 1)
        await draw(futures, 0, 2)

    run(records, cluster, main)
    loaded = [each for each in cluster.submitted if "load" in each]
    assert cluster.submitted[-3:] == [loaded[2], "s:sample:0:1", "s:sample:0:2"]
    assert [each.rpartition(":")[0] for each in loaded] == [
        "s:sample:0:1",
        "s:sample:1:1",
        "s:sample:0:1",
    ]


def test_a_poll_that_is_repeated_does_not_bring_deleted_weights_back(records: RecordFile) -> None:
    cluster = StubCluster()
    cluster.result = {"durable": True}
    weights = WeightsRecord(id="tinker://w", session="s", model=MODEL, checkpoint="c")
    kept = {"weights_record": msgspec.to_builtins(weights), "overwrites": True, "answer": {}}

    async def save(futures: Futures, model: ModelRecord) -> None:
        pending = step(1)
        pending.future.kind, pending.future.result = "save_weights", kept
        await futures.queue.accept(model, 1, pending)
        assert (await futures.poll(KEY, found(records, 1))).json == {}
        [saved] = records.all(WeightsRecord)
        records.drop(saved)
        assert (await futures.poll(KEY, found(records, 1))).json == {}
        assert records.all(WeightsRecord) == []

    run(records, cluster, save)
