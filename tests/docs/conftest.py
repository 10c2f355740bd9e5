"""A cluster for the commands and snippets of the documentation, with jobs that have results."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import plexrl
from tests.cluster.tools import VOCABULARY, some_batch
from tests.docs.pages import ROOT

ANSWER_S = 120.0
TENANT = "team"
SPARE_CHECKPOINT = "step1"
"""A checkpoint that tests may delete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Docs:
    """The cluster that commands and snippets use, and its jobs."""

    folder: Path
    """Working directory of the commands of all pages."""
    data_dir: Path
    """Data directory of the cluster."""
    url: str
    api_key: str
    job: str
    """A running job with metrics and checkpoints."""
    failed_job: str
    """A failed job with metrics."""
    environment: dict[str, str]

    def placeholders(self, words: Sequence[str]) -> dict[str, str]:
        """Values for the placeholders in `words`."""
        makers: dict[str, Callable[[], str]] = {
            "JOB": lambda: self._job_for(words),
            "JOB2": self._another_job,
            "NAME": lambda: SPARE_CHECKPOINT if "checkpoints" in words else TENANT,
            "KEYID": self._spare_key,
            "NODE": lambda: "node0",
        }
        return {word: make() for word, make in makers.items() if word in words}

    def _job_for(self, words: Sequence[str]) -> str:
        if "cancel" in words:
            return self._another_job()
        return self.failed_job if "--follow" in words else self.job

    def _another_job(self) -> str:
        """A new job that tests may end."""
        with plexrl.connect(self.url, self.api_key) as cluster:
            return cluster.create_job("another").job

    def _spare_key(self) -> str:
        """The newest key of the tenant."""
        with plexrl.connect(self.url, self.api_key) as cluster:
            cluster.rotate_key(TENANT)
            return str(cluster.tenant_keys(TENANT)[-1]["key"])


@pytest.fixture(scope="session")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docs]:
    """A cluster that `plexrl up` started."""
    folder = tmp_path_factory.mktemp("docs")
    data_dir = folder / "cluster"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",
    }
    command = [*("plexrl", "up", "--data-dir", str(data_dir), "--port", "0", "--json")]
    command += ["--virtual-gpus", "8", "--policy", "pack"]
    running = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout is not None
        said = json.loads(running.stdout.readline())
        said["api_key"] = Path(said["key_file"]).read_text()
        with (
            plexrl.connect(said["url"], said["api_key"]) as cluster,
            cluster.create_job("docs") as job,
        ):
            cluster.create_tenant(TENANT)
            train(job)
            failed = fail(cluster)
            yield Docs(
                folder=folder,
                data_dir=data_dir,
                url=said["url"],
                api_key=said["api_key"],
                job=job.job,
                failed_job=failed,
                environment={
                    **environment,
                    "PLEXRL_URL": said["url"],
                    "PLEXRL_API_KEY": said["api_key"],
                },
            )
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(ANSWER_S)
        assert running.stdout is not None
        running.stdout.close()


def train(job: plexrl.Job) -> None:
    """Run two steps of a job, so that every command has something to show."""
    model = plexrl.tiny_qwen2(VOCABULARY)
    actor = job.train_deployment("actor", model)
    rollout = job.rollout_deployment("rollout", model)
    for step in range(2):
        actor.forward_backward(some_batch(step), plexrl.losses.grpo())
        actor.optim_step(learning_rate=1e-3)
        rollout.sync_weights(actor).result(ANSWER_S)
        job.log(step, {"reward/mean": 0.5 + 0.1 * step, "loss": 0.1})
        sampling = plexrl.SamplingParams(max_tokens=2, seed=step)
        sample = rollout.generate([[1, 2]], n=1, sampling=sampling).result(ANSWER_S).samples[0][0]
        job.log_samples(step, [sample], ["12"], [0.5])
    actor.save_checkpoint(SPARE_CHECKPOINT, step=1)
    actor.save_checkpoint("step2", step=2).result(ANSWER_S)


def fail(cluster: plexrl.Cluster) -> str:
    """Run a job that logs a row and fails."""
    job = cluster.create_job("broken")
    job.log(1, {"reward/mean": 0.0})
    job.finish("failed", "no reward")
    return job.job
