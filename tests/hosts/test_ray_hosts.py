"""PlexRL on Ray across machines: a job spans two of them, one is lost and one comes in training."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.cluster import GPU_MEMORY_GIB, HOST_MEMORY_GIB, START_S, SoloCluster
from tests.hosts.host import Host
from tests.hosts.jobs import Jobs
from tests.hosts.network import hosts
from tests.hosts.ray_cluster import RAY, RAY_STARTED, RayHosts, start_ray

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


JOBS_ADDRESS = "http://127.0.0.1:8265"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_namespaces")
def test_a_cluster_runs_as_a_job_of_ray() -> None:
    def ray_job(*words: str) -> str:
        return host.run("ray", "job", *words, "--address", JOBS_ADDRESS, env=RAY).stdout

    with hosts("solo") as network:
        (host,) = network
        ray = start_ray(host, "--head", "--include-dashboard", "true", "--num-gpus", "2")
        ray.wait_for(RAY_STARTED, START_S)
        until(lambda: is_served(host), "Ray's job server does not answer")
        submit = ("ray", "job", "submit", "--address", JOBS_ADDRESS, "--no-wait")
        host.run(*submit, "--submission-id", "plexrl", "--", *UP, env=RAY)
        endpoint = host.path(Path(DATA_DIR, "cluster.json"))
        until(endpoint.exists, "the cluster is not up")
        nodes = host.run("plexrl", "nodes", "--json", "--data-dir", DATA_DIR).stdout
        assert [each["gpus"] for each in json.loads(nodes)] == [2]
        host.run("python", "-c", CONTROLLER, timeout_s=LIMIT_S)
        ray_job("stop", "plexrl")
        assert not endpoint.exists(), "it did not end in order"
        assert host.processes("plexrl.scheduler") == []


DATA_DIR = "/srv/plexrl"
UP = (
    *("plexrl", "up", "--ray", "auto", "--data-dir", DATA_DIR),
    *("--gpu-memory", GPU_MEMORY_GIB, "--host-memory", HOST_MEMORY_GIB, "--policy", "pack"),
)
CONTROLLER = f"""
import plexrl
from tests.cluster.tools import VOCABULARY, some_batch
with plexrl.connect(data_dir="{DATA_DIR}") as cluster, cluster.create_job("one") as job:
    actor = job.train_deployment("actor", plexrl.tiny_qwen2(VOCABULARY, seed=5), workers=2)
    actor.forward_backward(some_batch(1), plexrl.losses.grpo())
    assert actor.optim_step(learning_rate=1e-3).result(600).trainer_step == 1
"""


def is_served(host: Host) -> bool:
    """Whether Ray accepts jobs."""
    listing = ("ray", "job", "list", "--address", JOBS_ADDRESS)
    return host.run(*listing, env=RAY, check=False).returncode == 0


def until(is_true: Callable[[], bool], failure: str) -> None:
    """Poll until it is true."""
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline, failure
        time.sleep(0.2)
