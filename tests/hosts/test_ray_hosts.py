"""PlexRL on Ray across machines: a job spans two of them, one is lost and one comes in training."""

import time

import pytest

from tests.hosts.cluster import SoloCluster
from tests.hosts.jobs import Jobs
from tests.hosts.network import hosts
from tests.hosts.ray_cluster import RayHosts

pytest.importorskip("ray", reason="needs plexrl[ray]")

GPUS = 2
WORKERS = 3
"""More than a node's GPUs: the trainer spans two machines."""
JOB = "policy"
LIMIT_S = 900.0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("_namespaces")
def test_a_job_over_two_machines_of_ray_survives_the_loss_of_one_and_uses_a_new_one() -> None:
    with hosts("head", "a", "b", "c") as network:
        cluster = RayHosts(network, gpus=GPUS, nodes=("a", "b"))
        jobs = Jobs(cluster, {JOB: 0}, workers=WORKERS)
        jobs.begin()
        wait_for_steps(jobs, 2)
        assert nodes_of_trainer(cluster) == {"a", "b"}
        cluster.lose(network["b"])
        cluster.start_node(network["c"])
        wait_for_steps(jobs, jobs.steps()[JOB] + 2)
        assert nodes_of_trainer(cluster) == {"a", "c"}
        steps = {JOB: jobs.steps()[JOB] + 2}
        jobs.end_at(steps)
        found = jobs.weights()
        cluster.end()
    with hosts("solo") as network:
        (host,) = network
        alone = SoloCluster(host, gpus=WORKERS + 1)
        undisturbed = Jobs(alone, steps, workers=WORKERS)
        undisturbed.begin()
        assert found == undisturbed.weights()
        alone.end()


def nodes_of_trainer(cluster: RayHosts) -> set[str]:
    """The nodes of the job's trainer."""
    (job,) = cluster.ask("jobs")
    return {
        rank["node"]
        for each in job["deployments"]
        if each["kind"] == "train"
        for rank in each["ranks"]
    }


def wait_for_steps(jobs: Jobs, count: int) -> None:
    """Wait until the job has made so many steps."""
    deadline = time.monotonic() + LIMIT_S
    while jobs.steps()[JOB] < count:
        jobs.check_alive()
        assert time.monotonic() < deadline, f"the job makes no steps: {jobs.steps()}"
        time.sleep(0.1)
