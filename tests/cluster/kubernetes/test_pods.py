"""The chart's pods run: keys, issuer, scheduler, router and a node, from an empty namespace to a
training step, without a kubelet (see `sandbox.py`)."""

import base64
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import plexrl
from tests.cluster.kubernetes.api_server import Kubernetes
from tests.cluster.kubernetes.chart import RELEASE, needs_helm, pod_specs, render
from tests.cluster.kubernetes.objects import wait_for
from tests.cluster.kubernetes.sandbox import Sandbox, is_possible
from tests.cluster.tools import VOCABULARY, some_batch

Plain = dict[str, Any]
NODE = "rack-node"
ROUTER_PORT = 8080
FULL_NAME = f"{RELEASE}-plexrl"
POOL: Plain = {
    "name": "small",
    "gpus": 2,
    "gpuMemory": "1Gi",
    "hostMemory": "256Mi",
    "nvme": {"size": "1Gi"},
}
KINDS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "ConfigMap")


@pytest.fixture
def sandbox(kubernetes: Kubernetes, namespace: str, tmp_path: Path) -> Iterator[Sandbox]:
    needs_helm()
    if kubernetes.audit_log is None:
        pytest.skip("a real cluster runs these pods itself: `helm install`, `helm test`")
    if not is_possible():
        pytest.skip("no bubblewrap, or no user namespaces, on this machine")
    from kubernetes.client import CoreV1Api

    core = CoreV1Api(kubernetes.api())
    labels = {"topology.kubernetes.io/rack": "rack3"}
    core.create_node({"metadata": {"name": NODE, "labels": labels}})
    made = Sandbox(kubernetes, namespace, NODE, tmp_path)
    yield made
    made.close()
    core.delete_node(NODE)


@pytest.mark.slow
def test_the_charts_pods_make_a_cluster_that_trains(
    sandbox: Sandbox, kubernetes: Kubernetes, namespace: str, tmp_path: Path
) -> None:
    from kubernetes.client import CoreV1Api
    from kubernetes.utils import create_from_dict

    # No kube-proxy leads from the Service's port to the router's.
    values = {"nodePools": [POOL], "router": {"service": {"port": ROUTER_PORT}}}
    objects = render(values, tmp_path, namespace=namespace)
    for each in objects:
        if each["kind"] in KINDS and "operator" not in each["metadata"]["name"]:
            create_from_dict(kubernetes.api(), each, namespace=namespace)
    specs = pod_specs(objects)

    def run(kind: str, name: str) -> Any:
        return sandbox.run(name, specs[f"{kind}/{FULL_NAME}-{name}"], {})[0]

    assert run("Job", "keys").wait(120) == 0, sandbox.log("keys", "keys")
    for service in ("issuer", "scheduler", "rollout"):
        sandbox.add_host(f"{FULL_NAME}-{service}")
    sandbox.add_host(FULL_NAME)
    run("Deployment", "issuer")
    run("Deployment", "scheduler")
    run("Deployment", "router")
    run("Deployment", "rollout")
    run("DaemonSet", "node-small")
    secret = CoreV1Api(kubernetes.api()).read_namespaced_secret(f"{FULL_NAME}-keys", namespace)
    key = base64.b64decode(secret.data["operator-key"]).decode()
    url = f"http://127.0.0.1:{ROUTER_PORT}"
    wait_for(lambda: is_healthy(url), "the router", 120.0)
    with plexrl.connect(url, key) as cluster:
        node = wait_for(lambda: next(iter(cluster.nodes()), None), "the node", 180.0)
        assert (node["node"], node["block"], node["node_type"]) == (NODE, "rack3", "small")
        with cluster.create_job("inside") as job:
            model = plexrl.tiny_qwen2(VOCABULARY, seed=5)
            actor = job.train_deployment("actor", model, workers=2, max_sequence_tokens=64)
            actor.forward_backward(some_batch(0), plexrl.losses.grpo())
            assert actor.optim_step(learning_rate=1e-3).result(180).trainer_step == 1
        with cluster.create_job("ahead") as job:
            train_ahead(job)
            (view,) = cluster.rollouts()
            assert (view["job"], view["state"]) == (job.job, "running")


def train_ahead(job: plexrl.Job) -> None:
    """Two steps of an asynchronous rollout."""
    model = plexrl.tiny_qwen2(VOCABULARY, seed=5)
    actor = job.train_deployment("actor", model, max_sequence_tokens=64)
    rollout = job.rollout(
        *("rollout", model, actor),
        instances=1,
        policy=plexrl.BoundedStaleness(1),
        prompts=2,
        samples=2,
        sampling=plexrl.SamplingParams(max_tokens=8, seed=1),
    )
    prompts = ([3 + number % 5, 4] for number in itertools.count())
    for batch in rollout.batches(prompts, lambda _, sample: float(len(sample.tokens)), steps=2):
        train = plexrl.Batch.from_samples(batch.prompts, batch.samples, batch.rewards)
        actor.forward_backward(train, plexrl.losses.importance_sampling())
        actor.optim_step(learning_rate=1e-3)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
