"""A controller that reads no futures sees every failure; one that resumes trains correctly."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import plexrl
from plexrl import errors
from plexrl.cli.app import app
from plexrl.cluster.embedded.start import EmbeddedCluster
from tests.cluster.tools import VOCABULARY, checkpoint_weights, some_batch, wait_until

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=6)
DIVERGING: dict[str, Any] = {"learning_rate": 1.0, "beta2": 0.0, "eps": 1e-20, "divide_by": 1e18}
"""After a step with a `beta2` of 0: divides the first moment by gradients of almost 0."""

UNREAD = """
import sys
import plexrl

model = plexrl.tiny_qwen2("0123456789sr=", seed=6)
with plexrl.connect() as cluster, cluster.create_job("unread", job_id=sys.argv[1]) as job:
    actor = job.train_deployment("actor", model)
    rollout = job.rollout_deployment("rollout", model)
    prompts = [[3, 4, 5], [6, 7]]
    for step in range(int(sys.argv[3])):
        sampling = plexrl.SamplingParams(max_tokens=4, seed=step)
        samples = rollout.generate(prompts, n=2, sampling=sampling).result().samples
        if sys.argv[4] == "grpo":
            batch = plexrl.Batch.from_samples(prompts, samples, [[1.0, -1.0], [-1.0, 1.0]])
            actor.forward_backward(batch, plexrl.losses.grpo())
        else:
            completions = [group[0].tokens for group in samples]
            batch = plexrl.Batch.from_completions(prompts, completions)
            actor.forward_backward(batch, plexrl.losses.cross_entropy())
        rate, divisor = float(sys.argv[2]), 1e18 if sys.argv[5] and step == 1 else 1.0
        actor.optim_step(learning_rate=rate, beta2=0.0, eps=1e-20, divide_by=divisor)
        rollout.sync_weights(actor)
        actor.save_checkpoint(f"step{step}")
"""


def environment(embedded: EmbeddedCluster) -> dict[str, str]:
    return {**os.environ, "PLEXRL_URL": embedded.url, "PLEXRL_API_KEY": embedded.api_key}


def run_unread(
    embedded: EmbeddedCluster, job: str, steps: int, loss: str, *, diverges: bool
) -> "subprocess.CompletedProcess[str]":
    """A training loop as in the README, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", UNREAD, job, "1e-3", str(steps), loss, "1" * diverges],
        env=environment(embedded),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    ("steps", "loss"),
    # The second step yields finite weights whose forward pass overflows.
    [(6, "cross_entropy"), (6, "grpo"), (2, "grpo")],
)
def test_a_loop_that_reads_no_futures_fails_loudly_when_it_diverges(
    embedded: EmbeddedCluster,
    cluster: plexrl.Cluster,
    steps: int,
    loss: str,
) -> None:
    name = f"unread-{steps}-{loss}"
    ended = run_unread(embedded, name, steps, loss, diverges=True)
    assert ended.returncode != 0, ended.stderr
    assert "EarlierFailureError" in ended.stderr
    job = cluster.attach_job(name, heartbeat=False)
    assert job.status()["state"] == "FAILED"
    # The daemon goes on to write those of a job that has failed.
    wait_until(
        lambda: {each["state"] for each in job.checkpoints()} <= {"durable"},
        "a checkpoint did not become durable",
    )
    for checkpoint in job.checkpoints():
        saved = load_file(Path(checkpoint["path"]) / "model.safetensors")
        assert all(np.isfinite(tensor).all() for tensor in saved.values())


def test_a_loop_that_reads_no_futures_completes_with_all_of_its_steps(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster
) -> None:
    ended = run_unread(embedded, "unread-well", 2, "grpo", diverges=False)
    assert ended.returncode == 0, ended.stderr
    job = cluster.attach_job("unread-well", heartbeat=False)
    assert job.status()["state"] == "COMPLETED"
    log = job.operations()
    assert [row["state"] for row in log if row["kind"] == "optim_step"] == ["finished"] * 2
    assert [row["state"] for row in log if row["kind"] == "save_checkpoint"] == ["finished"] * 2


@pytest.mark.parametrize("options", [{"workers": 2}, {"backend": "deepspeed", "workers": 2}])
def test_a_step_to_non_finite_weights_is_undone(
    job: plexrl.Job, options: dict[str, object]
) -> None:
    actor = job.train_deployment("actor", MODEL, **options)  # type: ignore[arg-type]
    actor.forward_backward(some_batch(1), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-3, beta2=0.0)
    before = checkpoint_weights(actor, "before")
    norm = actor.forward_backward(some_batch(1), plexrl.losses.grpo())
    step = actor.optim_step(**DIVERGING)

    def save() -> None:
        # The submission fails, or its future if it was queued before the step had failed.
        actor.save_checkpoint("never").result()

    with pytest.raises(errors.EarlierFailureError, match="optim_step") as caught:
        save()
    assert isinstance(caught.value.__cause__, errors.NonFiniteWeightsError)
    with pytest.raises(errors.NonFiniteWeightsError, match="parameter 'model"):
        step.result()
    assert norm.result().metrics["tokens"] > 0
    assert checkpoint_weights(actor, "after") == before
    # Its gradients are those before the step.
    assert actor.status()["waiting_gradients"] == 1
    assert 0 < actor.optim_step(learning_rate=1e-3).result().metrics["grad_norm"] < 1e3


