"""Tokens over HTTP while they are drawn, over several routers and from any cursor."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.errors import InvalidRequestError
from plexrl.process.folders.folders import Folders
from tests.cluster.tools import VOCABULARY, kill_worker, paused_in_the_middle, wait_until

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)
LONG = plexrl.SamplingParams(max_tokens=150, seed=3, ignore_eos=True)
"""Several samples of this length, one at a time, take about a second."""


@pytest.fixture
def rollout(job: plexrl.Job) -> plexrl.RolloutDeployment:
    return job.rollout_deployment("rollout", MODEL, max_concurrent_samples=1)


@pytest.fixture
def http(embedded: EmbeddedCluster) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {embedded.api_key}"}
    with httpx.Client(base_url=embedded.url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def second_router(embedded: EmbeddedCluster, tmp_path: Path) -> Iterator[str]:
    """The URL of another router of the same cluster."""
    config = {
        "router": "second",
        "scheduler": [f"unix:{Folders.of(embedded.data_dir).run}/scheduler.sock"],
        "host": "127.0.0.1",
        "port": 0,
        "data_dir": str(embedded.data_dir),
    }
    path = tmp_path / "router.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "plexrl.router", "--config", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield f"http://{ready['host']}:{ready['port']}"
        process.terminate()


def drawn(rollout: plexrl.RolloutDeployment) -> int:
    """Tokens that the engine has drawn so far."""
    return sum(each["tokens_drawn"] for each in rollout.status()["engines"])


def paused(rollout: plexrl.RolloutDeployment) -> plexrl.GenerateFuture:
    """A streamed generation that is paused midway."""

    def begin() -> plexrl.GenerateFuture:
        return rollout.generate([[3, 4], [5]], n=2, sampling=LONG, stream=True)

    return paused_in_the_middle(rollout, begin, running=1)


def path_of(future: plexrl.Future[Any]) -> str:
    return f"/v1/operations/{quote(future.operation, safe='')}/stream"


def tokens_of(chunks: list[plexrl.Chunk]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for chunk in chunks:
        assert len(chunk.tokens) == len(chunk.logprobs)
        found.setdefault((chunk.prompt, chunk.sample), []).extend(chunk.tokens)
    return found


def tokens_in(result: plexrl.GenerateResult) -> dict[tuple[int, int], list[int]]:
    return {
        (prompt, index): sample.tokens
        for prompt, samples in enumerate(result.samples)
        for index, sample in enumerate(samples)
    }


def test_both_clients_stream_all_tokens_during_and_after_the_run(
    embedded: EmbeddedCluster, job: plexrl.Job, rollout: plexrl.RolloutDeployment
) -> None:
    future = paused(rollout)
    chunks = [next(stream := future.stream())]
    assert not future.done(), "the first tokens come before the last ones"
    rollout.resume()
    chunks += stream
    result = future.result(120)
    assert tokens_of(chunks) == tokens_in(result)
    assert tokens_of(list(future.stream())) == tokens_in(result), "from the result, once more"

    async def read() -> tuple[list[plexrl.Chunk], plexrl.GenerateResult]:
        async with await plexrl.connect_async(embedded.url, embedded.api_key) as cluster:
            attached = await cluster.attach_job(job.job, heartbeat=False)
            mine = await attached.rollout_deployment("rollout", MODEL, max_concurrent_samples=1)
            begun = await mine.generate([[6]], n=2, sampling=LONG, stream=True)
            return [chunk async for chunk in begun.stream()], await begun

    found, whole = asyncio.run(read())
    assert tokens_of(found) == tokens_in(whole)


def test_a_stream_continues_after_its_last_event_on_another_router(
    http: httpx.Client, second_router: str, rollout: plexrl.RolloutDeployment
) -> None:
    future = paused(rollout)
    url = path_of(future)
    rows: dict[int, list[int]] = {}

    def take(event: dict[str, Any]) -> None:
        for row in event.get("rows", []):
            rows.setdefault(row["sample"], []).extend(row["tokens"])

    with http.stream("GET", url) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        lines = (json.loads(line) for line in response.iter_lines())
        first = next(event for event in lines if "rows" in event)
    take(first)
    cursor = first["cursor"]
    assert not future.done(), "leaving a stream does not end what it tells of"
    rollout.resume()
    wait_until(lambda: drawn(rollout) > 20, "it goes on")
    rollout.pause()
    headers = {"Accept": "text/event-stream", "Last-Event-ID": cursor}
    names = []
    with http.stream("GET", f"{second_router}{url}", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            key, _, value = line.partition(": ")
            if key == "event":
                names.append(value)
            elif key == "data":
                take(json.loads(value))
                rollout.resume()
    assert names[0] == "tokens"
    assert names[-1] == "done"
    assert names.count("tokens") > 1, "the other router streamed them as they were drawn"
    flat = [sample for samples in future.result(120).samples for sample in samples]
    assert rows == {index: sample.tokens for index, sample in enumerate(flat)}


def test_on_disconnect_cancel_ends_the_generation(
    http: httpx.Client, rollout: plexrl.RolloutDeployment
) -> None:
    future = rollout.generate([[3, 4]], n=500, sampling=LONG, stream=True)
    query = {"on_disconnect": "cancel"}
    with http.stream("GET", path_of(future), params=query) as response:
        next(line for line in response.iter_lines() if "rows" in line)
    [samples] = future.result(120).samples
    assert samples[-1].finish_reason == "abort"
    assert len(samples[-1].tokens) < LONG.max_tokens


def test_a_killed_worker_repeats_no_token_to_the_reader(
    rollout: plexrl.RolloutDeployment,
) -> None:
    future = paused(rollout)
    stream = future.stream()
    chunks = [next(stream)]
    kill_worker(rollout, 0)
    chunks += stream
    assert rollout.status()["incarnation"] == 2
    assert tokens_of(chunks) == tokens_in(future.result(120))


def test_a_slow_reader_gets_the_remaining_tokens_at_once(
    http: httpx.Client, rollout: plexrl.RolloutDeployment
) -> None:
    future = rollout.generate([[3, 4]], n=2, sampling=LONG, stream=True)
    counts: list[int] = []
    with http.stream("GET", path_of(future)) as response:
        for line in response.iter_lines():
            event = json.loads(line)
            if not counts:
                wait_until(future.done, "the generation waits for its reader")
            counts.append(sum(len(row["tokens"]) for row in event.get("rows", [])))
    assert sum(counts) == 2 * LONG.max_tokens


def test_operations_that_cannot_be_streamed_are_refused(
    http: httpx.Client, rollout: plexrl.RolloutDeployment
) -> None:
    sampling = plexrl.SamplingParams(max_tokens=4)
    plain = rollout.generate([[3]], sampling=sampling)
    with pytest.raises(InvalidRequestError, match="submitted without `stream`"):
        list(plain.stream())
    plain.result(120)
    with pytest.raises(InvalidRequestError, match="submitted without `stream`"):
        list(plain.stream())
    refused = http.get(path_of(rollout.barrier()))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
    assert "only generations" in refused.json()["error"]["message"]
    assert http.get(path_of(plain), params={"after": "7"}).status_code == 400
    assert http.get("/v1/operations/nobody/stream").status_code == 404
