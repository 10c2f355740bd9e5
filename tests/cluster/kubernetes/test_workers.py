"""Workers as pods: a real scheduler, router, StateManager and agent, and a real API server."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import plexrl
from plexrl.cluster.config.options import ClusterOptions
from plexrl.cluster.data_dir.endpoint import Endpoint
from plexrl.cluster.kubernetes.workers.launcher import PASSED_ON
from plexrl.cluster.node.gpus import Gpus
from plexrl.cluster.node.parts import NodeConfig, node_parts
from plexrl.cluster.supervisor import HeadOf, Supervisor
from plexrl.process.children.part import Part  # noqa: TC001
from plexrl.process.children.processes import PartProcesses
from plexrl.process.children.restart_log import PartRecord
from plexrl.process.folders.folders import Folders
from tests.cluster.kubernetes.api_server import Kubernetes
from tests.cluster.kubernetes.objects import make_node, wait_for
from tests.cluster.kubernetes.pod_runner import PodRunner
from tests.cluster.tools import VOCABULARY, some_batch

Plain = dict[str, Any]
ACCOUNT = "demo-plexrl-node-cpu"
NODE = "node0"
MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)


class PodNodes:
    """One node whose agent starts workers as pods."""

    join = False
    gpus = Gpus(count=2, memory_bytes=0)

    def __init__(self, options: ClusterOptions, pods: Plain, folders: Folders) -> None:
        self._options, self._pods, self._folders = options, pods, folders
        self._processes = PartProcesses(folders)
        self._parts: list[Part] = []

    async def start(self) -> None:
        config = NodeConfig.local(self._options, 0, self.gpus)
        statemanager, agent = node_parts(self._options, self._folders, config)
        agent = replace(
            agent,
            module="plexrl.cluster.kubernetes.workers",
            config={"agent": agent.config, "pods": self._pods},
        )
        for part in (statemanager, agent):
            self._parts.append(part)
            await self._processes.start(part)
        self._processes.watch(self._parts)

    async def stop(self) -> None:
        await self._processes.unwatch()
        for part in reversed(self._parts):
            await self._processes.end(part)


class PodCluster:
    """A running cluster, and the runner of its pods."""

    def __init__(self, endpoint: Endpoint, runner: PodRunner) -> None:
        self.endpoint, self.runner = endpoint, runner

    def connect(self) -> plexrl.Cluster:
        return plexrl.connect(self.endpoint.url, self.endpoint.api_key)


def make_account(kubernetes: Kubernetes, namespace: str, folder: Path) -> Path:
    """The node's account with the rights of the chart."""
    from kubernetes.utils import create_from_dict

    from tests.cluster.kubernetes.chart import FULL, needs_helm, render

    needs_helm()
    for each in render(FULL, folder, namespace=namespace):
        is_its_own = each["metadata"]["name"] == ACCOUNT
        if is_its_own and each["kind"] in ("ServiceAccount", "Role", "RoleBinding"):
            create_from_dict(kubernetes.api(), each, namespace=namespace)
    return kubernetes.account(namespace, ACCOUNT)


def template() -> Plain:
    return {"containers": [{"name": "worker", "image": "plexrl-node:tests"}]}


@pytest.fixture(params=["bound", "gang"])
def pod_cluster(
    request: pytest.FixtureRequest,
    kubernetes: Kubernetes,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[PodCluster]:
    if kubernetes.audit_log is None:
        pytest.skip("these pods need folders of this machine")
    if request.param == "gang" and "kube-scheduler" not in kubernetes.controllers:
        pytest.skip("no kube-scheduler: nothing places a gang")
    from kubernetes.client import CoreV1Api

    core = CoreV1Api(kubernetes.api())
    make_node(core, NODE)
    monkeypatch.setenv("KUBECONFIG", str(make_account(kubernetes, namespace, tmp_path)))
    runner = PodRunner(kubernetes.api(), namespace, NODE, tmp_path)
    runner.start()
    pods = {
        "namespace": namespace,
        "node": NODE,
        "template": template(),
        "labels": {"app": "worker"},
        "pod_groups": request.param == "gang",
    }
    options = ClusterOptions(data_dir=tmp_path / "data")
    ready: list[Endpoint] = []
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()

    def nodes(folders: Folders, record: PartRecord, head: HeadOf) -> PodNodes:
        del record, head
        return PodNodes(options, pods, folders)

    supervisor = Supervisor(options, nodes=nodes)
    thread = threading.Thread(
        target=loop.run_until_complete, args=(supervisor.run(stop, ready.append),)
    )
    thread.start()
    try:
        endpoint = wait_for(lambda: ready[0] if ready else None, "the cluster", 120.0)
        yield PodCluster(endpoint, runner)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(120)
        loop.close()
        runner.close()
        core.delete_node(NODE)


@pytest.mark.slow
def test_a_group_of_pods_trains_and_recovers_from_a_killed_rank(
    pod_cluster: PodCluster, kubernetes: Kubernetes, namespace: str
) -> None:
    with pod_cluster.connect() as cluster, cluster.create_job("pods") as job:
        actor = job.train_deployment("actor", MODEL, workers=2, max_sequence_tokens=64)
        before = step(actor, 0)
        pods = live(pod_cluster)
        assert len(pods) == 2, "one pod for each rank"
        check_pods(pod_cluster, pods, kubernetes, namespace)
        os.kill(pod_cluster.runner.processes[pods[0]].pid, signal.SIGKILL)
        wait_for(lambda: not set(pods) & set(live(pod_cluster)), "the end of both ranks")
        assert (before, step(actor, 1)) == (1, 2)
    wait_for(lambda: not live(pod_cluster), "the end of the workers")
    used = kubernetes.calls_of(namespace, ACCOUNT)
    pods_only = {("create", "", "pods"), ("get", "", "pods"), ("delete", "", "pods")}
    groups = {(verb, "scheduling.k8s.io", "podgroups") for verb in ("create", "delete")}
    assert used == (pods_only | groups if used & groups else pods_only)


def step(actor: plexrl.TrainDeployment, number: int) -> int:
    actor.forward_backward(some_batch(number), plexrl.losses.grpo())
    return actor.optim_step(learning_rate=1e-3).result(120).trainer_step


def live(cluster: PodCluster) -> list[str]:
    found = dict(cluster.runner.processes)
    return [name for name, process in found.items() if process.poll() is None]


def check_pods(
    cluster: PodCluster, pods: list[str], kubernetes: Kubernetes, namespace: str
) -> None:
    from kubernetes.client import CoreV1Api, CustomObjectsApi

    text = str([cluster.runner.specs[name].to_dict() for name in pods])
    assert "ticket" not in text
    plain = CoreV1Api(kubernetes.api()).list_namespaced_pod(namespace, _preload_content=False)
    gang = b"schedulingGroup" in plain.data
    if gang:
        groups = CustomObjectsApi(kubernetes.api()).list_namespaced_custom_object(
            "scheduling.k8s.io", "v1alpha2", namespace, "podgroups"
        )
        assert [each["spec"]["schedulingPolicy"]["gang"] for each in groups["items"]] == [
            {"minCount": 2}
        ]


def test_no_secret_of_the_agents_environment_is_in_a_pods_specification() -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "PLEXRL_API_KEY"):
        assert not name.startswith(PASSED_ON)
