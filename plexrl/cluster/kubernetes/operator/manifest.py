"""The Kubernetes Job of an RLJob."""

import hashlib
import json

from plexrl.cluster.kubernetes.api import KubeObject

GROUP = "plexrl.dev"
VERSION = "v1alpha1"
PLURAL = "rljobs"
FINALIZER = f"{GROUP}/cancel"
LABEL = f"{GROUP}/rljob"
SPEC_HASH = f"{GROUP}/spec-hash"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
SCRIPT_FOLDER = "/etc/plexrl-script"
USER = 10001
MUTABLE = ("suspend",)
"""Fields of the spec that may change while the Job exists."""


def job_id(rljob: KubeObject) -> str:
    """Id of the RLJob's job in PlexRL: unique, and the same after a restart of the controller."""
    metadata = rljob["metadata"]
    return f"{metadata['name']}-{metadata['uid'].partition('-')[0]}"


def spec_hash(rljob: KubeObject) -> str:
    """Digest of what a Job cannot change once it exists."""
    fixed = {key: value for key, value in rljob["spec"].items() if key not in MUTABLE}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def is_queued(rljob: KubeObject) -> bool:
    """Whether Kueue suspends and starts the Job."""
    return QUEUE_LABEL in (rljob["spec"].get("labels") or {})


def is_owned(job: KubeObject, rljob: KubeObject) -> bool:
    """Whether a Job was made for this very RLJob."""
    owners = job["metadata"].get("ownerReferences") or []
    return any(owner["uid"] == rljob["metadata"]["uid"] for owner in owners)


def job_manifest(rljob: KubeObject, *, url: str, image: str) -> KubeObject:
    """The Job; `url` is the cluster's and `image` the one of an RLJob without an own."""
    metadata, spec = rljob["metadata"], rljob["spec"]
    labels = {**(spec.get("labels") or {}), LABEL: metadata["name"]}
    body: KubeObject = {
        "backoffLimit": spec.get("retries", 3),
        "suspend": bool(spec.get("suspend", False)) or is_queued(rljob),
        "template": {"metadata": {"labels": labels}, "spec": _pod(rljob, url, image)},
    }
    for name in ("activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        if name in spec:
            body[name] = spec[name]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": labels,
            "annotations": {SPEC_HASH: spec_hash(rljob)},
            "ownerReferences": [
                {
                    "apiVersion": f"{GROUP}/{VERSION}",
                    "kind": "RLJob",
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                    "controller": True,
                }
            ],
        },
        "spec": body,
    }


def _pod(rljob: KubeObject, url: str, image: str) -> KubeObject:
    spec = rljob["spec"]
    script = spec.get("script")
    mounts: list[KubeObject] = [{"name": "tmp", "mountPath": "/tmp"}]
    volumes: list[KubeObject] = [{"name": "tmp", "emptyDir": {}}]
    command = spec.get("command")
    if script is not None:
        command = ["python", f"{SCRIPT_FOLDER}/{script['key']}"]
        mounts.append({"name": "script", "mountPath": SCRIPT_FOLDER, "readOnly": True})
        volumes.append({"name": "script", "configMap": {"name": script["configMap"]}})
    container: KubeObject = {
        "name": "controller",
        "image": spec.get("image") or image,
        "command": command,
        "env": [*(spec.get("env") or []), *_environment(rljob, url)],
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if spec.get("args"):
        container["args"] = spec["args"]
    if spec.get("resources"):
        container["resources"] = spec["resources"]
    pod: KubeObject = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    if spec.get("imagePullSecrets"):
        pod["imagePullSecrets"] = spec["imagePullSecrets"]
    if spec.get("serviceAccountName"):
        pod["serviceAccountName"] = spec["serviceAccountName"]
        pod["automountServiceAccountToken"] = True
    return pod


def _environment(rljob: KubeObject, url: str) -> list[KubeObject]:
    secret = rljob["spec"]["apiKeySecret"]
    reference = {"name": secret["name"], "key": secret.get("key", "key")}
    return [
        {"name": "PLEXRL_URL", "value": url},
        {"name": "PLEXRL_API_KEY", "valueFrom": {"secretKeyRef": reference}},
        {"name": "PLEXRL_JOB_ID", "value": job_id(rljob)},
        {"name": "HOME", "value": "/tmp"},
    ]