def test_the_next_call_raises_a_failure_until_recover_is_called(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    reference = job.reference_deployment("reference", MODEL)
    huge = plexrl.Batch([[3, 4, 5]], {"weights": [[0, 3e38, 3e38]]})
    actor.forward_backward(huge, plexrl.losses.custom())
    actor.optim_step(learning_rate=0.1)
    # A barrier only waits and reports nothing; operations that change the model do.
    actor.barrier().result()
    with pytest.raises(errors.EarlierFailureError) as caught:
        actor.forward_backward(some_batch(1), plexrl.losses.grpo())
    assert isinstance(caught.value.__cause__, errors.NonFiniteGradientError)

    def twice() -> None:
        # The first response reports the failure, unless an earlier one did.
        reference.barrier()
        reference.barrier()

    with pytest.raises(errors.EarlierFailureError):
        twice()
    with pytest.raises(errors.EarlierFailureError):
        job.log(1, {"reward": 0.0})
    actor.recover()
    actor.forward_backward(some_batch(1), plexrl.losses.grpo())
    assert actor.optim_step(learning_rate=1e-3).result().metrics["grad_norm"] < 1e3


def test_a_block_raises_if_its_job_ended_with_another_outcome(
    cluster: plexrl.Cluster,
) -> None:
    def ended_by_another() -> None:
        with cluster.create_job("ended") as job:
            cluster.attach_job(job.job, heartbeat=False).finish("failed", "it was in the way")

    with pytest.raises(errors.JobEndedError, match="in the way"):
        ended_by_another()
    with cluster.create_job("own") as job:
        job.finish("failed", "enough")


def test_an_async_controller_sees_failures_too(embedded: EmbeddedCluster) -> None:
    async def diverge() -> None:
        async with (
            await plexrl.connect_async(embedded.url, embedded.api_key) as cluster,
            await cluster.create_job("async") as job,
        ):
            actor = await job.train_deployment("actor", MODEL)
            huge = plexrl.Batch([[3, 4, 5]], {"weights": [[0, 3e38, 3e38]]})
            await actor.forward_backward(huge, plexrl.losses.custom())
            with pytest.raises(errors.NonFiniteGradientError):
                await (await actor.optim_step(learning_rate=0.1))
            await actor.forward_backward(huge, plexrl.losses.custom())
            await actor.optim_step(learning_rate=0.1)
            await (await actor.barrier())
            with pytest.raises(errors.EarlierFailureError):
                await actor.zero_grad()
            await actor.recover()
            await (await actor.zero_grad())
            await actor.forward_backward(huge, plexrl.losses.custom())
            await actor.optim_step(learning_rate=0.1)

    with pytest.raises(errors.EarlierFailureError):
        asyncio.run(diverge())


def test_operations_and_usage_show_failures(embedded: EmbeddedCluster, job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    huge = plexrl.Batch([[3, 4, 5]], {"weights": [[0, 3e38, 3e38]]})
    with pytest.raises(errors.NonFiniteGradientError):
        actor.forward_backward(huge, plexrl.losses.custom()).result()
    (row,) = [each for each in job.operations() if each["kind"] == "forward_backward"]
    assert row["error"] is not None
    assert (row["state"], row["error"]["code"]) == ("failed", "non_finite_gradient")
    env = {"COLUMNS": "250", **environment(embedded)}
    shown = CliRunner().invoke(app, ["operations", job.job], env=env).output
    line = next(each for each in shown.splitlines() if "forward_backward" in each)
    assert "failed" in line
    assert "non_finite_gradient" in shown
    counted = CliRunner().invoke(app, ["usage", "--csv"], env=env).output
    (line,) = [each for each in counted.splitlines() if job.job in each]
    assert line.split(",")[5] == "1"


HALF_A_STEP = """
import sys, time
import plexrl
from tests.cluster.tools import some_batch

with plexrl.connect() as cluster:
    job = cluster.create_job("resumed", job_id=sys.argv[1])
    actor = job.train_deployment("actor", plexrl.tiny_qwen2("0123456789sr=", seed=6), workers=2)
    actor.forward_backward(some_batch(3), plexrl.losses.grpo()).result()
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("keep_gradients", [False, True])
def test_attaching_drops_gradients_of_the_earlier_controller(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, keep_gradients: bool
) -> None:
    with cluster.create_job("undisturbed") as job:
        actor = job.train_deployment("actor", MODEL, workers=2)
        actor.forward_backward(some_batch(3), plexrl.losses.grpo())
        wanted = actor.optim_step(learning_rate=1e-3).result().metrics["grad_norm"]
    name = f"resumed-{keep_gradients}"
    root = str(Path(__file__).parents[3])
    controller = subprocess.Popen(
        [sys.executable, "-c", HALF_A_STEP, name],
        env={**environment(embedded), "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout is not None
    assert controller.stdout.readline() == "ready\n"
    controller.kill()
    controller.wait()
    controller.stdout.close()
    with cluster.attach_job(name, keep_gradients=keep_gradients) as job:
        assert job.gradients_found == {f"{name}/actor": 1}
        actor = job.train_deployment("actor", MODEL, workers=2)
        actor.forward_backward(some_batch(3), plexrl.losses.grpo())
        found = actor.optim_step(learning_rate=1e-3).result().metrics["grad_norm"]
    assert found == pytest.approx(2 * wanted if keep_gradients else wanted, rel=1e-5)


def test_a_replaced_controller_gets_an_error(
    cluster: plexrl.Cluster,
) -> None:
    first = cluster.create_job("two")
    actor = first.train_deployment("actor", MODEL)
    future = actor.barrier()
    with cluster.attach_job(first.job) as second:
        for call in (actor.barrier, future.result, first.status, first.finish, actor.recover):
            with pytest.raises(errors.ControllerReplacedError, match="another controller"):
                call()
        with pytest.raises(errors.ControllerReplacedError):
            first.train_deployment("other", MODEL)
        watched = cluster.attach_job(first.job, heartbeat=False)
        assert watched.status()["state"] != "FAILED"
        second.train_deployment("actor", MODEL).barrier().result()
    assert watched.status()["state"] == "COMPLETED"
