"""Renders the Helm chart for tests, with the real `helm`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

Plain = dict[str, Any]
CHART = Path(__file__).parents[3] / "deploy" / "helm" / "plexrl"
RELEASE = "demo"
NAMESPACE = "plexrl"

FULL: Plain = {
    "nodePools": [
        {
            "name": "h200",
            "gpus": 8,
            "gpuMemory": "141Gi",
            "gpuResource": "nvidia.com/gpu",
            "runtimeClassName": "nvidia",
            "hostMemory": "512Gi",
            "nvme": {"size": "4Ti", "storageClassName": "local-nvme"},
            "fabric": "trusted",
            "capabilities": ["IPC_LOCK"],
            "nodeSelector": {"node.kubernetes.io/instance-type": "p5en.48xlarge"},
        },
        {"name": "claimed", "gpus": 4, "gpuDeviceClass": "gpu.nvidia.com"},
        {
            "name": "cpu",
            "workers": "pods",
            "podGroups": True,
            "hostMemoryPath": "/dev/shm/plexrl",
            "hostNetwork": True,
            "nvme": {"hostPath": "/mnt/nvme/plexrl"},
            "typeLabel": "node.kubernetes.io/instance-type",
            "blockLabel": "example.com/row,example.com/pod,topology.kubernetes.io/rack",
        },
    ],
    "events": {
        "url": "mqtts://plexrl@broker.example:8884/site/prod",
        "secretName": "broker",
        "passwordKey": "password",
        "caKey": "ca.crt",
        "settings": {"interval_s": 1},
    },
    "scheduler": {"replicas": 2, "settings": {"starvation_bound_s": 300}},
    "journal": {"type": "postgresql", "postgresql": {"secretName": "journal"}},
    "router": {
        "replicas": 3,
        "modelRoots": ["/mnt/nvme/models"],
        "service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/8"]},
        "ingress": {"enabled": True, "className": "nginx", "hosts": ["plexrl.example.com"]},
    },
    "rollout": {
        "settings": {"cycle_s": 1},
        "volume": {"size": "100Gi", "storageClassName": "fast"},
        "nodeSelector": {"pool": "control"},
    },
    "data": {
        "url": "s3://bucket/plexrl",
        "checkpointUrl": "s3://bucket/checkpoints",
        "credentialsSecret": "s3",
    },
    "operator": {"replicas": 2, "namespaces": ["team-a", "team-b"]},
    "images": {"prefix": "registry.example.com/ml/", "pullSecrets": [{"name": "registry"}]},
    "networkPolicy": {
        "enabled": True,
        "apiFrom": [{"ipBlock": {"cidr": "10.2.0.0/16"}}],
        "nodesFrom": [{"ipBlock": {"cidr": "10.1.0.0/16"}}],
        "egressTo": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}
SHARED_VOLUME: Plain = {
    "router": {"replicas": 2},
    "data": {"volume": {"accessMode": "ReadWriteMany"}},
    "keys": {"existingSecret": "own-keys", "existingAuthority": "own-authority"},
    "operator": {"enabled": False},
    "rollout": {"enabled": False},
    "crd": {"install": False},
    "nodePools": [{"name": "small", "gpus": 2}],
}
VALUES: dict[str, Plain] = {"defaults": {}, "full": FULL, "shared-volume": SHARED_VOLUME}


KUBERNETES = "1.37.0"
"""A helm that is older than this takes its own version for the cluster's."""
HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def needs_helm() -> None:
    """Skips where `helm` is not installed."""
    if HELM is None:
        pytest.skip("no helm: the chart cannot be rendered")


def helm(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run helm."""
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


def render(values: Plain, folder: Path, *, namespace: str = NAMESPACE) -> list[Plain]:
    """The chart's objects.

    Raises:
        AssertionError: helm refuses.
    """
    path = folder / "values.json"
    path.write_text(json.dumps(values))
    shown = _template(path, namespace)
    assert shown.returncode == 0, shown.stderr
    return [each for each in yaml.load_all(shown.stdout, yaml.CSafeLoader) if each]


def refused(values: Plain, folder: Path) -> str:
    """Why helm refuses these values; paths are written with points, whatever its version."""
    path = folder / "values.json"
    path.write_text(json.dumps(values))
    shown = _template(path, NAMESPACE)
    assert shown.returncode != 0, "helm accepts the values"
    return shown.stderr.replace("/", ".")


def _template(values: Path, namespace: str) -> "subprocess.CompletedProcess[str]":
    options = ("--namespace", namespace, "--kube-version", KUBERNETES, "-f", str(values))
    return helm("template", RELEASE, str(CHART), *options)


def of_kind(objects: list[Plain], kind: str) -> dict[str, Plain]:
    """Objects of a kind by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def pod_specs(objects: list[Plain]) -> dict[str, Plain]:
    """The pod of each workload, as `Kind/name`."""
    found = {}
    for each in objects:
        spec = each.get("spec") or {}
        if each["kind"] == "Pod":
            found[f"Pod/{each['metadata']['name']}"] = spec
        elif "template" in spec and "spec" in spec["template"]:
            found[f"{each['kind']}/{each['metadata']['name']}"] = spec["template"]["spec"]
    return found
