"""`kill -9` of any process: no accepted operation is lost or applied twice."""

import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.process.folders.folders import Folders
from tests.cluster.tools import (
    VOCABULARY,
    checkpoint_weights,
    kill_worker,
    process_of,
    rank_process,
    train,
    wait_until,
    weights_after,
)

STEPS = 6
MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=6)


@pytest.fixture(scope="module")
def undisturbed(embedded: EmbeddedCluster) -> bytes:
    return weights_after(embedded, MODEL, STEPS)


# The next test kills rank 0.
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_workers_job_continues_with_every_step_applied_once(
    cluster: plexrl.Cluster, undisturbed: bytes, rank: int
) -> None:
    with cluster.create_job("victim") as job, cluster.create_job("bystander") as other:
        actor = job.train_deployment("actor", MODEL, workers=2)
        bystander = other.train_deployment("actor", MODEL, workers=2)
        waiting = []
        for step in range(STEPS):
            waiting.append(train(actor, step))
            bystander.barrier()
            if step == STEPS // 2:
                waiting[-1].result()
                kill_worker(actor, rank)
        for future in waiting:
            future.result(120)
        weights = checkpoint_weights(actor)
        assert actor.status()["incarnation"] == 2
        assert bystander.status()["incarnation"] == 1
    assert weights == undisturbed


@pytest.mark.slow
def test_a_worker_killed_with_operations_queued_loses_none(
    cluster: plexrl.Cluster, undisturbed: bytes
) -> None:
    with cluster.create_job("victim") as job:
        actor = job.train_deployment("actor", MODEL, workers=2)
        actor.barrier().result()
        waiting = [train(actor, step) for step in range(STEPS)]
        kill_worker(actor, 0)
        for future in waiting:
            future.result(120)
        weights = checkpoint_weights(actor)
    assert weights == undisturbed


def test_a_killed_rollout_worker_restarts_with_its_synced_weights(
    cluster: plexrl.Cluster,
) -> None:
    with cluster.create_job("victim") as job:
        actor = job.train_deployment("actor", MODEL, workers=2)
        rollout = job.rollout_deployment("rollout", MODEL)
        train(actor, 0)
        rollout.sync_weights(actor).result()
        sampling = plexrl.SamplingParams(max_tokens=6, seed=2)
        before = rollout.generate([[3, 4, 5]], n=4, sampling=sampling).result()
        kill_worker(rollout, 0)
        after = rollout.generate([[3, 4, 5]], n=4, sampling=sampling).result(120)
    assert [s.tokens for s in after.samples[0]] == [s.tokens for s in before.samples[0]]


@pytest.mark.parametrize(
    ("module", "killed_at"),
    [
        ("plexrl.statemanager", (2, 4)),
        # The next test kills both at worse moments.
        pytest.param("plexrl.router", (2, 4), marks=pytest.mark.slow),
        pytest.param("plexrl.scheduler", (2, 4), marks=pytest.mark.slow),
        # Its successor has to load torch. `test_workers_die_with_their_agent_…` kills one, too.
        pytest.param("plexrl.worker", (3,), marks=pytest.mark.slow),
    ],
)
def test_a_killed_part_is_restarted_without_lost_or_repeated_operations(
    embedded: EmbeddedCluster,
    cluster: plexrl.Cluster,
    undisturbed: bytes,
    module: str,
    killed_at: tuple[int, ...],
) -> None:
    with cluster.create_job("patient") as job, cluster.create_job("other") as second:
        actor = job.train_deployment("actor", MODEL, workers=2)
        other = second.train_deployment("actor", MODEL, workers=2)
        waiting = []
        for step in range(STEPS):
            waiting.append(train(actor, step))
            other.barrier()
            if step in killed_at:
                process_of(embedded, module).send_signal(signal.SIGKILL)
        for future in waiting:
            future.result(120)
        weights = checkpoint_weights(actor)
    assert weights == undisturbed


