"""A damaged payload or result is found by its digest: no worker is counted as lost, and a payload
is sent again by the controller that still has it."""

import logging
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import plexrl
from plexrl import errors
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
    embedded: EmbeddedCluster, job: str, suffix: str, how: Callable[[Path], None] = flip
) -> list[Path]:
    """Damage all payloads (`in`) or results (`out`) of a job, and end the router, which may have
    some in memory."""
    found = [path for path in (embedded.data_dir / "blobs").glob(f"*.{suffix}") if job in path.name]
    for path in found:
        how(path)
    router = process_of(embedded, "plexrl.router")
    router.send_signal(signal.SIGKILL)
    wait_until(lambda: not router.is_running(), "the router has not ended")
    return found


@pytest.mark.parametrize("how", [flip, empty])
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
        assert len(damage(embedded, job.job, "in", how)) == STEPS - 1
        kill_worker(actor, 1)
        train(actor, STEPS - 1).result(LIMIT_S)
        assert checkpoint_weights(actor) == undisturbed
        assert actor.status()["incarnation"] == 2, "the damage cost workers besides the killed one"
        assert caplog.text.count("sending it again") >= STEPS - 1


def test_a_damaged_payload_of_a_queued_operation_is_asked_again(
    embedded: EmbeddedCluster, undisturbed: bytes, caplog: pytest.LogCaptureFixture
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
        damaged = damage(embedded, job.job, "in")
        stopped.resume()
        assert len(damaged) == STEPS
        for future in futures:
            future.result(LIMIT_S)
        assert checkpoint_weights(actor) == undisturbed
        assert actor.status()["incarnation"] == 1, "the damage cost workers"
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
