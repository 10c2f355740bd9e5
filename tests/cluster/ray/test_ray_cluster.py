"""`plexrl up --ray` on a real Ray cluster of several nodes, one of which is killed in training.

The nodes are Ray's own emulation: each has its raylet, its processes and its resources, all on this
machine.
"""

import itertools
import select
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.process.children.restart_log import read_parts
from plexrl.process.folders.folders import Folders
from plexrl.worker.agent.ray.launcher import RayLauncher, RayWorker
from plexrl.worker.interface.config import WorkerConfig
from tests.cluster.tools import (
    VOCABULARY,
    checkpoint_weights,
    process_of,
    some_batch,
    wait_until,
)
from tests.cluster.tools import has_ended as process_has_ended

ray = pytest.importorskip("ray", reason="needs plexrl[ray]")

# Ray leaves sockets, files and child processes to the garbage collector.
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=6)
STEPS = 4
RESULT_TIMEOUT_S = 300.0
"""Each Ray worker loads torch, which takes minutes on a loaded machine."""
STUCK_S = 15.0
"""Less than the default, and more than a loaded machine takes to answer."""
STORE_BYTES = 80 << 20
"""The least that Ray accepts; PlexRL stores nothing there."""


class RayMachines:
    """A head without GPUs, and nodes that can be added and killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "num_gpus": 0,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
            },
        )
        self._nodes: dict[str, Any] = {}
        self.address: str = self._cluster.address

    def add(self, name: str) -> None:
        """Start a node with two GPUs, as far as Ray knows."""
        self._nodes[name] = self._cluster.add_node(
            num_cpus=1, num_gpus=2, object_store_memory=STORE_BYTES, node_name=name
        )

    def kill(self, name: str) -> None:
        """Kill all processes of a node."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def machines() -> Iterator[RayMachines]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        running = RayMachines()
        try:
            for name in ("one", "two"):
                running.add(name)
            ray.init(address=running.address, log_to_driver=False, configure_logging=False)
            yield running
        finally:
            ray.shutdown()
            running.close()


@pytest.fixture(scope="module")
def on_ray(
    machines: RayMachines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedCluster]:
    running = start_embedded(
        tmp_path_factory.mktemp("ray"),
        ray_address=machines.address,
        ray_node_grace_s=0.2,
        ray_node_replace_s=0.0,
        # Small, so that snapshots are made within a few steps.
        ray_snapshot_operations=3,
        part_stuck_s=STUCK_S,
    )
    yield running
    running.close()


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results of a job, bit for bit."""

    losses: list[float]
    drawn: list[list[int]]
    weights: bytes


class Training:
    """The operations that one controller has submitted."""

    def __init__(self, job: plexrl.Job) -> None:
        self.actor = job.train_deployment("actor", MODEL)
        self.rollout = job.rollout_deployment("rollout", MODEL)
        self._steps: list[plexrl.Future[Any]] = []

    def step(self, count: int) -> None:
        """Submit `count` more steps."""
        for _ in range(count):
            batch = some_batch(len(self._steps))
            self._steps.append(self.actor.forward_backward(batch, plexrl.losses.grpo()))
            self.actor.optim_step(learning_rate=1e-3)

    def sync(self) -> None:
        """Sync the rollout with the trainer."""
        self.rollout.sync_weights(self.actor).result(RESULT_TIMEOUT_S)

    def draw(self) -> None:
        """Submit a generation."""
        sampling = plexrl.SamplingParams(max_tokens=200, seed=2)
        self._drawing = self.rollout.generate([[3, 4, 5]], n=4, sampling=sampling)

    def drawn(self) -> list[list[int]]:
        """The completions."""
        return [sample.tokens for sample in self._drawing.result(RESULT_TIMEOUT_S).samples[0]]

    def nodes(self) -> set[str]:
        """The nodes of the trainer."""
        ranks = [*self.actor.status()["ranks"], *self.rollout.status()["ranks"]]
        return {rank["node"] for rank in ranks}

    def outcome(self) -> Outcome:
        """All results of the training."""
        losses = [step.result(RESULT_TIMEOUT_S).metrics["loss"] for step in self._steps]
        return Outcome(losses, self.drawn(), checkpoint_weights(self.actor))


def trained(
    job: plexrl.Job, meanwhile: Callable[[plexrl.TrainDeployment], object] = lambda _: None
) -> bytes:
    """Weights of two ranks after some steps; calls `meanwhile` after the first one."""
    actor = job.train_deployment("actor", MODEL, workers=2)
    for step in range(STEPS):
        actor.forward_backward(some_batch(step), plexrl.losses.grpo())
        actor.optim_step(learning_rate=1e-3).result(RESULT_TIMEOUT_S)
        if not step:
            meanwhile(actor)
    return checkpoint_weights(actor)


def pids_of(class_name: str, node: str) -> list[int]:
    """Processes of Ray's actors of a class that run on a node, in the order of their start."""
    (node_id,) = [each["NodeID"] for each in ray.nodes() if each["NodeName"] == node]
    found = [
        actor
        for actor in actors()
        if actor["ActorClassName"] == class_name and actor["Address"]["NodeID"] == node_id
    ]
    return [actor["Pid"] for actor in sorted(found, key=lambda each: each["StartTime"])]