def test_parts_killed_while_the_journal_commits_lose_and_repeat_nothing(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, undisturbed: bytes
) -> None:
    """The payload is with the router or already with the workers; the commit waits for a lock."""
    killed = {2: "plexrl.router", 4: "plexrl.scheduler"}
    blobs = embedded.data_dir / "blobs"
    with cluster.create_job("between") as job:
        actor = job.train_deployment("actor", MODEL, workers=2)
        for step in range(STEPS):
            if step not in killed:
                train(actor, step).result(120)
                continue
            with (
                closing(
                    sqlite3.connect(embedded.data_dir / "journal.sqlite", isolation_level=None)
                ) as journal,
                ThreadPoolExecutor(1) as threads,
            ):
                journal.execute("BEGIN IMMEDIATE")
                former = set(blobs.glob("*.in"))
                training = threads.submit(train, actor, step)
                wait_until(partial(_has_more, blobs, former), "no payload arrives")
                process_of(embedded, killed[step]).send_signal(signal.SIGKILL)
                journal.rollback()
                training.result(120).result(120)
        weights = checkpoint_weights(actor)
    assert weights == undisturbed


def _has_more(blobs: Path, former: set[Path]) -> bool:
    return set(blobs.glob("*.in")) > former


RANKS_THAT_DIE = """
import os, sys, torch.distributed as dist
rank = int(os.fork() == 0)
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
if not rank:
    assert os.wait()[1] == 0
os._exit(0)
"""


def test_ranks_do_not_wait_for_ranks_of_a_dead_agent(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster
) -> None:
    name = hashlib.sha256(b"again/actor").hexdigest()[:12]
    meeting_place = Folders.of(embedded.data_dir).run / f"r-{name}-1"
    # As after `kill -9` of an agent whose workers have just connected.
    command = [sys.executable, "-c", RANKS_THAT_DIE, str(meeting_place)]
    subprocess.run(command, check=True, timeout=60)
    assert meeting_place.exists()
    with cluster.create_job("again", job_id="again") as job:
        actor = job.train_deployment("actor", MODEL, workers=2)
        actor.barrier().result(60)
        assert actor.status()["incarnation"] == 1


def test_workers_die_with_their_agent_and_a_checkpoint_is_awaited_while_it_restarts(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster
) -> None:
    with cluster.create_job("orphans") as job:
        actor = job.train_deployment("actor", MODEL, workers=2)
        actor.barrier().result()
        agent = process_of(embedded, "plexrl.worker")
        below = [*agent.children(), *(rank_process(actor, rank) for rank in range(2))]
        assert len(below) >= 3, "the fork server and two workers"
        saving = actor.save_checkpoint("kept")
        seq = saving.pinned(60)["seq"]
        agent.kill()
        wait_until(lambda: not any(p.is_running() for p in below), "workers outlive their agent")
        saved = saving.result(120)
        assert (saved["seq"], saved["durable"]) == (seq, True)
        actor.barrier().result(120)


CONTROLLER = """
import sys, time, plexrl
with plexrl.connect() as cluster:
    job = cluster.create_job(
        "orphan",
        job_id=sys.argv[1],
        controller_timeout_s=3.0,
        reattach_timeout_s=float(sys.argv[2]),
    )
    actor = job.train_deployment("actor", plexrl.tiny_qwen2("0123456789sr=", seed=6))
    actor.barrier().result()
    print("ready", flush=True)
    time.sleep(600)
"""


def orphan(embedded: EmbeddedCluster, job: str, reattach_timeout_s: float) -> None:
    """Start a controller, and kill it once its job runs."""
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, job, str(reattach_timeout_s)],
        env={**os.environ, "PLEXRL_URL": embedded.url, "PLEXRL_API_KEY": embedded.api_key},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout is not None
    assert controller.stdout.readline() == "ready\n"
    controller.kill()
    controller.wait()
    controller.stdout.close()


def test_the_job_of_a_dead_controller_can_be_attached_again(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster
) -> None:
    orphan(embedded, "orphan-1", 300.0)
    watched = cluster.attach_job("orphan-1", heartbeat=False)
    wait_until(lambda: not watched.status()["attached"], "the job was never detached")
    with cluster.attach_job("orphan-1") as job:
        assert job.status()["attached"]
        actor = job.train_deployment("actor", MODEL)
        rollout = job.rollout_deployment("rollout", MODEL)
        assert job.rollout_deployment("rollout", MODEL).deployment == rollout.deployment
        assert train(actor, 0).result().metrics["grad_norm"] > 0
    assert watched.status()["state"] == "COMPLETED"


def test_the_job_of_a_dead_controller_ends_if_nobody_attaches(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster
) -> None:
    orphan(embedded, "orphan-2", 0.5)
    watched = cluster.attach_job("orphan-2", heartbeat=False)
    wait_until(lambda: watched.status()["state"] == "CANCELLED", "the job lives for ever")
    assert "silent" in watched.status()["reason"]
