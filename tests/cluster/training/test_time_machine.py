"""Rewinds and forks of a training: the state of the step, shared bytes, and kills in the middle."""

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.errors import (
    CheckpointNotFoundError,
    ControllerReplacedError,
    InvalidRequestError,
    UnknownJobError,
)
from tests.cluster.tools import VOCABULARY, checkpoint_weights, process_of, some_batch, wait_until

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)
STEPS, KEPT = 4, 2
SCRIPT = """
import plexrl
from tests.cluster.tools import VOCABULARY, some_batch

model = plexrl.tiny_qwen2(VOCABULARY, seed=5)
with plexrl.connect() as cluster, cluster.create_job("sweep") as job:
    actor = job.train_deployment("actor", model, checkpoint_every=2)
    rate = job.setting("learning_rate", 1e-2)
    for step in range(job.resume_step(actor), 3):
        actor.forward_backward(some_batch(step), plexrl.losses.grpo())
        actor.optim_step(learning_rate=rate).result()
        job.log(step + 1, {"reward": rate})
"""


def train(actor: plexrl.TrainDeployment, first: int) -> None:
    """The steps from `first` on; each has its own batch."""
    for step in range(first, STEPS):
        actor.forward_backward(some_batch(step), plexrl.losses.grpo())
        actor.optim_step(learning_rate=1e-2)
    actor.barrier().result(120)


def trained(cluster: plexrl.Cluster) -> tuple[plexrl.Job, plexrl.TrainDeployment]:
    """A live job that has made its steps, and has the checkpoint of one in the middle."""
    job = cluster.create_job("parent")
    actor = job.train_deployment("actor", MODEL, checkpoint_every=KEPT)
    train(actor, 0)
    kept = f"actor-step-{KEPT}"
    wait_until(
        lambda: any(
            each["name"] == kept and each["state"] == "durable" for each in job.checkpoints()
        ),
        f"there is no {kept}",
    )
    return job, actor


def loads(cluster: plexrl.Cluster, job: str) -> int:
    """Number of loads of checkpoints that have run."""
    return len(cluster.operations(job=job, kind="load_checkpoint"))


def test_a_fork_goes_on_with_the_bits_of_its_step(cluster: plexrl.Cluster) -> None:
    parent, actor = trained(cluster)
    with parent:
        wanted = checkpoint_weights(actor)
        fork = plexrl.Fork(parent.job, KEPT, {"learning_rate": 1e-3})
        with cluster.create_job("fork", fork=fork) as job:
            assert job.setting("learning_rate", 1.0) == 1e-3
            assert job.setting("clip", 0.2) == 0.2
            with pytest.raises(InvalidRequestError, match="learning_rate"):
                job.setting("learning_rate", "fast")
            forked = job.train_deployment("actor", MODEL)
            assert job.resume_step(forked) == KEPT
            train(forked, KEPT)
            assert checkpoint_weights(forked) == wanted
            assert cluster.attach_job(job.job, heartbeat=False).fork == {
                "job": parent.job,
                "step": KEPT,
                "settings": {"learning_rate": 1e-3},
            }


def test_a_rewound_job_repeats_its_steps(cluster: plexrl.Cluster) -> None:
    parent, actor = trained(cluster)
    with parent:
        wanted = checkpoint_weights(actor)
        with pytest.raises(CheckpointNotFoundError, match="actor-step-3"):
            parent.rewind(3)
        parent.rewind(KEPT)
        assert parent.resume_step(actor) == KEPT
        train(actor, KEPT)
        assert checkpoint_weights(actor, "again") == wanted


@pytest.mark.parametrize("part", ["plexrl.scheduler", "plexrl.router"])
def test_a_rewind_survives_the_kill_of_a_part(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, part: str
) -> None:
    parent, actor = trained(cluster)
    with parent:
        wanted = checkpoint_weights(actor)
        rewinding = Thread(target=parent.rewind, args=(KEPT,))
        rewinding.start()
        wait_until(lambda: has_begun(cluster, parent), "the rewind loads nothing")
        process_of(embedded, part).kill()
        rewinding.join(120.0)
        assert not rewinding.is_alive()
        assert parent.resume_step(actor) == KEPT
        train(actor, KEPT)
        assert checkpoint_weights(actor, "again") == wanted
        assert loads(cluster, parent.job) == 1


@pytest.mark.parametrize("moment", ["fenced off", "begun", "loaded"])
def test_a_rewind_that_is_killed_is_completed_by_the_next(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, moment: str
) -> None:
    parent, actor = trained(cluster)
    moments = {
        "fenced off": lambda: is_fenced_off(parent),
        "begun": lambda: has_begun(cluster, parent),
        "loaded": lambda: loads(cluster, parent.job) > 0,
    }
    wanted = checkpoint_weights(actor)
    command = [sys.executable, "-m", "plexrl", "rewind", parent.job, "--step", str(KEPT)]
    access = {"PLEXRL_URL": embedded.url, "PLEXRL_API_KEY": embedded.api_key}
    with subprocess.Popen(command, env=os.environ | access) as killed:
        wait_until(moments[moment], f"the command is not {moment}")
        killed.kill()
    parent.left.set()
    again = cluster.attach_job(parent.job)
    with again:
        again.rewind(KEPT)
        same = again.train_deployment("actor", MODEL, checkpoint_every=KEPT)
        assert again.resume_step(same) == KEPT
        train(same, KEPT)
        assert checkpoint_weights(same, "again") == wanted


def has_begun(cluster: plexrl.Cluster, job: plexrl.Job) -> bool:
    """Whether the load of a rewind is queued, runs or has run."""
    status = cluster.attach_job(job.job, heartbeat=False).deployment_status("actor")
    return bool(status["pending"] or status["running"] or loads(cluster, job.job))


