"""A damaged payload or result is found by its digest: no worker is counted as lost, and a payload
is sent again by the controller that still has it."""

import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

import plexrl
from plexrl import errors
from plexrl.client.calls import requests
from plexrl.cluster.embedded.start import EmbeddedCluster
from tests.cluster.tools import (
    VOCABULARY,
    checkpoint_weights,
    kill_worker,
    process_of,
    rank_process,
    some_batch,
    train,
    wait_until,
    weights_after,
)

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=4)
STEPS = 4
LIMIT_S = 180.0
"""Longer than the cluster waits for a payload."""


@pytest.fixture(scope="module")
def undisturbed(embedded: EmbeddedCluster) -> bytes:
    return weights_after(embedded, MODEL, STEPS)


def flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def damage(
    embedded: EmbeddedCluster,
    part_of_name: str,
    suffix: str,
    how: Callable[[Path], None] = flip,
    spared: int = 0,
) -> int:
    """Damage payloads (`in`) or results (`out`) but for the oldest ones that are spared, and end
    the router, which may have some in memory. Returns their number."""
    blobs = (embedded.data_dir / "blobs").glob(f"*{part_of_name}*.{suffix}")
    found = sorted(blobs, key=lambda path: path.stat().st_mtime_ns)[spared:]
    for path in found:
        how(path)
    router = process_of(embedded, "plexrl.router")
    router.send_signal(signal.SIGKILL)
    wait_until(lambda: not router.is_running(), "the router has not ended")
    return len(found)


@pytest.mark.parametrize("how", [flip, pytest.param(empty, marks=pytest.mark.slow)])
def test_damaged_payloads_of_a_replay_are_asked_again(
    embedded: EmbeddedCluster,
    undisturbed: bytes,
    caplog: pytest.LogCaptureFixture,
    how: Callable[[Path], None],
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        plexrl.connect(embedded.url, embedded.api_key) as cluster,
        cluster.create_job("damaged", controller_timeout_s=15.0) as job,
    ):
        actor = job.train_deployment("actor", MODEL, workers=2)
        for step in range(STEPS - 1):
            train(actor, step).result()
        assert damage(embedded, job.job, "in", how) == STEPS - 1
        kill_worker(actor, 1)
        train(actor, STEPS - 1).result(LIMIT_S)
        assert checkpoint_weights(actor) == undisturbed
        assert actor.status()["incarnation"] == 2, "the damage cost workers besides the killed one"
        assert caplog.text.count("sending it again") >= STEPS - 1


@pytest.mark.parametrize(
    ("spared", "incarnation"),
    [
        pytest.param(1, 1, id="queued", marks=pytest.mark.slow),
        # The killed router may have sent it, so the workers start from the state before.
        pytest.param(0, 2, id="and in flight"),
    ],
)
def test_damaged_payloads_of_submitted_operations_are_asked_again(
    embedded: EmbeddedCluster,
    undisturbed: bytes,
    caplog: pytest.LogCaptureFixture,
    spared: int,
    incarnation: int,
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        plexrl.connect(embedded.url, embedded.api_key) as cluster,
        cluster.create_job("queued", controller_timeout_s=15.0) as job,
    ):
        actor = job.train_deployment("actor", MODEL, workers=2)
        actor.barrier().result()
        stopped = rank_process(actor, 1)
        stopped.suspend()
        futures = [train(actor, step) for step in range(STEPS)]
        damaged = damage(embedded, job.job, "in", spared=spared)
        stopped.resume()
        assert damaged == STEPS - spared
        for future in futures:
            future.result(LIMIT_S)
        assert checkpoint_weights(actor) == undisturbed
        assert actor.status()["incarnation"] == incarnation
        assert "sending it again" in caplog.text


def test_a_damaged_result_fails_its_reader_only(
    embedded: EmbeddedCluster, undisturbed: bytes
) -> None:
    with (
        plexrl.connect(embedded.url, embedded.api_key) as cluster,
        cluster.create_job("result") as job,
    ):
        actor = job.train_deployment("actor", MODEL, workers=2)
        for step in range(STEPS - 1):
            train(actor, step).result()
        scored = actor.forward(some_batch(0))
        actor.barrier().result()
        assert damage(embedded, job.job, "out")
        with pytest.raises(errors.PayloadLostError, match="compute it again"):
            scored.result()
        actor.forward(some_batch(0)).result()
        train(actor, STEPS - 1).result()
        assert checkpoint_weights(actor) == undisturbed
        assert actor.status()["incarnation"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("sender", ["an earlier controller", "plain HTTP"])
def test_a_payload_that_nobody_sends_again_fails_its_operation_and_nothing_else(
    embedded: EmbeddedCluster, undisturbed: bytes, sender: str
) -> None:
    with plexrl.connect(embedded.url, embedded.api_key) as cluster:
        job = cluster.create_job("alone", controller_timeout_s=15.0)
        actor = job.train_deployment("actor", MODEL, workers=2)
        train(actor, 0).result()
        stopped = rank_process(actor, 1)
        stopped.suspend()
        train(actor, 1)
        if sender == "plain HTTP":
            lost = submit_over_http(embedded, actor)
        else:
            lost = actor.forward_backward(some_batch(2), plexrl.losses.grpo()).operation
            # The new controller has none of the batches that the earlier one sent.
            job = cluster.attach_job(job.job, keep_gradients=True)
            actor = job.train_deployment("actor", MODEL, workers=2)
        damaged = damage(embedded, lost.rpartition(":")[2], "in")
        stopped.resume()
        assert damaged == 1
        error = failure_of(embedded, lost)
        assert error["code"] == errors.PayloadLostError.code
        assert "submit its batch again" in error["message"]
        actor.recover()
        train(actor, 2).result()
        train(actor, 3).result()
        with job:
            assert checkpoint_weights(actor) == undisturbed
            assert actor.status()["incarnation"] == 1, "the damage cost workers"


def submit_over_http(embedded: EmbeddedCluster, actor: plexrl.TrainDeployment) -> str:
    """Submit the batch of step 2 as a program without the SDK does; returns its operation."""
    call = requests.forward_backward(
        actor.deployment, some_batch(2), plexrl.losses.grpo(), 16_384
    ).call
    reply = httpx.post(
        f"{embedded.url}{call.path}",
        params=call.query,
        content=call.content,
        headers={
            "Authorization": f"Bearer {embedded.api_key}",
            "Content-Type": str(call.content_type),
        },
    )
    assert reply.status_code == httpx.codes.ACCEPTED, reply.text
    return str(reply.json()["operation"])


def failure_of(embedded: EmbeddedCluster, operation: str) -> dict[str, Any]:
    """The error of an operation, once it has failed."""
    url = f"{embedded.url}/v1/operations/{quote(operation, safe='')}"
    replies: list[httpx.Response] = []

    def has_ended() -> bool:
        headers = {"Authorization": f"Bearer {embedded.api_key}"}
        # The router is being replaced, and the new one may not know the scheduler yet.
        with suppress(httpx.TransportError):
            replies.append(httpx.get(url, params={"wait_s": 20}, headers=headers, timeout=60))
        waits = (httpx.codes.ACCEPTED, httpx.codes.SERVICE_UNAVAILABLE)
        return bool(replies) and replies[-1].status_code not in waits

    wait_until(has_ended, "it does not fail", LIMIT_S)
    return dict(replies[-1].json()["error"])
