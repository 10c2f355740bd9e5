"""Ctrl-C detaches a job, which can then be resumed; a second Ctrl-C cancels it."""

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from tests.cluster.tools import wait_until

SIGINT_HANDLER = """
import signal
# A test run in the background may ignore SIGINT, and its scripts inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
PATIENT = """
from plexrl.client.calls import job_exit
# A busy machine may delay the second interrupt.
job_exit.SECOND_INTERRUPT_S = 60.0
"""
TRAINING = """
import sys
import time
import numpy as np
import plexrl

def batch(step):
    rng = np.random.default_rng(step)
    rows = [rng.integers(3, 13, 6).tolist() for _ in range(8)]
    return plexrl.Batch.from_completions(rows, rows)

def train(job, steps, pause_s):
    actor = job.train_deployment("actor", plexrl.tiny_qwen2("0123456789", seed=3))
    actor.barrier().result()
    done = sum(row["kind"] == "optim_step" for row in job.operations())
    for step in range(done, steps):
        actor.forward_backward(batch(step), plexrl.losses.cross_entropy())
        actor.optim_step(learning_rate=1e-2)
        print("step", step, flush=True)
        time.sleep(pause_s)
    print(actor.save_checkpoint("end").result()["path"], flush=True)

mode, name, pause_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
with plexrl.connect() as cluster:
    begun = cluster.create_job(name, job_id=name) if mode == "create" else cluster.attach_job(name)
    with begun as job:
        train(job, 12, pause_s)
"""
WAITING = {
    "sync": """
import sys, time, plexrl
with plexrl.connect() as cluster, cluster.create_job("waits", job_id=sys.argv[1]) as job:
    print("ready", flush=True)
    time.sleep(600)
""",
    "async": """
import asyncio, sys, plexrl
async def main():
    async with await plexrl.connect_async() as cluster:
        async with await cluster.create_job("waits", job_id=sys.argv[1]) as job:
            print("ready", flush=True)
            await asyncio.sleep(600)
asyncio.run(main())
""",
}
TIMED_OUT = """
import asyncio, sys, plexrl
async def main():
    async with asyncio.timeout(None) as limit:
        async with await plexrl.connect_async() as cluster:
            async with await cluster.create_job("waits", job_id=sys.argv[1]) as job:
                limit.reschedule(0.0)
                await asyncio.sleep(600)
asyncio.run(main())
"""


def training(data_dir: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SIGINT_HANDLER + TRAINING, *words],
        env={**os.environ, "PLEXRL_DATA_DIR": str(data_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def weights(process: "subprocess.Popen[str]") -> bytes:
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return (Path(said.splitlines()[-1]) / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_an_interrupted_script_of_an_embedded_cluster_is_resumed_with_the_same_bits(
    tmp_path: Path,
) -> None:
    want = weights(training(tmp_path, "create", "straight", "0"))
    with training(tmp_path, "create", "interrupted", "600") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "step 0\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
        assert process.returncode != 0
    assert "job interrupted is detached" in errors
    assert f"plexrl.connect(data_dir={str(tmp_path)!r}).attach_job('interrupted')" in errors
    resumed = training(tmp_path, "attach", "interrupted", "0")
    assert weights(resumed) == want


HOLDING = """
import sys, time, plexrl
mode, name = sys.argv[1:]
with plexrl.connect() as cluster:
    begun = cluster.attach_job(name) if mode == "attach" else cluster.create_job(name, job_id=name)
    with begun as job:
        model = plexrl.tiny_qwen2("0123456789")
        actor = job.train_deployment("actor", model, workers=4, exclusive=True)
        actor.barrier().result(120)
        print("ready", flush=True)
        time.sleep(600 if mode == "wait" else 0)
"""


@pytest.mark.slow
def test_a_killed_scripts_job_frees_its_gpus_and_can_be_resumed(
    tmp_path: Path,
) -> None:
    """Each of the two jobs needs all GPUs of the embedded cluster."""
    environment = {**os.environ, "PLEXRL_DATA_DIR": str(tmp_path)}

    def script(*words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", HOLDING, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with script("wait", "killed") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
    for words, of_former in ((("run", "next"), True), (("attach", "killed"), False)):
        with script(*words) as process:
            said, errors = process.communicate(timeout=300)
        assert (process.returncode, said) == (0, "ready\n"), errors
        assert (
            "jobs of former scripts have not ended" in errors and "GPUs): killed" in errors
        ) == of_former


@pytest.fixture
def environment(embedded: EmbeddedCluster) -> dict[str, str]:
    return {**os.environ, "PLEXRL_URL": embedded.url, "PLEXRL_API_KEY": embedded.api_key}


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("kind", WAITING)
def test_one_interrupt_detaches_and_shows_how_to_resume_and_cancel(
    cluster: plexrl.Cluster, environment: dict[str, str], kind: str
) -> None:
    name = f"detached-{kind}"
    with subprocess.Popen(
        [sys.executable, "-c", SIGINT_HANDLER + WAITING[kind], name],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    url = cluster.url
    assert f"resume it: plexrl.connect({url!r}).attach_job({name!r})" in errors
    assert f"cancel it: plexrl cancel {name} --url {url}" in errors
    assert "press Ctrl-C" not in errors, "nobody is there to press it"
    job = cluster.attach_job(name)
    assert job.status()["ended_at"] is None
    job.cancel("no longer wanted")
    assert job.status()["state"] == "CANCELLED"


@pytest.mark.parametrize("kind", WAITING)
def test_a_second_interrupt_at_a_terminal_cancels(
    cluster: plexrl.Cluster, environment: dict[str, str], terminal: tuple[int, int], kind: str
) -> None:
    name = f"cancelled-{kind}"
    ours, theirs = terminal
    with subprocess.Popen(
        [sys.executable, "-c", SIGINT_HANDLER + PATIENT + WAITING[kind], name],
        env=environment,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        errors = ""
        while not re.search("press Ctrl-C again", errors):
            errors += os.read(ours, 4096).decode()
        process.send_signal(signal.SIGINT)
        process.wait(60)
    os.set_blocking(ours, False)
    with suppress(BlockingIOError):
        errors += os.read(ours, 65536).decode()
    job = cluster.attach_job(name, heartbeat=False)
    wait_until(lambda: job.status()["ended_at"] is not None, f"{name} lives: {errors}")
    assert job.status()["state"] == "CANCELLED"


def test_an_error_fails_the_job_and_a_timeout_is_not_an_interrupt(
    cluster: plexrl.Cluster, environment: dict[str, str]
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TIMED_OUT, "timed-out"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "TimeoutError" in ended.stderr
    assert cluster.attach_job("timed-out", heartbeat=False).status()["state"] == "FAILED"


UNFINISHED = """
import sys, plexrl
cluster = plexrl.connect()
job = cluster.create_job("unfinished", job_id=sys.argv[1])
actor = job.train_deployment("actor", plexrl.tiny_qwen2("0123456789"))
actor.load_checkpoint("of-no-such-name")
while not actor.status()["failure"]:
    pass
"""


def test_a_script_that_did_not_end_its_job_logs_a_warning_with_its_failure(
    cluster: plexrl.Cluster, environment: dict[str, str]
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", UNFINISHED, "unfinished"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "this script did not end its job unfinished" in ended.stderr
    assert "of-no-such-name" in ended.stderr
    cluster.attach_job("unfinished").cancel()
