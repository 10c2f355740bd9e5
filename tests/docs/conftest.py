"""A cluster for the documentation's commands and snippets, with a job that has done something."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import plexrl
from tests.cluster.tools import VOCABULARY, some_batch
from tests.docs.pages import ROOT

ANSWER_S = 120.0
TENANT = "team"


@dataclass(frozen=True, slots=True, kw_only=True)
class Docs:
    """What the pages' commands run against."""

    folder: Path
    """Where they run, page after page."""
    url: str
    api_key: str
    job: str
    """A job that is under way, and has metrics and a checkpoint."""
    environment: dict[str, str]

    def placeholders(self, words: Sequence[str]) -> dict[str, str]:
        """What stands in a command that runs now for each word that is left to the reader."""
        job = self._another_job() if "cancel" in words else self.job
        return {"JOB": job, "NAME": TENANT, "KEYID": self._spare_key(), "NODE": "node0"}

    def _another_job(self) -> str:
        """One that may end."""
        with plexrl.connect(self.url, self.api_key) as cluster:
            return cluster.create_job("another").job

    def _spare_key(self) -> str:
        """Of the tenant's keys, the one made last."""
        with plexrl.connect(self.url, self.api_key) as cluster:
            cluster.rotate_key(TENANT)
            return str(cluster.tenant_keys(TENANT)[-1]["key"])


@pytest.fixture(scope="session")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docs]:
    """A cluster as `plexrl up` starts it."""
    folder = tmp_path_factory.mktemp("docs")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",
    }
    command = [*("plexrl", "up", "--data-dir", str(folder / "cluster"), "--port", "0", "--json")]
    command += ["--gpus-per-node", "8"]
    running = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout is not None
        said = json.loads(running.stdout.readline())
        with (
            plexrl.connect(said["url"], said["api_key"]) as cluster,
            cluster.create_job("docs") as job,
        ):
            cluster.create_tenant(TENANT)
            train(job)
            yield Docs(
                folder=folder,
                url=said["url"],
                api_key=said["api_key"],
                job=job.job,
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
    """A step of a job, with all that commands show of one."""
    model = plexrl.tiny_qwen2(VOCABULARY)
    actor = job.train_deployment("actor", model)
    rollout = job.rollout_deployment("rollout", model)
    for step in range(2):
        actor.forward_backward(some_batch(step), plexrl.losses.grpo())
        actor.optim_step(learning_rate=1e-3)
        rollout.sync_weights(actor).result(ANSWER_S)
        job.log(step, {"reward/mean": 0.5 + 0.1 * step})
    actor.save_checkpoint("step2", step=2).result(ANSWER_S)
