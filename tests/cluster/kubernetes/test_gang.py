"""All ranks of a group over two nodes are placed, or none, by the real kube-scheduler."""

from collections.abc import Iterator
from typing import Any

import pytest

from plexrl.cluster.kubernetes.workers.launcher import groups_version
from plexrl.cluster.kubernetes.workers.pods import GROUP, PodsConfig, pod_group, worker_pod
from plexrl.worker.interface.config import WorkerConfig
from tests.cluster.kubernetes.api_server import Kubernetes
from tests.cluster.kubernetes.objects import make_node, wait_for

Plain = dict[str, Any]
RANKS = {"gang-a": (0, 1), "gang-b": (2,)}
"""Where PlexRL's scheduler has placed the three ranks."""


class Gang:
    """The pods of one group."""

    def __init__(self, kubernetes: Kubernetes, namespace: str, version: str) -> None:
        from kubernetes.client import CoreV1Api, CustomObjectsApi

        self.core, self.objects = CoreV1Api(kubernetes.api()), CustomObjectsApi(kubernetes.api())
        self.namespace, self._version = namespace, version

    def make_group(self) -> None:
        body = pod_group(self._config("gang-a"), _worker(0), self._version)
        self.objects.create_namespaced_custom_object(
            GROUP, self._version, self.namespace, "podgroups", body
        )

    def make_pods(self, node: str) -> None:
        """The pods of the node's ranks."""
        for rank in RANKS[node]:
            body = worker_pod(self._config(node), _worker(rank), "/tmp/s", {}, in_group=True)
            self.core.create_namespaced_pod(self.namespace, body)

    def place_another(self, name: str) -> None:
        """Make a pod of no group, and wait until Kubernetes' scheduler has placed it."""
        spec = {"containers": [{"name": "other", "image": "none"}]}
        body = {"metadata": {"name": name}, "spec": spec}
        self.core.create_namespaced_pod(self.namespace, body)
        read = self.core.read_namespaced_pod
        wait_for(lambda: read(name, self.namespace).spec.node_name, "the place of another pod")

    def placed(self) -> dict[str, str]:
        """Node of each rank that has one."""
        return {
            pod.metadata.annotations["plexrl.dev/rank"]: pod.spec.node_name
            for pod in self._pods()
            if pod.spec.node_name
        }

    def refused(self) -> int:
        """How many pods Kubernetes' scheduler has looked at and not placed."""
        return sum(
            condition.type == "PodScheduled" and condition.status == "False"
            for pod in self._pods()
            for condition in pod.status.conditions or ()
        )

    def _pods(self) -> Any:
        selector = "plexrl.dev/deployment"
        return self.core.list_namespaced_pod(self.namespace, label_selector=selector).items

    def _config(self, node: str) -> PodsConfig:
        container = {"name": "worker", "image": "none", "resources": {"requests": {"cpu": "1"}}}
        template = {"containers": [container]}
        return PodsConfig(namespace=self.namespace, node=node, template=template, pod_groups=True)


def _worker(rank: int) -> WorkerConfig:
    return WorkerConfig(
        deployment="job/actor",
        job="job",
        kind="train",
        incarnation=1,
        rank=rank,
        world_size=3,
        group="g1",
        address="unix:/tmp/w.sock",
        rendezvous="/tmp/r",
        statemanager="/tmp/sm.sock",
        ticket=b"",
        checkpoint_url="/tmp",
        spec_json="{}",
        log_path="/tmp/0.log",
        threads=1,
        gpu=1,
    )


@pytest.fixture
def gang(kubernetes: Kubernetes, namespace: str) -> Iterator[Gang]:
    if "kube-scheduler" not in kubernetes.controllers:
        pytest.skip("these nodes have no kubelet, and there is no kube-scheduler of these tests")
    version = groups_version(kubernetes.api())
    if version is None:
        pytest.skip("this API server has no PodGroups")
    made = Gang(kubernetes, namespace, version)
    for node in RANKS:
        make_node(made.core, node, cpu="2")
    yield made
    for node in RANKS:
        made.core.delete_node(node)


def test_three_ranks_over_two_nodes_wait_for_the_last_and_are_placed_together(gang: Gang) -> None:
    gang.make_group()
    gang.make_pods("gang-a")
    gang.place_another("later")
    assert gang.placed() == {}, "a pod that came later is placed, so these two wait"
    gang.make_pods("gang-b")
    expected = {str(rank): node for node, ranks in RANKS.items() for rank in ranks}
    wait_for(lambda: gang.placed() == expected, "all three ranks on the chosen nodes")


def test_no_rank_is_placed_while_one_has_no_room(gang: Gang) -> None:
    taken = {
        "containers": [{"name": "a", "image": "none", "resources": {"requests": {"cpu": "2"}}}]
    }
    body = {"metadata": {"name": "other"}, "spec": {**taken, "nodeName": "gang-b"}}
    gang.core.create_namespaced_pod(gang.namespace, body)
    gang.make_group()
    for node in RANKS:
        gang.make_pods(node)
    wait_for(lambda: gang.refused() > 0, "the scheduler's look at the ranks")
    gang.place_another("later")
    assert gang.placed() == {}
