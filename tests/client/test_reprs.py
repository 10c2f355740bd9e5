"""Reprs of SDK objects: one short line, without a request and without the key."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import plexrl
from plexrl.client.calls.controller import Controller
from plexrl.client.calls.transport import AsyncTransport, Transport
from plexrl.client.data.results import WeightsSpan, decode_plain
from plexrl.ids import JobId
from plexrl.wire.messages.views import JobView
from tests.client.fake_router import JOB

KEY = "s3cret"
NOWHERE = "http://user:pass@127.0.0.1:9"
"""Unreachable, so a repr that made a request would fail."""
PENDING: Any = {
    "operation": "sums-1:ab",
    "state": "pending",
    "kind": "generate",
    "deployment": "sums-1/rollout",
}
ROW = np.arange(5000, dtype=np.float32)

VIEW: JobView = {**JOB, "job": JobId("sums-1"), "name": "sums"}


@pytest.fixture
def transport() -> Iterator[Transport]:
    made = Transport(NOWHERE, KEY, 1.0)
    yield made
    made.close()


def test_handles_show_what_they_refer_to(transport: Transport) -> None:
    assert repr(plexrl.Cluster(transport)) == "<Cluster 'http://127.0.0.1:9'>"
    mine = transport.for_controller(Controller())
    job = plexrl.Job(mine, VIEW, heartbeat=False)
    assert repr(job) == "<Job 'sums-1'>"
    read_only = plexrl.Job(transport, VIEW, heartbeat=False)
    assert repr(read_only) == "<Job 'sums-1' read only>"
    actor = plexrl.TrainDeployment(transport, "sums-1/actor")
    assert repr(actor) == "<TrainDeployment 'sums-1/actor'>"
    assert repr(actor.within(30)) == "<TrainDeployment 'sums-1/actor' deadline_s=30.0>"
    future = plexrl.Future[None](transport, PENDING, decode_plain)
    assert repr(future) == "<Future 'sums-1:ab' generate on 'sums-1/rollout' pending>"
    saving = plexrl.CheckpointFuture(transport, PENDING, decode_plain)
    assert repr(saving).startswith("<CheckpointFuture 'sums-1:ab'")


async def async_handles(transport: Transport) -> list[str]:
    aio = AsyncTransport(NOWHERE, KEY, 1.0)
    cluster = plexrl.AsyncCluster(plexrl.Cluster(transport), aio)
    job = plexrl.Job(transport, VIEW, heartbeat=False)
    actor = plexrl.TrainDeployment(transport, "sums-1/actor")
    handles: list[object] = [
        cluster,
        plexrl.AsyncJob(aio, job),
        plexrl.AsyncTrainDeployment(aio, actor),
        plexrl.AsyncFuture[None](aio, PENDING, decode_plain),
    ]
    await aio.close()
    return [repr(each) for each in handles]


def test_async_handles_show_the_same(transport: Transport) -> None:
    assert asyncio.run(async_handles(transport)) == [
        "<AsyncCluster 'http://127.0.0.1:9'>",
        "<AsyncJob 'sums-1' read only>",
        "<AsyncTrainDeployment 'sums-1/actor'>",
        "<AsyncFuture 'sums-1:ab' generate on 'sums-1/rollout' pending>",
    ]


def test_values_show_their_shape_and_no_array() -> None:
    sample = plexrl.Sample(list(range(5000)), ROW, "length", (WeightsSpan(0, 2, 7),))
    shown = "Sample(tokens=[0, 1, 2, 3, 4, 5, … 4994 more], finish_reason='length', trainer_step=7)"
    assert repr(sample) == shown
    assert repr(plexrl.Sample([5, 6], ROW[:2], "stop")).startswith("Sample(tokens=[5, 6], ")
    found = plexrl.GenerateResult([[sample, sample]], 2, {}, 7)
    shown = "GenerateResult(prompts=1, samples=2, tokens=10000, trainer_step=7)"
    assert repr(found) == shown
    batch = plexrl.Batch([[1, 2, 3], [4]], {"mask": [[0, 1, 1], [1]], "logprobs": [[0] * 3, [0]]})
    assert repr(batch) == "Batch(rows=2, tokens=4, lengths=1..3, values=[mask, logprobs])"
    assert repr(plexrl.Batch([])) == "Batch(rows=0, tokens=0, values=[])"
    assert repr(plexrl.ForwardResult([ROW, ROW])) == "ForwardResult(rows=2, tokens=10000)"
    assert repr(plexrl.ScoreResult(ROW)) == "ScoreResult(rows=5000)"
    trained = plexrl.TrainResult({"loss": 0.5, "tokens": 10000.0}, [ROW, ROW])
    assert repr(trained) == "TrainResult(metrics={'loss': 0.5, 'tokens': 10000}, rows=2)"
    step = plexrl.StepResult({"grad_norm": 1.25}, 3)
    assert repr(step) == "StepResult(metrics={'grad_norm': 1.25}, trainer_step=3)"
    chunk = plexrl.Chunk(0, 1, [5] * 5000, [0.0] * 5000)
    assert repr(chunk) == "Chunk(prompt=0, sample=1, tokens=5000)"
    model = plexrl.tiny_qwen2("0123")
    shown = "ModelSpec(architecture='qwen2', vocabulary of 4, seed=0, head='causal')"
    assert repr(model) == shown
    assert repr(plexrl.ModelSpec(path="/m")) == "ModelSpec(path='/m', head='causal')"


def test_a_tokenizer_shows_its_size() -> None:
    pytest.importorskip("tokenizers", reason="text needs the extra `text`")
    assert repr(plexrl.Tokenizer.from_vocabulary("0123")) == "<Tokenizer of 7 tokens>"
