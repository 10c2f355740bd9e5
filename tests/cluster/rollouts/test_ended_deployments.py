"""Deployments that end before their job, with real workers."""

from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.errors import ConflictError, OperationCancelledError, UnknownDeploymentError
from plexrl.process.folders.folders import Folders
from tests.cluster.tools import VOCABULARY, has_ended, process_of, train, wait_until

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=4)
LONG = plexrl.SamplingParams(max_tokens=400, seed=1, ignore_eos=True)


def workers_of(deployment: plexrl.RolloutDeployment) -> list[psutil.Process]:
    """Its worker processes: those that listen on its ranks' sockets."""
    addresses = {
        str(rank["address"]).removeprefix("unix:") for rank in deployment.status()["ranks"]
    }
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if addresses & {str(each.laddr) for each in process.net_connections(kind="unix")}:
                found.append(process)
    assert found, f"nobody listens on {addresses}"
    return found


def state_files(embedded: EmbeddedCluster, deployment: plexrl.TrainDeployment) -> list[Path]:
    """What the node keeps of its state, in memory and on disk."""
    folders = (
        embedded.data_dir / "nodes" / "node0" / "nvme",
        Folders.of(embedded.data_dir).shared_memory,
    )
    name = quote(deployment.deployment, safe="")
    return [path for folder in folders for path in folder.rglob(f"*{name}*")]


def test_its_gpus_workers_and_memory_are_free_and_the_job_trains_on(
    cluster: plexrl.Cluster,
) -> None:
    reserved = cluster.status()["gpus_reserved"]
    with cluster.create_job("shrinks") as job:
        actor = job.train_deployment("actor", MODEL)
        rollouts = [job.rollout_deployment(f"r{number}", MODEL) for number in range(2)]
        for each in rollouts:
            each.sync_weights(actor).result(120)
        kept, ended = rollouts
        workers = workers_of(ended)
        running = ended.generate([[3, 4]], n=8, sampling=LONG)
        with pytest.raises(ConflictError, match="needs the weights"):
            actor.end()
        ended.end()
        with pytest.raises(OperationCancelledError, match="was ended before"):
            running.result(60)
        ended.end()
        with pytest.raises(UnknownDeploymentError, match="was ended"):
            ended.generate([[3, 4]])
        assert cluster.status()["gpus_reserved"] == reserved + 2
        wait_until(lambda: all(map(has_ended, workers)), "its workers run on")
        # A controller that repeats its first calls gets no GPUs for it.
        assert job.rollout_deployment("r1", MODEL).status()["state"] == "stopped"
        assert cluster.status()["gpus_reserved"] == reserved + 2
        train(actor, 0).result(120)
        kept.sync_weights(actor).result(120)
        assert len(kept.generate([[3, 4]], n=2).result(120).samples[0]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["plexrl.statemanager", "plexrl.scheduler"])
def test_an_end_survives_the_loss_of_a_part(tmp_path: Path, killed: str) -> None:
    running = start_embedded(tmp_path / "data", virtual_gpus=2)
    try:
        with (
            plexrl.connect(running.url, running.api_key) as cluster,
            cluster.create_job("shrinks") as job,
        ):
            actor = job.train_deployment("actor", MODEL)
            # It shares the actor's GPU.
            critic = job.train_deployment("critic", MODEL)
            rollout = job.rollout_deployment("r0", MODEL)
            rollout.sync_weights(actor).result(120)
            train(critic, 0).result(120)
            train(actor, 0).result(120)
            wait_until(lambda: bool(state_files(running, critic)), "it keeps no state")
            workers, part = workers_of(rollout), process_of(running, killed)
            if killed == "plexrl.statemanager":
                # It does not see the ends, and is gone before it could.
                part.suspend()
            rollout.end()
            critic.end()
            part.kill()
            wait_until(lambda: all(map(has_ended, workers)), "its workers run on")
            wait_until(lambda: not state_files(running, critic), "its state is kept")
            assert rollout.status()["state"] == critic.status()["state"] == "stopped"
            # Its GPU serves another one.
            other = job.rollout_deployment("r1", MODEL)
            other.sync_weights(actor).result(120)
            assert other.generate([[3, 4]]).result(120).samples
            train(actor, 1).result(120)
    finally:
        running.close()
