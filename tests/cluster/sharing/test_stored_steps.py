"""A host optimizer steps while a neighbour holds the group, and through kills of what makes the
step: the bits of a job that has the GPU alone."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from tests.cluster.tools import (
    VOCABULARY,
    checkpoint_weights,
    process_of,
    rank_process,
    some_batch,
    wait_until,
)

Kill = Callable[[plexrl.TrainDeployment], psutil.Process]
"""Finds what is killed."""
MODEL = plexrl.tiny_qwen2(VOCABULARY, hidden=128, layers=4, seed=5)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    folder = tmp_path_factory.mktemp("stored-steps")
    running = start_embedded(folder, virtual_gpus=1, policy="pack")
    try:
        yield running
    finally:
        running.close()


class Neighbour:
    """A job that computes, while it is busy, without a pause, in a thread of its own."""

    def __init__(self, actor: plexrl.TrainDeployment) -> None:
        self._actor = actor
        self.busy = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self.busy.set()
        self._thread.join()

    def _run(self) -> None:
        seed, last = 0, None
        while self.busy.wait() and not self._stopped.is_set():
            seed += 1
            done = self._actor.forward_backward(some_batch(seed), plexrl.losses.grpo())
            if last is not None:
                last.result(120)
            last = done


def backward(actor: plexrl.TrainDeployment, step: int) -> None:
    actor.forward_backward(some_batch(step), plexrl.losses.grpo()).result(120)


def optimize(actor: plexrl.TrainDeployment) -> plexrl.Future[plexrl.StepResult]:
    return actor.optim_step(learning_rate=1e-2, grad_clip_norm=0.5)


def test_steps_beside_a_busy_neighbour_and_through_kills_change_no_bit(
    embedded: EmbeddedCluster,
) -> None:
    kills: list[Kill | None] = [
        None,
        None,
        lambda actor: rank_process(actor, 0),
        lambda _: process_of(embedded, "plexrl.statemanager"),
        None,
    ]
    with plexrl.connect(embedded.url, embedded.api_key) as cluster:
        with cluster.create_job("alone") as job:
            actor = job.train_deployment("actor", MODEL, optimizer="host", exclusive=True)
            wanted = []
            for step in range(len(kills)):
                backward(actor, step)
                wanted.append(optimize(actor).result(120).metrics["grad_norm"])
            weights = checkpoint_weights(actor)
        with cluster.create_job("stepper") as job, cluster.create_job("busy") as busy:
            actor = job.train_deployment("actor", MODEL, optimizer="host")
            neighbour = Neighbour(busy.train_deployment("actor", MODEL))
            try:
                for step, kill in enumerate(kills):
                    backward(actor, step)
                    neighbour.busy.set()
                    wait_until(
                        lambda: actor.status()["residency"] == "offloaded", "it stays on the GPU"
                    )
                    norm = step_beside(cluster, job, actor, neighbour, kill)
                    neighbour.busy.clear()
                    assert norm == wanted[step]
            finally:
                neighbour.stop()
            assert checkpoint_weights(actor) == weights


def step_beside(
    cluster: plexrl.Cluster,
    job: plexrl.Job,
    actor: plexrl.TrainDeployment,
    neighbour: Neighbour,
    kill: Kill | None,
) -> float:
    """A step while the neighbour holds the group; returns the norm of its gradient."""
    loads = number_of_loads(cluster, job)
    victim = None if kill is None else kill(actor)
    done = optimize(actor)
    if victim is None:
        norm = done.result(120).metrics["grad_norm"]
        assert actor.status()["residency"] == "offloaded"
        assert number_of_loads(cluster, job) == loads
        return norm
    wait_until(lambda: done.status()["state"] != "pending", "it does not start")
    with suppress(psutil.NoSuchProcess):
        victim.kill()
    # The step is made again after a load, for which a neighbour without a pause would not leave.
    neighbour.busy.clear()
    return done.result(120).metrics["grad_norm"]


def number_of_loads(cluster: plexrl.Cluster, job: plexrl.Job) -> int:
    return [each["kind"] for each in cluster.operations(job=job.job)].count("load")