def groups() -> list[dict[str, Any]]:
    """Ray's placement groups that have not been removed."""
    table = ray.util.placement_group_table()
    return [group for group in table.values() if group["state"] != "REMOVED"]


def actors() -> list[dict[str, Any]]:
    """Ray's actors that are not dead."""
    return [actor for actor in ray._private.state.actors().values() if actor["State"] != "DEAD"]


@pytest.fixture
def launcher(machines: RayMachines, tmp_path: Path) -> Iterator[RayLauncher]:
    """A launcher on CPUs of a node of its own."""
    del machines
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([{"CPU": 0.5}] * 2, strategy="STRICT_PACK")
    assert group.wait(60)
    yield RayLauncher(group, "CPU", tmp_path)
    remove_placement_group(group)


def worker_config(tmp_path: Path, spec_json: str) -> WorkerConfig:
    return WorkerConfig(
        deployment="j/actor",
        job="j",
        kind="train",
        incarnation=1,
        rank=0,
        # The other rank never starts, so this one waits for it.
        world_size=2,
        group="g1",
        address=f"unix:{tmp_path}/w.sock",
        rendezvous=str(tmp_path / "r"),
        statemanager=str(tmp_path / "sm.sock"),
        ticket=b"",
        checkpoint_url=str(tmp_path),
        spec_json=spec_json,
        log_path=str(tmp_path / "0.log"),
        threads=1,
        gpu=1,
    )


def has_ended(worker: RayWorker, timeout_s: float) -> bool:
    return bool(select.select([worker.sentinel], [], [], timeout_s)[0])


def messages_of(worker: RayWorker) -> list[object]:
    """All that an ended worker has said."""
    messages: list[object] = []
    with suppress(EOFError):
        while True:
            messages.append(worker.ready.recv())
    return messages


def test_a_worker_that_cannot_serve_ends_with_a_reason(
    launcher: RayLauncher, tmp_path: Path
) -> None:
    worker = launcher.start(worker_config(tmp_path, "{}"))
    assert has_ended(worker, RESULT_TIMEOUT_S)
    assert True not in messages_of(worker), "it never served"
    assert "ValidationError" in worker.exit_reason()


@pytest.mark.slow
def test_a_worker_runs_until_it_is_stopped(launcher: RayLauncher, tmp_path: Path) -> None:
    spec = DeploymentSpec(model=MODEL, kind="train", backend="fsdp", workers=2)
    worker = launcher.start(worker_config(tmp_path, spec.to_json()))
    assert not has_ended(worker, 0)
    worker.stop()
    assert has_ended(worker, 0)
    assert "actor" in worker.exit_reason()


def test_ray_nodes_with_gpus_join_and_their_gpus_are_reserved(
    on_ray: EmbeddedCluster,
) -> None:
    with plexrl.connect(on_ray.url, on_ray.api_key) as cluster:
        nodes = {node["node"]: node["gpus"] for node in cluster.nodes()}
    assert nodes == {"one": 2, "two": 2}
    # Ray reports resources a moment after they are taken.
    wait_until(lambda: not ray.available_resources().get("GPU", 0), "Ray has free GPUs")
    assert sorted(group["name"].rpartition("-")[2] for group in groups()) == ["one", "two"]


