"""The pod of one worker, and the gang of a worker-process group.

PlexRL's scheduler has chosen the node, so the pod is bound to it. The node's pod already holds the
GPUs and the memory that workers share in turn: it is their reservation, and all ranks of a group
fit once PlexRL has placed them. Where workers bring requests of their own, a PodGroup makes
Kubernetes' scheduler admit all ranks or none, and the node is then an affinity.
"""

import copy
import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

from plexrl.cluster.kubernetes.api import KubeObject
from plexrl.errors import InvalidRequestError
from plexrl.worker.interface.config import WorkerConfig

GROUP = "scheduling.k8s.io"
LABEL = "plexrl.dev/deployment"
MODULE = "plexrl.cluster.kubernetes.workers.process"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsConfig:
    """How a node's agent makes pods."""

    namespace: str
    node: str
    """The Kubernetes node of the agent."""
    template: dict[str, Any]
    """Spec of a worker's pod with one container: image, volumes, security; without command and
    node."""
    owner_name: str = ""
    """The agent's pod, with which its workers go; empty: none."""
    owner_uid: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    pod_groups: bool = False
    """Whether the ranks of a group are placed by a PodGroup, where the server has them."""

    def __post_init__(self) -> None:
        if len(self.template.get("containers", ())) != 1:
            raise InvalidRequestError("the template of a worker's pod needs exactly one container")


def group_name(worker: WorkerConfig) -> str:
    """Name of the gang of a worker's incarnation; the same on all nodes."""
    digest = hashlib.sha256(worker.deployment.encode()).hexdigest()[:12]
    return f"w-{digest}-{worker.incarnation}"


def worker_pod(
    config: PodsConfig,
    worker: WorkerConfig,
    socket: str,
    environment: KubeObject,
    *,
    in_group: bool,
) -> KubeObject:
    """The pod that connects to the agent's Unix socket. The worker's configuration, which has its
    ticket, goes through the socket and is in no object of the API server."""
    name = f"{group_name(worker)}-{worker.rank}-{secrets.token_hex(3)}"
    spec = copy.deepcopy(config.template)
    container = spec["containers"][0]
    container["command"] = ["python", "-m", MODULE]
    container["args"] = ["--socket", socket]
    container["env"] = [
        *container.get("env", ()),
        *({"name": key, "value": value} for key, value in sorted(environment.items())),
    ]
    spec["restartPolicy"] = "Never"
    if in_group:
        spec["schedulingGroup"] = {"podGroupName": group_name(worker)}
        spec["affinity"] = _only(config.node)
    else:
        spec["nodeName"] = config.node
    metadata: KubeObject = {
        "name": name,
        "namespace": config.namespace,
        "labels": {**config.labels, LABEL: _label(worker.deployment)},
        "annotations": {
            "plexrl.dev/deployment": worker.deployment,
            "plexrl.dev/rank": str(worker.rank),
        },
    }
    if owners := _owners(config):
        metadata["ownerReferences"] = owners
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def pod_group(config: PodsConfig, worker: WorkerConfig, version: str) -> KubeObject:
    """All ranks of the worker's incarnation, or none."""
    metadata: KubeObject = {"name": group_name(worker), "namespace": config.namespace}
    if owners := _owners(config):
        metadata["ownerReferences"] = owners
    return {
        "apiVersion": f"{GROUP}/{version}",
        "kind": "PodGroup",
        "metadata": {**metadata, "labels": dict(config.labels)},
        "spec": {"schedulingPolicy": {"gang": {"minCount": worker.world_size}}},
    }


def _owners(config: PodsConfig) -> list[KubeObject]:
    if not config.owner_uid:
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": config.owner_name,
            "uid": config.owner_uid,
            "controller": True,
        }
    ]


def _only(node: str) -> KubeObject:
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _label(deployment: str) -> str:
    """A deployment's id as the value of a label."""
    return deployment.replace("/", ".")[:63].strip("-_.")