def is_fenced_off(job: plexrl.Job) -> bool:
    """Whether another controller has the job."""
    try:
        job._transport.ask("POST", f"/v1/jobs/{job.job}/heartbeat")
    except ControllerReplacedError:
        return True
    return False


def test_a_rollout_of_a_fork_gets_its_weights_also_after_the_controllers_kill(
    cluster: plexrl.Cluster,
) -> None:
    parent, _ = trained(cluster)
    with parent:
        fork = plexrl.Fork(parent.job, KEPT)
        job = cluster.create_job("fork", fork=fork)
        assert job.resume_step(job.train_deployment("actor", MODEL)) == KEPT
        # As a controller that was killed here: the next one does the same.
        with cluster.create_job("fork", job_id=job.job, fork=fork) as again:
            assert again.resume_step(again.train_deployment("actor", MODEL)) == KEPT
            rollout = again.rollout_deployment("rollout", MODEL)
            rollout.barrier().result(120)
            assert len(cluster.operations(job=job.job, kind="sync_weights")) == 1
        job.left.set()


def test_a_controller_that_is_started_again_loads_once(cluster: plexrl.Cluster) -> None:
    parent, _ = trained(cluster)
    with parent:
        fork = plexrl.Fork(parent.job, KEPT)
        job = cluster.create_job("fork", fork=fork)
        first = job.train_deployment("actor", MODEL)
        # As a controller that was killed here: the next one does the same.
        with cluster.create_job("fork", job_id=job.job, fork=fork) as again:
            second = again.train_deployment("actor", MODEL)
            assert again.resume_step(second) == KEPT
            assert second.deployment == first.deployment
            assert loads(cluster, job.job) == 1
        job.left.set()


@pytest.mark.parametrize("part", ["plexrl.scheduler", "plexrl.router"])
def test_forks_survive_the_kill_of_a_part(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, part: str
) -> None:
    parent, actor = trained(cluster)
    with parent:
        wanted = checkpoint_weights(actor)
        with cluster.create_job("fork", fork=plexrl.Fork(parent.job, KEPT)) as job:
            process_of(embedded, part).kill()
            forked = job.train_deployment("actor", MODEL)
            process_of(embedded, part).kill()
            assert job.resume_step(forked) == KEPT
            train(forked, KEPT)
            assert checkpoint_weights(forked) == wanted
            assert loads(cluster, job.job) == 1


def test_eight_forks_take_the_bytes_of_one_checkpoint(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster
) -> None:
    parent, _ = trained(cluster)
    root = Path(embedded.data_dir) / "checkpoints"
    with parent:
        parts = [f"actor-step-{KEPT}"]
        alone = stored(root, [(parent.job, parts[0])])
        jobs = [cluster.create_job("fork", fork=plexrl.Fork(parent.job, KEPT)) for _ in range(8)]
        for job in jobs:
            job._transport.ask(
                "POST",
                f"/v1/jobs/{parent.job}/checkpoints/{parts[0]}/share",
                body={"job": job.job, "name": "base"},
            )
        shared = stored(root, [(parent.job, parts[0]), *((job.job, "base") for job in jobs)])
        assert shared == alone
        parent.delete_checkpoint(parts[0])
        assert stored(root, [(job.job, "base") for job in jobs]) == alone
        for job in jobs:
            job.cancel()


def stored(root: Path, checkpoints: list[tuple[str, str]]) -> int:
    """Bytes of these checkpoints, each file once."""
    found = [
        path.stat()
        for job, name in checkpoints
        for path in (root / job / name).rglob("*")
        if path.is_file()
    ]
    assert len(found) >= 3 * len(checkpoints)
    return sum({each.st_ino: each.st_size for each in found}.values())


def test_a_fork_of_a_stranger_or_of_a_missing_step_is_refused(cluster: plexrl.Cluster) -> None:
    with pytest.raises(UnknownJobError):
        cluster.create_job("fork", fork=plexrl.Fork("nobody", KEPT))
    parent, _ = trained(cluster)
    with parent, cluster.create_job("fork", fork=plexrl.Fork(parent.job, 3)) as job:
        with pytest.raises(CheckpointNotFoundError):
            job.train_deployment("actor", MODEL)
        job.cancel()


def test_the_commands_fork_a_sweep_and_show_its_family(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "sweep.py"
    script.write_text(SCRIPT)
    parent, _ = trained(cluster)
    access = {"PLEXRL_URL": embedded.url, "PLEXRL_API_KEY": embedded.api_key}
    environment = {**os.environ, **access, "PYTHONPATH": str(Path.cwd())}

    def plexrl_command(*words: str) -> str:
        command = [sys.executable, "-m", "plexrl", *words]
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=200
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    with parent:
        parent.log(1, {"reward": 0.5})
        words = ("fork", parent.job, str(script), "--step", str(KEPT), "--count", "2", "--json")
        forks = json.loads(plexrl_command(*words, "--set", "learning_rate=0.001,0.002"))
        assert [each["exit_code"] for each in forks] == [0, 0]
        family = json.loads(plexrl_command("metrics", parent.job, "--family", "--json"))
        rewards = {each["job"]: each["rows"][-1]["values"]["reward"] for each in family}
        assert rewards == {parent.job: 0.5, forks[0]["job"]: 0.001, forks[1]["job"]: 0.002}
        assert parent.job in plexrl_command("metrics", parent.job, "--family", "-m", "reward")
        plexrl_command("rewind", parent.job, "--step", str(KEPT))
        parent.left.set()
    cluster.attach_job(parent.job).cancel()
