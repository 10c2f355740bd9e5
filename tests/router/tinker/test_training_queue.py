"""Training requests that arrive in any order, at any of several routers that share their records.
The cluster's HTTP API is an ASGI application of a few lines; all else is real."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError, OverloadedError
from plexrl.router.tinker import training_queue as module
from plexrl.router.tinker.api import ClusterApi
from plexrl.router.tinker.records import (
    FutureRecord,
    ModelRecord,
    RecordFile,
    SessionRecord,
    WaitingRecord,
)
from plexrl.router.tinker.training_queue import FOLDER, LOST_S, TrainingQueue
from tests.examples import examples
from tests.router.tinker.stub_cluster import KEY, MODEL, StubCluster, step

BATCH = {"tokens": np.arange(20, dtype=np.int32)}


class Router:
    """The queue of one router, with a file of records of its own."""

    def __init__(self, folder: Path, cluster: StubCluster) -> None:
        self.records = RecordFile(folder / "tinker.sqlite")
        self.api, self.cluster = ClusterApi(cluster), cluster
        self.queue = TrainingQueue(self.api, self.records)
        self.records.add(SessionRecord(id="s", session="s", tenant="t"))
        self.records.add(
            ModelRecord(
                id=MODEL, session="s", deployment="s/d", base_model="b", folder="f", lora=None
            )
        )

    @property
    def model(self) -> ModelRecord:
        found = self.records.find(ModelRecord, MODEL)
        assert found is not None
        return found

    async def is_submitting(self) -> None:
        """Wait until the cluster has refused a submission."""
        await self.cluster.was_down.wait()

    async def close(self) -> None:
        """End as a router that stops, or that is killed: what it has in memory is gone."""
        await self.queue.close()
        await self.api.close()
        self.records.close()


def stored(folder: Path) -> list[Path]:
    """Files of batches that wait."""
    return list((folder / FOLDER).glob("*"))


async def settle(*routers: Router) -> None:
    """Wait until the queues have nothing to submit."""
    for router in routers:
        while tasks := [each for each in router.queue._tasks.values() if not each.done()]:
            await asyncio.wait(tasks)


@contextmanager
def empty_folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name)


@settings(max_examples=examples(60), deadline=None)
@given(
    order=st.permutations(range(1, 7)),
    refused=st.sets(st.integers(1, 6)),
    at=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    again=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=6),
)
def test_requests_leave_once_and_in_order_however_and_wherever_they_arrive(
    order: list[int], refused: set[int], at: list[int], again: list[tuple[int, int]]
) -> None:
    cluster = StubCluster()

    async def arrive(router: Router, seq: int) -> None:
        if seq in refused:
            router.queue.refuse(KEY, router.model, seq, InvalidRequestError("no such loss"))
        else:
            await router.queue.accept(router.model, seq, step(seq, arrays=BATCH))

    async def main(folder: Path) -> None:
        routers = [Router(folder, cluster) for _ in range(3)]
        for seq, where in zip(order, at, strict=True):
            await arrive(routers[where], seq)
        for number, where in again:
            await arrive(routers[where], order[number])
        await settle(*routers)
        assert routers[0].model.next_seq == 7
        assert routers[1].records.all(WaitingRecord) == []
        assert stored(folder) == []
        for router in routers:
            await router.close()

    with empty_folder() as folder:
        asyncio.run(main(folder))
    left = [f"{MODEL}:{seq}" for seq in range(1, 7) if seq not in refused]
    assert [each for each in cluster.submitted if each in left] == left


def test_a_request_that_waited_in_a_router_that_is_gone_goes_on_with_its_batch(
    tmp_path: Path,
) -> None:
    cluster = StubCluster()

    async def main() -> None:
        first = Router(tmp_path, cluster)
        await first.queue.accept(first.model, 2, step(2, arrays=BATCH))
        await first.close()
        second = Router(tmp_path, cluster)
        assert second.queue.is_known(MODEL, 2)
        await second.queue.accept(second.model, 1, step(1))
        await settle(second)
        await second.close()

    asyncio.run(main())
    assert cluster.submitted == [f"{MODEL}:1", f"{MODEL}:2"]
    assert cluster.batches[1]["tokens"].tolist() == BATCH["tokens"].tolist()


def test_a_request_that_a_killed_router_was_submitting_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    cluster = StubCluster()

    async def main() -> None:
        cluster.is_down = True
        first, second = Router(tmp_path, cluster), Router(tmp_path, cluster)
        lost = asyncio.create_task(first.queue.accept(first.model, 1, step(1)))
        await first.is_submitting()
        assert not second.queue.is_known(MODEL, 1), "its client has no answer, and sends it again"
        lost.cancel()
        await first.close()
        cluster.is_down = False
        await second.queue.accept(second.model, 1, step(1))
        await second.close()

    asyncio.run(main())
    assert cluster.submitted == [f"{MODEL}:1"]


def test_a_request_that_the_scheduler_does_not_take_outlives_its_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ACCEPT_S", 0.01)
    cluster = StubCluster()

    async def main() -> None:
        cluster.is_down = True
        first = Router(tmp_path, cluster)
        await first.queue.accept(first.model, 1, step(1, arrays=BATCH))
        await first.close()
        cluster.is_down = False
        second = Router(tmp_path, cluster)
        second.queue.advance(KEY, MODEL)
        await settle(second)
        assert second.model.next_seq == 2
        await second.close()

    asyncio.run(main())
    assert cluster.submitted == [f"{MODEL}:1"]


def test_a_batch_that_is_lost_fails_and_later_ones_go_on(tmp_path: Path) -> None:
    cluster = StubCluster()

    async def main() -> None:
        router = Router(tmp_path, cluster)
        await router.queue.accept(router.model, 2, step(2, arrays=BATCH))
        for file in stored(tmp_path):
            file.unlink()
        old = FutureRecord(
            id=f"{MODEL}:3", session="s", kind="optim_step", made_at=time.time() - LOST_S - 1
        )
        router.records.add(old)
        await router.queue.accept(router.model, 4, step(4))
        await router.queue.accept(router.model, 1, step(1))
        await settle(router)
        for seq in (2, 3):
            lost = router.records.find(FutureRecord, f"{MODEL}:{seq}")
            assert lost is not None
            assert lost.error is not None
            assert "send the batch again" in lost.error["error"]
        await router.close()

    asyncio.run(main())
    assert cluster.submitted == [f"{MODEL}:1", f"{MODEL}:4"]


def test_a_number_below_1_and_too_many_waiting_requests_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 3)

    async def main() -> None:
        first, second = Router(tmp_path, StubCluster()), Router(tmp_path, StubCluster())
        with pytest.raises(InvalidRequestError, match="from 1"):
            await first.queue.accept(first.model, 0, step(0))
        for seq in (2, 3, 4):
            await first.queue.accept(first.model, seq, step(seq))
        with pytest.raises(OverloadedError, match="wait for request 1"):
            await second.queue.accept(second.model, 5, step(5))
        await second.queue.accept(second.model, 1, step(1))
        await settle(second)
        assert second.model.next_seq == 5
        await first.close()
        await second.close()

    asyncio.run(main())


def test_what_waits_of_an_ended_session_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TENANT_WAITING_BYTES_MAX", 100)
    cluster = StubCluster()

    async def main() -> None:
        router = Router(tmp_path, cluster)
        await router.queue.accept(router.model, 2, step(2, arrays=BATCH))
        with pytest.raises(OverloadedError, match="80 bytes"):
            await router.queue.accept(router.model, 3, step(3, arrays=BATCH))
        await router.queue.accept(router.model, 3, step(3, arrays=BATCH, tenant="other"))
        cluster.is_down = True
        held = asyncio.create_task(router.queue.accept(router.model, 1, step(1, arrays=BATCH)))
        await router.is_submitting()
        router.queue.forget_model(MODEL)
        await held
        assert router.records.all(WaitingRecord) == []
        assert stored(tmp_path) == []
        await router.close()

    asyncio.run(main())


def test_another_router_lets_go_of_an_ended_session_s_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    cluster = StubCluster()
    cluster.is_down = True

    async def main() -> None:
        first, second = Router(tmp_path, cluster), Router(tmp_path, cluster)
        held = asyncio.create_task(first.queue.accept(first.model, 1, step(1)))
        await first.is_submitting()
        ended = second.records.find(SessionRecord, "s")
        assert ended is not None
        ended.is_finished = True
        second.records.update(ended)
        async with asyncio.timeout(60):
            await held
        assert not first.queue._held
        await first.close()
        await second.close()

    asyncio.run(main())


def test_a_request_that_arrives_while_its_session_ends_at_another_router_is_not_kept(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        first, second = (Router(tmp_path, StubCluster()) for _ in range(2))
        async with second.records.exclusive(MODEL):
            held = asyncio.create_task(first.queue.accept(first.model, 1, step(1, arrays=BATCH)))
            later = asyncio.create_task(first.queue.accept(first.model, 2, step(2, arrays=BATCH)))
            await asyncio.sleep(0)
            ended = second.records.find(SessionRecord, "s")
            assert ended is not None
            ended.is_finished = True
            second.records.update(ended)
            second.records.drop_all(FutureRecord, "s")
        async with asyncio.timeout(60):
            await asyncio.gather(held, later)
        assert first.queue._held == {}
        assert first.records.all(WaitingRecord) == []
        await first.close()
        await second.close()

    asyncio.run(main())


def test_batches_that_nothing_waits_for_are_deleted_after_a_while(tmp_path: Path) -> None:
    async def main() -> None:
        router = Router(tmp_path, StubCluster())
        await router.queue.accept(router.model, 2, step(2, arrays=BATCH))
        orphan = tmp_path / FOLDER / "orphan"
        orphan.write_bytes(b"")
        os.utime(orphan, (100.0, 100.0))
        router.queue.drop_orphans(100.0)
        assert orphan.exists()
        router.queue.drop_orphans(time.time() + 60)
        assert not orphan.exists()
        assert len(stored(tmp_path)) == 1, "what waits is kept"
        await router.close()

    asyncio.run(main())


def test_a_lock_is_held_by_one_router_and_free_once_it_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = (RecordFile(tmp_path / "tinker.sqlite") for _ in range(2))
        inside: list[str] = []

        async def work(records: RecordFile, name: str) -> None:
            async with records.exclusive("model"):
                inside.append(name)
                await asyncio.sleep(0.01)
                assert inside[-1] == name, "nobody else came in"

        await asyncio.gather(*(work(each, f"{at}") for at in range(4) for each in (first, second)))
        holding = first.exclusive("model")
        await holding.__aenter__()
        async with asyncio.timeout(60), second.exclusive("other"):
            first.close()
            async with second.exclusive("model"):
                pass
        second.close()

    asyncio.run(main())
