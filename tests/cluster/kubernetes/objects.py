"""Objects of the API server that tests make and read."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from plexrl.cluster.kubernetes.operator.manifest import GROUP, PLURAL, VERSION
from tests.cluster.kubernetes.chart import CHART

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

Plain = dict[str, Any]
T = TypeVar("T")
WAIT_S = 60.0


def wait_for(look: Callable[[], T | None], what: str, timeout_s: float = WAIT_S) -> T:
    """What `look` finds."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come within {timeout_s:g} s")


def install_crd(api: "ApiClient") -> None:
    """The CustomResourceDefinition of RLJobs, as the chart has it."""
    from kubernetes.client import ApiException, ApiextensionsV1Api

    extensions = ApiextensionsV1Api(api)
    body = yaml.safe_load((CHART / "files" / "rljob.yaml").read_text())
    try:
        extensions.create_custom_resource_definition(body)
    except ApiException as error:
        if error.status != 409:
            raise

    def is_served() -> bool:
        found = extensions.read_custom_resource_definition(body["metadata"]["name"])
        return any(
            each.type == "Established" and each.status == "True"
            for each in found.status.conditions or ()
        )

    wait_for(is_served, "the CustomResourceDefinition")


class RLJobs:
    """RLJobs of one namespace."""

    def __init__(self, api: "ApiClient", namespace: str) -> None:
        from kubernetes.client import BatchV1Api, CoreV1Api, CustomObjectsApi

        self.objects, self.batch, self.core = (
            CustomObjectsApi(api),
            BatchV1Api(api),
            CoreV1Api(api),
        )
        self._api, self.namespace = api, namespace

    def create(self, name: str, **spec: Any) -> Plain:
        """An RLJob with a command, unless `spec` has a script."""
        spec.setdefault("apiKeySecret", {"name": "tenant"})
        if "script" not in spec:
            spec.setdefault("command", ["python", "-c", "pass"])
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "RLJob",
            "metadata": {"name": name},
            "spec": spec,
        }
        made: Plain = self.objects.create_namespaced_custom_object(
            GROUP, VERSION, self.namespace, PLURAL, body
        )
        return made

    def get(self, name: str) -> Plain | None:
        """It as it is now; None: it is gone."""
        from kubernetes.client import ApiException

        try:
            found: Plain = self.objects.get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, name
            )
        except ApiException as error:
            if error.status == 404:
                return None
            raise
        return found

    def patch(self, name: str, spec: Plain) -> None:
        """Change fields of the spec."""
        self.objects.patch_namespaced_custom_object(
            GROUP, VERSION, self.namespace, PLURAL, name, {"spec": spec}
        )

    def delete(self, name: str) -> None:
        """Begin to delete it."""
        self.objects.delete_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name)

    def status(self, name: str) -> Plain:
        """Its status; empty: none yet."""
        found = self.get(name)
        return {} if found is None else found.get("status") or {}

    def condition(self, name: str, kind: str) -> tuple[str, str]:
        """Status and reason of a condition; empty: it has none."""
        for each in self.status(name).get("conditions", ()):
            if each["type"] == kind:
                return each["status"], each["reason"]
        return "", ""

    def wait_phase(self, name: str, phase: str) -> Plain:
        """Its status once it has this phase."""

        def look() -> Plain | None:
            status = self.status(name)
            return status if status.get("phase") == phase else None

        return wait_for(look, f"phase {phase} of {name}")

    def job(self, name: str) -> Plain | None:
        """Its Job."""
        from kubernetes.client import ApiException

        try:
            found = self.batch.read_namespaced_job(name, self.namespace)
        except ApiException as error:
            if error.status == 404:
                return None
            raise
        plain: Plain = self._api.sanitize_for_serialization(found)
        return plain

    def pods(self, name: str) -> list[Any]:
        """The pods of its Job that have not ended."""
        found = self.core.list_namespaced_pod(
            self.namespace, label_selector=f"plexrl.dev/rljob={name}"
        )
        return [each for each in found.items if each.status.phase in ("Pending", "Running")]

    def report(self, name: str, phase: str, exit_code: int = 0) -> None:
        """Report a phase of its pod, as the kubelet does."""
        pod = wait_for(lambda: self.pods(name), f"a pod of {name}")[0]
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        state: Plain = {"running": {"startedAt": now}}
        if phase in ("Succeeded", "Failed"):
            state = {
                "terminated": {
                    "exitCode": exit_code,
                    "reason": "Completed" if exit_code == 0 else "Error",
                    "startedAt": now,
                    "finishedAt": now,
                }
            }
        is_ready = phase == "Running"
        body = {
            "status": {
                "phase": phase,
                "startTime": now,
                "conditions": [{"type": "Ready", "status": str(is_ready)}],
                "containerStatuses": [
                    {
                        "name": "controller",
                        "image": "image",
                        "imageID": "image",
                        "ready": is_ready,
                        "restartCount": 0,
                        "state": state,
                    }
                ],
            }
        }
        self.core.patch_namespaced_pod_status(pod.metadata.name, self.namespace, body)


@contextmanager
def operator_process(
    kubeconfig: Path, environment: dict[str, str], *options: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """The operator as a process, with its log on standard error."""
    import os
    import sys

    process = subprocess.Popen(
        [sys.executable, "-m", "plexrl.cluster.kubernetes", "operator", *options],
        env={**os.environ, **environment, "KUBECONFIG": str(kubeconfig)},
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def make_node(core: Any, name: str, cpu: str = "8") -> None:
    """A node that Kubernetes' scheduler finds ready."""
    core.create_node({"metadata": {"name": name}})
    core.patch_node(name, {"spec": {"taints": None}})
    capacity = {"cpu": cpu, "memory": "16Gi", "pods": "100"}
    conditions = [{"type": "Ready", "status": "True", "reason": "Test", "message": ""}]
    core.patch_node_status(
        name, {"status": {"capacity": capacity, "allocatable": capacity, "conditions": conditions}}
    )


def dumps(found: Any) -> str:
    """As text, to search in."""
    return json.dumps(found, default=str)
