"""One poll reports which samples of a sampler have ended, each of them once. The cluster's HTTP API
is an ASGI application of a few lines; all else is real."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.router.tinker.api import ClusterApi
from plexrl.router.tinker.completions import CLONE, Completion, Completions
from plexrl.router.tinker.messages.requests import RETRIEVED_MAX, FutureNames
from plexrl.router.tinker.records import FutureRecord, RecordFile, SamplerRecord

KEY = "Bearer k"
SAMPLER = SamplerRecord(id="s:sample:0", session="s", deployment="s/r", base_model="b")


class Log:
    """An operation log."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.is_down = False

    def end(self, operation: str, *, nbytes: int = 10, is_failed: bool = False) -> None:
        error = {"code": "execution_failed"} if is_failed else None
        row = {"operation": operation, "result_bytes": nbytes, "error": error}
        self.rows.append({**row, "index": len(self.rows) + 1})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        del receive
        query = parse_qs(scope["query_string"].decode())
        assert query["deployment"] == ["s/r"]
        after = int(query["after"][0])
        body: Any = {"operations": [row for row in self.rows if row["index"] > after]}
        if self.is_down:
            body = {"error": {"code": "unavailable", "message": "restarting"}}
        status = 503 if self.is_down else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


@pytest.fixture
def records(tmp_path: Path) -> Iterator[RecordFile]:
    made = RecordFile(tmp_path / "tinker.sqlite")
    yield made
    made.close()


def run(records: RecordFile, log: Log, work: Callable[[Completions], Awaitable[None]]) -> None:
    async def main() -> None:
        api = ClusterApi(log)
        try:
            async with asyncio.timeout(20):
                await work(Completions(api, records))
        finally:
            await api.close()

    asyncio.run(main())


def future(records: RecordFile, number: int) -> str:
    made = FutureRecord(id=f"{SAMPLER.id}:{number}", session="s", kind="sample")
    records.put(made)
    return made.id


def test_each_sample_that_ended_is_reported_once_also_by_a_router_that_has_just_started(
    records: RecordFile,
) -> None:
    log = Log()
    log.end("s:sample:1:1")
    log.end(f"{SAMPLER.id}:1")
    log.end(f"{SAMPLER.id}:1:load")
    log.end(f"{SAMPLER.id}:2", is_failed=True)
    log.end(f"{SAMPLER.id}:{3 * CLONE + 1}")

    async def first(completions: Completions) -> None:
        assert await completions.poll(KEY, SAMPLER, 0, 0) == (
            [Completion("s:sample:0:1", nbytes=10), Completion("s:sample:0:2", is_failed=True)],
            5,
        )

    async def second(completions: Completions) -> None:
        assert await completions.poll(KEY, SAMPLER, 0, 5, 0) == ([], 5)
        (clone, _) = await completions.poll(KEY, SAMPLER, 3, 0)
        assert [each.request for each in clone] == [f"{SAMPLER.id}:{3 * CLONE + 1}"]

    run(records, log, first)
    run(records, log, second)


def test_a_poll_ends_when_a_sample_does(records: RecordFile) -> None:
    log = Log()

    async def wait(completions: Completions) -> None:
        held = asyncio.create_task(completions.poll(KEY, SAMPLER, 0, 0))
        await asyncio.sleep(0.05)
        assert not held.done()
        log.end(f"{SAMPLER.id}:7")
        assert await held == ([Completion("s:sample:0:7", nbytes=10)], 1)

    run(records, log, wait)


def test_a_poll_in_which_nothing_ends_names_the_sample_that_waits_longest(
    records: RecordFile,
) -> None:
    oldest, _ = (future(records, number) for number in (4, 5))

    async def wait(completions: Completions) -> None:
        assert await completions.poll(KEY, SAMPLER, 0, 0, 0.05) == ([Completion(oldest)], 0)
        assert await completions.poll(KEY, SAMPLER, 1, 0, 0.05) == ([], 0)

    run(records, Log(), wait)


def test_a_poll_outlasts_a_scheduler_that_does_not_answer(records: RecordFile) -> None:
    log = Log()
    log.end(f"{SAMPLER.id}:1")
    log.is_down = True

    async def wait(completions: Completions) -> None:
        held = asyncio.create_task(completions.poll(KEY, SAMPLER, 0, 0))
        await asyncio.sleep(0.05)
        assert not held.done()
        log.is_down = False
        assert await held == ([Completion("s:sample:0:1", nbytes=10)], 1)

    run(records, log, wait)


def test_samples_that_the_client_has_are_forgotten_and_others_are_not(records: RecordFile) -> None:
    had, other = future(records, 1), future(records, 2)
    foreign = FutureRecord(id="t:sample:0:1", session="t", kind="sample")
    records.put(foreign)

    async def drop(completions: Completions) -> None:
        completions.drop(SAMPLER, [had, foreign.id, "unknown"])
        kept = {each.id for each in records.all(FutureRecord)}
        assert kept == {other, foreign.id}

    run(records, Log(), drop)


def test_one_poll_names_a_bounded_number_of_samples() -> None:
    def body(count: int) -> bytes:
        names = [f"{SAMPLER.id}:{number}" for number in range(count)]
        target = {"sampling_session_id": SAMPLER.id}
        return json.dumps({"target": target, "retrieved_request_ids": names}).encode()

    assert len(FutureNames.read(body(RETRIEVED_MAX)).retrieved_request_ids) == RETRIEVED_MAX
    with pytest.raises(InvalidRequestError, match="retrieved_request_ids"):
        FutureNames.read(body(RETRIEVED_MAX + 1))
