"""A real API server accepts the chart's objects, and their pods under Pod Security Standards."""

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kubernetes.api_server import Kubernetes
from tests.cluster.kubernetes.chart import FULL, VALUES, needs_helm, pod_specs, render
from tests.cluster.kubernetes.objects import install_crd

Plain = dict[str, Any]
FOREIGN = {"ServiceMonitor", "CustomResourceDefinition"}
PRIVILEGED = "DaemonSet/demo-plexrl-node-cpu"
"""Workers as pods, with folders of the node and its network."""


@pytest.fixture(autouse=True)
def _helm() -> None:
    needs_helm()


def enforce(kubernetes: Kubernetes, namespace: str, standard: str) -> Any:
    from kubernetes.client import CoreV1Api

    core = CoreV1Api(kubernetes.api())
    label = {"pod-security.kubernetes.io/enforce": standard}
    core.patch_namespace(namespace, {"metadata": {"labels": label}})
    return core


def make_accounts(core: Any, namespace: str, specs: dict[str, Plain]) -> None:
    for name in {spec.get("serviceAccountName", "default") for spec in specs.values()}:
        if name != "default":
            core.create_namespaced_service_account(namespace, {"metadata": {"name": name}})


def submit(core: Any, namespace: str, spec: Plain) -> None:
    """Ask for a pod without making it."""
    spec = {key: value for key, value in spec.items() if key != "runtimeClassName"}
    body = {"metadata": {"generateName": "pod-"}, "spec": spec}
    core.create_namespaced_pod(namespace, body, dry_run="All")


@pytest.mark.parametrize("name", VALUES)
def test_the_api_server_accepts_every_object(
    name: str, kubernetes: Kubernetes, namespace: str, tmp_path: Path
) -> None:
    from kubernetes.dynamic import DynamicClient

    install_crd(kubernetes.api())
    client = DynamicClient(kubernetes.api())
    accepted = set()
    for each in render(VALUES[name], tmp_path, namespace=namespace):
        # Other namespaces of `operator.namespaces` do not exist here.
        elsewhere = each["metadata"].get("namespace", namespace) != namespace
        if each["kind"] in FOREIGN or elsewhere or each["kind"] == "Pod":
            continue
        resource = client.resources.get(api_version=each["apiVersion"], kind=each["kind"])
        options = {"namespace": namespace} if resource.namespaced else {}
        strict = [("fieldValidation", "Strict")]
        made = resource.create(body=each, query_params=strict, dry_run="All", **options)
        assert made.metadata.uid, "the API server did not get as far as making it"
        accepted.add(each["kind"])
    assert {"ConfigMap", "Deployment", "Service"} <= accepted


def test_pods_are_admitted_under_the_restricted_standard(
    kubernetes: Kubernetes, namespace: str, tmp_path: Path
) -> None:
    values = {**FULL, "nodePools": [{**FULL["nodePools"][0], "capabilities": []}]}
    core = enforce(kubernetes, namespace, "restricted")
    specs = pod_specs(render(values, tmp_path, namespace=namespace))
    make_accounts(core, namespace, specs)
    assert len(specs) >= 6
    for spec in specs.values():
        submit(core, namespace, spec)


def test_workers_as_pods_need_a_privileged_namespace(
    kubernetes: Kubernetes, namespace: str, tmp_path: Path
) -> None:
    from kubernetes.client import ApiException

    spec = pod_specs(render(FULL, tmp_path, namespace=namespace))[PRIVILEGED]
    core = enforce(kubernetes, namespace, "baseline")
    make_accounts(core, namespace, {PRIVILEGED: spec})
    with pytest.raises(ApiException, match="hostPath"):
        submit(core, namespace, spec)
    enforce(kubernetes, namespace, "privileged")
    submit(core, namespace, spec)
