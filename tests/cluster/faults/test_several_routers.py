"""Two routers with one scheduler, on real processes: killed, overloaded, late, observed."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

import plexrl
from plexrl import errors
from plexrl.cli.app import app
from plexrl.client.calls.transport import Transport
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from tests.cluster.tools import (
    VOCABULARY,
    checkpoint_weights,
    has_ended,
    some_batch,
    wait_until,
)
from tests.router.collector import Collector, collecting

STEPS = 6
MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=6)
PENDING_MAX = 12
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[EmbeddedCluster]:
    folder = tmp_path_factory.mktemp("two")
    running = start_embedded(
        folder,
        routers=2,
        otlp_endpoint=collector.endpoint,
        pending_operations_max=PENDING_MAX,
    )
    yield running
    running.close()


@pytest.fixture
def both(two: EmbeddedCluster) -> Iterator[plexrl.Cluster]:
    with plexrl.connect(two.url, two.api_key) as connected:
        yield connected


def kill_router(two: EmbeddedCluster, index: int) -> None:
    """`kill -9` a router once it runs, and wait until it has ended."""
    config = "/router.json" if index == 0 else f"/router{index}.json"
    found: list[psutil.Process] = []

    def look() -> bool:
        for process in psutil.Process(two.pid).children():
            try:
                if process.cmdline()[-1].endswith(config):
                    found.append(process)
            except (psutil.Error, IndexError):
                continue
        return bool(found)

    wait_until(look, f"there is no router {index}")
    os.kill(found[0].pid, signal.SIGKILL)
    wait_until(lambda: has_ended(found[0]), "it lives")


def train(actor: plexrl.TrainDeployment, step: int) -> plexrl.Future[plexrl.StepResult]:
    actor.forward_backward(some_batch(step), plexrl.losses.grpo())
    return actor.optim_step(learning_rate=1e-2)


def trained(cluster: plexrl.Cluster, name: str, two: EmbeddedCluster | None) -> bytes:
    """The weights after some steps; with `two`, its routers are killed repeatedly."""
    with cluster.create_job(name) as job:
        actor = job.train_deployment("actor", MODEL)
        actor.barrier().result(LIMIT_S)
        waiting = []
        for step in range(STEPS):
            waiting.append(train(actor, step))
            if two is not None and step in (1, 3):
                kill_router(two, index=step // 2)
            waiting[-1].result(LIMIT_S)
        return checkpoint_weights(actor)


def test_killed_routers_lose_nothing_and_repeat_nothing(
    two: EmbeddedCluster, both: plexrl.Cluster
) -> None:
    undisturbed = trained(both, "quiet", None)
    done = threading.Event()
    answers: list[tuple[str, plexrl.GenerateResult]] = []

    def ask(rollout: plexrl.RolloutDeployment) -> None:
        while not done.is_set():
            sampling = plexrl.SamplingParams(max_tokens=4, seed=len(answers))
            future = rollout.generate([[3, 4, 5]], n=2, sampling=sampling)
            answers.append((future.operation, future.result(LIMIT_S)))

    with both.create_job("load") as job:
        rollout = job.rollout_deployment("rollout", MODEL)
        rollout.barrier().result(LIMIT_S)
        asking = threading.Thread(target=ask, args=(rollout,))
        asking.start()
        try:
            weights = trained(both, "disturbed", two)
        finally:
            done.set()
            asking.join(LIMIT_S)
    assert not asking.is_alive()
    assert weights == undisturbed
    assert answers
    assert all(len(each.samples[0]) == 2 for _, each in answers)
    for name in ("quiet", "disturbed"):
        rows = [row for row in both.operations(kind="optim_step") if name in row["job"]]
        assert [row["state"] for row in rows] == ["finished"] * STEPS
    assert len({name for name, _ in answers}) == len(answers)
    # One operation ran at a time, so a killed router lost at most one order to delete a payload.
    # Garbage collection deletes such a payload later.
    wait_until(lambda: len(list((two.data_dir / "blobs").glob("load*.in"))) <= 2, "payloads stay")


def test_an_async_controller_continues_with_the_remaining_router(two: EmbeddedCluster) -> None:
    async def run() -> None:
        async with await plexrl.connect_async(two.url.split(","), two.api_key) as cluster:
            job = await cluster.create_job("left")
            actor = await job.train_deployment("actor", MODEL)
            await (await actor.barrier())
            kill_router(two, 0)
            await (await actor.barrier())
            async with job:
                assert [row["kind"] for row in await job.operations()].count("barrier") == 2

    asyncio.run(run())


# `tests/scheduler/operations/test_backpressure.py` has the bound.
@pytest.mark.slow
def test_a_full_queue_makes_its_clients_wait_and_loses_nothing(
    two: EmbeddedCluster, both: plexrl.Cluster
) -> None:
    with both.create_job("crowd") as job:
        actor = job.train_deployment("actor", MODEL)
        actor.forward(some_batch(0)).result(LIMIT_S)
        futures = [actor.forward(some_batch(0)) for _ in range(3 * PENDING_MAX)]
        for future in futures:
            future.result(LIMIT_S)
        assert len({future.operation for future in futures}) == 3 * PENDING_MAX

        # A caller without time gets the error at once, with an estimate.
        transport = Transport(two.url, two.api_key, LIMIT_S)
        hasty = plexrl.Cluster(transport)
        same = hasty.attach_job(job.job, heartbeat=False).train_deployment("actor", MODEL)
        same.barrier().result(LIMIT_S)
        transport.timeout_s = 0.0

        # Each takes longer to execute than to submit.
        long = plexrl.Batch([[3] * 500] * 16, {})

        def flood() -> None:
            for _ in range(20 * PENDING_MAX):
                same.forward(long)

        with pytest.raises(errors.OverloadedError) as caught:
            flood()
        hasty.close()
        assert caught.value.details["bound"] == "pending_operations_max"
        assert float(str(caught.value.details["retry_after_s"])) > 0
        actor.barrier().result(LIMIT_S)
        states = [row["state"] for row in job.operations() if not row["internal"]]
        assert states == ["finished"] * len(states)
    wait_until(
        lambda: not list((two.data_dir / "blobs").glob("crowd*.in")), "refused payloads stay"
    )


def test_an_operation_past_its_deadline_never_runs(both: plexrl.Cluster) -> None:
    with both.create_job("late") as job:
        rollout = job.rollout_deployment("rollout", MODEL, max_sequence_tokens=500)
        rollout.barrier().result(LIMIT_S)
        forever = plexrl.SamplingParams(max_tokens=480, ignore_eos=True)
        many = [[3, 4, 5]] * 256
        began_at = time.monotonic()
        # Long enough for it to begin on a busy machine.
        running = rollout.within(4.0).generate(many, n=4, sampling=forever)
        late = rollout.within(0.05).barrier()
        with pytest.raises(errors.DeadlineExceededError, match="was not carried out"):
            late.result(LIMIT_S)
        found = running.result(LIMIT_S).samples
        reasons = {sample.finish_reason for samples in found for sample in samples}
        # No machine is expected to draw all tokens in this time.
        assert reasons == {"abort"}, time.monotonic() - began_at
        states = {str(row["operation"]): row["state"] for row in job.operations()}
        assert states[late.operation] == "failed"
        assert states[running.operation] == "finished"


def test_the_operation_log_has_phase_times_and_is_exported(
    two: EmbeddedCluster, both: plexrl.Cluster, collector: Collector, tmp_path: Path
) -> None:
    with both.create_job("story") as job:
        actor = job.train_deployment("actor", MODEL)
        train(actor, 0).result(LIMIT_S)
        rows = {row["kind"]: row for row in job.operations()}
        name = job.job
    row: Any = rows["forward_backward"]
    assert row["payload_bytes"] > 0
    assert row["result_bytes"] > 0
    assert row["compute_s"] > 0
    assert row["transfer_s"] > 0
    assert row["compute_s"] + row["transfer_s"] <= row["finished_at"] - row["started_at"] + 0.05
    assert rows["load"]["internal"]

    where = {"PLEXRL_URL": two.url, "PLEXRL_API_KEY": two.api_key, "COLUMNS": "200"}
    cli = CliRunner(env=where)
    table = cli.invoke(app, ["operations", name])
    assert "forward_backward" in table.output, table.output
    result = cli.invoke(app, ["operations", name, "--json", "--kind", "load"])
    assert [each["kind"] for each in json.loads(result.output)] == ["load"]
    typo = cli.invoke(app, ["operations", name, "--kind", "laod"])
    assert "It has: " in typo.output, typo.output
    assert "actor load" in " ".join(typo.output.split())
    out = tmp_path / "trace.json"
    cli.invoke(app, ["trace", name, "--out", str(out)])
    events = json.loads(out.read_text())["traceEvents"]
    named = {event["args"].get("name") for event in events if event["ph"] == "M"}
    assert {f"job {name}", "actor compute", "held by", "switches"} <= named

    def arrived() -> bool:
        jobs = [
            each.value.string_value
            for span in list(collector.spans)
            for each in span.attributes
            if each.key == "plexrl.job"
        ]
        return jobs.count(name) >= len(rows)

    wait_until(arrived, "the collector received nothing")
