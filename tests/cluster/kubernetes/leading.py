"""Two schedulers on one journal, each as the process of a pod."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

from kubernetes.utils import create_from_dict

from plexrl.cluster.kubernetes.leader import listens
from plexrl.wire.links.credentials import Role
from tests.certificates import TestAuthority
from tests.cluster.kubernetes.api_server import Kubernetes
from tests.cluster.kubernetes.chart import FULL, needs_helm, of_kind, render


def make_scheduler_account(kubernetes: Kubernetes, namespace: str, folder: Path) -> Path:
    """The scheduler's account with the rights of the chart; returns its kubeconfig."""
    needs_helm()
    objects = render(FULL, folder, namespace=namespace)
    name = "demo-plexrl-scheduler"
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        create_from_dict(kubernetes.api(), of_kind(objects, kind)[name], namespace=namespace)
    return kubernetes.account(namespace, name)


def scheduler_settings(folder: Path, pod: str) -> tuple[Path, Callable[[], bool]]:
    """The configuration of a pod's scheduler, and whether it listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    own = folder / pod
    own.mkdir()
    files = TestAuthority(own).files(Role.SCHEDULER)
    path = own / "scheduler.json"
    path.write_text(
        json.dumps(
            {
                "listen": [f"tls://127.0.0.1:{port}"],
                "journal": str(folder / "journal.sqlite"),
                "operator_key_digest": "0" * 64,
                "lease_s": 2.0,
                "holder": pod,
                "tls": {"ca": files.ca, "certificate": files.certificate, "key": files.key},
            }
        )
    )
    return path, lambda: listens(port)
