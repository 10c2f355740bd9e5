"""A job's run is tracked, sampled and watched, from the SDK to the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import plexrl
from plexrl.cli.app import app
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.errors import ConflictError, InvalidRequestError, NotFoundError
from tests.cluster.tools import VOCABULARY

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PLEXRL_TRACKERS", "tensorboard")
    monkeypatch.setenv("PLEXRL_TRACKER_DIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


def tracked_steps(folder: Path) -> list[tuple[int, int]]:
    """Step and row of each row in TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), {"scalars": 0}, purge_orphaned_data=False)
    found.Reload()
    return sorted((row.step, int(row.value)) for row in found.Scalars("plexrl/row"))


def command(embedded: EmbeddedCluster, *arguments: str) -> str:
    access = {"PLEXRL_URL": embedded.url, "PLEXRL_API_KEY": embedded.api_key}
    done = CliRunner().invoke(app, list(arguments), env=access, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_tracked_job_goes_on_in_one_run(cluster: plexrl.Cluster, tracked: Path) -> None:
    job = cluster.create_job("tracked")
    job.log(1, {"loss": 1.0})
    job.log(2, {"loss": 0.5})
    job.detach()
    with cluster.attach_job(job.job) as again:
        actor = again.train_deployment("actor", MODEL)
        assert again.resume_step(actor) == 0
        again.log(1, {"loss": 0.7})
    assert tracked_steps(tracked / job.job) == [(1, 1), (1, 3), (2, 2)]
    rows = again.metrics()
    assert [row.get("rewinds_from") for row in rows] == [None, None, 2]
    assert again.metrics(after=2)[0]["rewinds_from"] == 2


def test_a_tracked_job_goes_on_in_its_rows_of_an_earlier_version(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, tracked: Path
) -> None:
    job = cluster.create_job("upgraded")
    job.log(1, {"loss": 1.0})
    job.detach()
    [rows] = embedded.data_dir.glob(f"metrics/*/{job.job}/rows.jsonl")
    rows.rename(embedded.data_dir / "metrics" / f"{job.job}.jsonl")
    with cluster.attach_job(job.job) as again:
        again.log(2, {"loss": 0.7})
    assert [row["index"] for row in again.metrics()] == [1, 2]
    assert tracked_steps(tracked / job.job) == [(1, 1), (2, 2)]


def test_a_replaced_controller_leaves_its_trackers(cluster: plexrl.Cluster, tracked: Path) -> None:
    former = cluster.create_job("replaced")
    former.log(1, {"loss": 1.0})
    with cluster.attach_job(former.job) as job:
        job.log(2, {"loss": 0.5})
    assert tracked_steps(tracked / job.job) == [(1, 1), (2, 2)]
    former._leave()


def test_a_sick_run_is_named_and_its_samples_are_shown(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidRequestError, match="no threshold 'length'"):
        cluster.create_job("sick", run_warnings={"length": 1.0})
    with cluster.create_job("sick", run_warnings={"failed_rewards": 0.2}) as job:
        rollout = job.rollout_deployment("rollout", MODEL)
        sampling = plexrl.SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
        drawn = rollout.generate([[3, 4]], n=32, sampling=sampling).result(120).samples[0]
        with pytest.raises(NotFoundError, match="log_samples"):
            job.samples()
        with pytest.raises(InvalidRequestError, match="32 samples and 1 texts"):
            job.log_samples(1, drawn, ["one"], [1.0] * 32)
        rewards = [None] * 8 + [float("nan")] * 8 + [np.float32(0.5)] * 16
        job.log_samples(1, drawn, ["text"] * 32, rewards, ["3+4="] * 32)
        # The watch runs beside the operations; a router answers what it has seen so far.
        while len(job.status()["health"]["warnings"]) < 2:
            pass
        job.log(1, {"loss": 1.0})
        job.log(2, {"loss": 1.0})
        seen = job.status()["health"]
        assert {"ended_by_length", "failed_rewards"} <= {w["code"] for w in seen["warnings"]}
        assert caplog.text.count("run warning (ended_by_length): 100% of the samples") == 1
        assert "Warning (failed_rewards): 50% of the rewards" in command(
            embedded, "explain", job.job
        )
        assert "Warning (ended_by_length)" in command(embedded, "jobs", job.job)
        text = command(embedded, "samples", job.job)
        assert "10 of 32 samples. Steps with samples: 1, from 1 to 1." in text
        assert "1. reward failed, 20 tokens, ended by length" in text
        shown = json.loads(command(embedded, "samples", job.job, "--step", "1", "--json"))
        assert [shown["steps"], shown["samples"][16]["reward"]] == [[1], 0.5]


def test_checkpoints_are_shown_and_the_newest_kept(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster
) -> None:
    with cluster.create_job("kept") as job:
        actor = job.train_deployment("actor", MODEL)
        for step in (1, 2, 3):
            actor.save_checkpoint(f"step-{step}", step=step).result(120)
        shown = json.loads(command(embedded, "checkpoints", "show", job.job, "step-2", "--json"))
        assert (shown["step"], shown["state"]) == (2, "durable")
        assert "config.json" in [file["path"] for file in shown["files"]]
        assert "step 2, durable" in command(embedded, "checkpoints", "show", job.job, "step-2")
        text = command(embedded, "checkpoints", "keep", job.job, "2")
        assert "step-1 is deleted" in text
        assert "has 2 complete checkpoints" in text
        assert [each["name"] for each in job.checkpoints()] == ["step-2", "step-3"]
    text = command(embedded, "logs", "-f", job.job)
    assert f"{job.job}/actor rank 0 on " in text


def test_the_starter_project_runs(embedded: EmbeddedCluster, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    assert "train.py" in command(embedded, "init", str(folder))
    access = {"PLEXRL_URL": embedded.url, "PLEXRL_API_KEY": embedded.api_key}
    done = subprocess.run(
        [sys.executable, "train.py", "--steps", "2", "--prompts", "4", "--samples", "4"],
        cwd=folder,
        env={**os.environ, **access, "PLEXRL_TRACKERS": "tensorboard"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step 2/2  reward/mean" in done.stdout
    assert len(list((folder / "runs").glob("sort-digits-*/events*"))) == 1
    again = CliRunner().invoke(app, ["init", str(folder)])
    assert isinstance(again.exception, ConflictError)


def test_the_watch_is_switched_off_by_one_switch(cluster: plexrl.Cluster) -> None:
    with cluster.create_job("unwatched", run_warnings=False) as job:
        job.log_samples(1, [], [], [])
        assert job.status()["health"] == {
            "watched": False,
            "warnings": [],
            "figures": {},
            "kl": {},
        }