@pytest.mark.slow
def test_an_asynchronous_rollout_has_its_service_on_the_head_and_its_instances_on_ray(
    on_ray: EmbeddedCluster,
) -> None:
    with (
        plexrl.connect(on_ray.url, on_ray.api_key) as cluster,
        cluster.create_job("ahead") as job,
    ):
        actor = job.train_deployment("actor", MODEL)
        rollout = job.rollout(
            *("rollout", MODEL, actor),
            instances=2,
            policy=plexrl.BoundedStaleness(1),
            prompts=2,
            samples=2,
            sampling=plexrl.SamplingParams(max_tokens=8, seed=1),
        )
        prompts = ([3 + number % 5, 4] for number in itertools.count())
        versions = []
        for batch in rollout.batches(prompts, lambda _, s: float(len(s.tokens)), steps=3):
            train = plexrl.Batch.from_samples(batch.prompts, batch.samples, batch.rewards)
            actor.forward_backward(train, plexrl.losses.importance_sampling())
            actor.optim_step(learning_rate=1e-3)
            versions.append((batch.version, min(map(min, batch.sample_versions))))
        assert [version for version, _ in versions] == [0, 1, 2]
        assert all(oldest >= version - 1 for version, oldest in versions)
        (view,) = cluster.rollouts(job.job)
        assert [each["state"] for each in view["instances"].values()] == ["joined", "joined"]
        service = process_of(on_ray, "plexrl.rollout")
        assert service.parent() == psutil.Process(on_ray.pid)


@pytest.mark.slow
def test_training_continues_elsewhere_after_its_node_is_killed(
    on_ray: EmbeddedCluster, machines: RayMachines, cluster: plexrl.Cluster
) -> None:
    """The only version of the state and the published weights are lost with the node. Without a
    fault, the same calls on an embedded cluster yield the same losses, samples and weights."""
    with cluster.create_job("undisturbed") as job:
        undisturbed = Training(job)
        undisturbed.step(STEPS)
        undisturbed.sync()
        undisturbed.draw()
        undisturbed.step(2)
        wanted = undisturbed.outcome()
    with (
        plexrl.connect(on_ray.url, on_ray.api_key) as far,
        far.create_job("killed") as job,
    ):
        killed = Training(job)
        killed.step(STEPS)
        killed.sync()
        assert killed.actor.status()["durable_seq"] > 0, "no version of its state was made"
        (doomed,) = killed.nodes()
        killed.draw()
        forward = killed.actor.forward(some_batch(0, rows=12))
        machines.kill(doomed)
        assert len(forward.result(RESULT_TIMEOUT_S).logprobs) == 12
        # The trainer publishes the lost version again.
        killed.drawn()
        killed.step(2)
        assert killed.outcome() == wanted
        assert killed.nodes() == {"one", "two"} - {doomed}
        machines.add("three")
        wait_until(
            lambda: any(node["node"] == "three" and node["alive"] for node in far.nodes()),
            "a node that joins the Ray cluster does not join ours",
        )


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["RayWorkerActor", "RayNodeActor"])
def test_a_stopped_worker_or_node_actor_is_named_and_replaced(
    on_ray: EmbeddedCluster, cluster: plexrl.Cluster, victim: str
) -> None:
    with cluster.create_job("undisturbed") as job:
        wanted = trained(job)
    record = Folders.of(on_ray.data_dir).parts_file
    with (
        plexrl.connect(on_ray.url, on_ray.api_key) as far,
        far.create_job("stopped") as job,
    ):
        stopped: list[psutil.Process] = []

        def is_named() -> bool:
            if victim == "RayNodeActor":
                return any(part.stuck_since for part in read_parts(record).values())
            return any(each["code"] == "part_stuck" for each in far.status()["conditions"])

        def stop(actor: plexrl.TrainDeployment) -> None:
            node = actor.status()["ranks"][1]["node"]
            (pid,) = pids_of(victim, node)[-1:]
            stopped.append(psutil.Process(pid))
            stopped[0].suspend()
            wait_until(is_named, f"the {victim} is not named")

        weights = trained(job, stop)
        wait_until(lambda: process_has_ended(stopped[0]), "it was not replaced")
        wait_until(lambda: not far.status()["conditions"], "a condition stays")
    assert weights == wanted


def test_an_ended_cluster_leaves_nothing_in_ray_or_on_the_machine(
    on_ray: EmbeddedCluster,
) -> None:
    of_nodes = [actor for actor in actors() if actor["ActorClassName"] == "RayNodeActor"]
    pids = [actor["Pid"] for actor in of_nodes]
    started = [p for pid in pids for p in (psutil.Process(pid), *psutil.Process(pid).children())]
    assert len(started) >= 2 * len(pids) > 0, "of each node an actor and its StateManager"
    started.append(psutil.Process(on_ray.pid))
    on_ray.close()
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []
    # Ray ends an actor's processes a moment after their owner.
    wait_until(lambda: not actors() and not groups(), "actors or placement groups stay")
    folders = Folders.of(on_ray.data_dir)
    assert not folders.run.exists()
    assert not folders.shared_memory.exists()
