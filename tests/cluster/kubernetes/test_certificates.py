"""Keys and certificates of pods, with a real API server that makes and reviews their tokens."""

import asyncio
import base64
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from plexrl.cluster.join.authority import Authority, make_request
from plexrl.cluster.kubernetes.certificates.issuer import (
    AUDIENCE,
    CONNECTIONS_MAX,
    Issuer,
    IssuerServer,
)
from plexrl.cluster.kubernetes.certificates.keys import make_keys
from plexrl.cluster.kubernetes.certificates.renewal import Renewal
from plexrl.errors import AuthenticationError, PermissionDeniedError, UnavailableError
from plexrl.statemanager.protocol.tickets import KEY_BYTES
from plexrl.wire.links.address import TlsAddress
from plexrl.wire.links.credentials import Credentials, Identity, Role, TlsFiles
from tests.cluster.kubernetes.api_server import Kubernetes
from tests.cluster.kubernetes.chart import needs_helm, of_kind, render
from tests.cluster.kubernetes.objects import wait_for
from tests.half_open import half_open, is_ended

Plain = dict[str, Any]
NODE = "certified-node"
ACCOUNTS = {"control": Role.SCHEDULER, "api": Role.ROUTER, "gpu": Role.NODE}


class Pods:
    """Pods of a namespace, and tokens that are bound to them."""

    def __init__(self, kubernetes: Kubernetes, namespace: str, node: str) -> None:
        from kubernetes.client import CoreV1Api

        self.core, self.namespace, self.node = CoreV1Api(kubernetes.api()), namespace, node
        for name in (*ACCOUNTS, "stranger"):
            self.core.create_namespaced_service_account(namespace, {"metadata": {"name": name}})

    def token(self, account: str, audience: str = AUDIENCE, *, bound: bool = True) -> str:
        """A token as the kubelet gets it for a projected volume."""
        spec: Plain = {"audiences": [audience], "expirationSeconds": 600}
        if bound:
            body = {
                "metadata": {"name": f"{account}-pod"},
                "spec": {
                    "nodeName": self.node,
                    "serviceAccountName": account,
                    "containers": [{"name": "main", "image": "main"}],
                },
            }
            pod = self.core.create_namespaced_pod(self.namespace, body)
            spec["boundObjectRef"] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": pod.metadata.name,
                "uid": pod.metadata.uid,
            }
        made = self.core.create_namespaced_service_account_token(
            account, self.namespace, {"spec": spec}
        )
        return str(made.status.token)


@pytest.fixture
def pods(kubernetes: Kubernetes, namespace: str) -> Iterator[Pods]:
    from kubernetes.client import CoreV1Api

    core = CoreV1Api(kubernetes.api())
    if kubernetes.audit_log is None:
        # The image of these pods does not exist, so a real node runs nothing.
        yield Pods(kubernetes, namespace, core.list_node(limit=1).items[0].metadata.name)
        return
    core.create_node({"metadata": {"name": NODE}})
    yield Pods(kubernetes, namespace, NODE)
    core.delete_node(NODE)


@pytest.fixture
def issuer(kubernetes: Kubernetes, pods: Pods, tmp_path: Path) -> Issuer:
    """An issuer with the rights of the chart."""
    needs_helm()
    from kubernetes.utils import create_from_dict

    objects = render({}, tmp_path, namespace=pods.namespace)
    role = of_kind(objects, "ClusterRole")[f"demo-plexrl-{pods.namespace}-issuer"]
    binding = of_kind(objects, "ClusterRoleBinding")[f"demo-plexrl-{pods.namespace}-issuer"]
    account = of_kind(objects, "ServiceAccount")["demo-plexrl-issuer"]
    for each in (role, binding, account):
        create_from_dict(kubernetes.api(), each, namespace=pods.namespace)
    api = kubernetes.api(kubernetes.account(pods.namespace, "demo-plexrl-issuer"))
    roles = {f"{pods.namespace}/{name}": role for name, role in ACCOUNTS.items()}
    return Issuer(api, Authority.open(tmp_path / "authority"), roles, timedelta(minutes=10))


def test_the_api_server_says_who_a_pod_is(issuer: Issuer, pods: Pods) -> None:
    assert issuer.identity(pods.token("control")) == Identity(Role.SCHEDULER)
    assert issuer.identity(pods.token("api")) == Identity(Role.ROUTER, "api-pod")
    assert issuer.identity(pods.token("gpu")) == Identity(Role.NODE, pods.node)


def test_other_tokens_get_no_certificate(issuer: Issuer, pods: Pods) -> None:
    with pytest.raises(PermissionDeniedError, match="no part of this cluster"):
        issuer.identity(pods.token("stranger"))
    with pytest.raises(PermissionDeniedError, match="bound to no node-name"):
        issuer.identity(pods.token("gpu", bound=False))
    with pytest.raises(AuthenticationError):
        issuer.identity(pods.token("api", "https://kubernetes.default.svc"))
    with pytest.raises(AuthenticationError):
        issuer.identity("not-a-token")


@pytest.mark.slow
def test_the_token_of_a_deleted_pod_is_refused(issuer: Issuer, pods: Pods) -> None:
    token = pods.token("gpu")
    assert issuer.identity(token).name == pods.node
    pods.core.delete_namespaced_pod("gpu-pod", pods.namespace, grace_period_seconds=0)

    def is_refused() -> bool:
        try:
            issuer.identity(token)
        except AuthenticationError:
            return True
        return False

    # The API server keeps reviewed tokens for some seconds.
    wait_for(is_refused, "the refusal")


def test_half_open_handshakes_keep_no_pod_from_the_issuer(tmp_path: Path) -> None:
    from kubernetes.client import ApiClient

    authority = Authority.open(tmp_path)
    server = IssuerServer(Issuer(ApiClient(), authority, {}), "127.0.0.1", 0, ["127.0.0.1"])
    server.start()
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with half_open(TlsAddress("127.0.0.1", server.port), CONNECTIONS_MAX + 50) as flood:
        assert all(is_ended(raw) for raw in flood[:50]), "the oldest are replaced"
        url = f"https://127.0.0.1:{server.port}/healthz"
        with urllib.request.urlopen(url, timeout=60.0, context=context) as answer:
            assert answer.status == 200
    server.close()


def _names(certificate: x509.Certificate) -> list[str]:
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return extension.value.get_values_for_type(x509.UniformResourceIdentifier)


def test_a_pod_gets_and_renews_its_certificate(issuer: Issuer, pods: Pods, tmp_path: Path) -> None:
    server = IssuerServer(issuer, "127.0.0.1", 0, ["127.0.0.1"])
    server.start()
    identity, folder = tmp_path / "identity", tmp_path / "tls"
    identity.mkdir()
    (identity / "ca.pem").write_bytes(issuer.authority.pem)
    (identity / "token").write_text(pods.token("gpu"))
    try:
        renewal = Renewal(f"https://127.0.0.1:{server.port}", identity, folder)
        wait_s = renewal.renew()
        assert 200 < wait_s <= 300, "half of ten minutes"
        files = TlsFiles(
            ca=str(folder / "ca.pem"),
            certificate=str(folder / "certificate.pem"),
            key=str(folder / "key.pem"),
        )
        credentials = Credentials(files)
        assert credentials.identity == Identity(Role.NODE, pods.node)
        first = (folder / "certificate.pem").read_bytes()
        renewal.renew()
        assert (folder / "certificate.pem").read_bytes() != first
        assert credentials.server_context() is not None
        assert (folder / "key.pem").stat().st_mode & 0o077 == 0
        (identity / "token").write_text("gone")
        with pytest.raises(UnavailableError, match="401"):
            renewal.renew()
        (identity / "ca.pem").write_bytes(Authority.open(tmp_path / "other").pem)
        with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            renewal.renew()
    finally:
        server.close()


def test_a_renewal_is_tried_again_until_the_issuer_answers(
    issuer: Issuer, pods: Pods, tmp_path: Path
) -> None:
    identity, folder = tmp_path / "identity", tmp_path / "tls"
    identity.mkdir()
    (identity / "ca.pem").write_bytes(issuer.authority.pem)
    (identity / "token").write_text("not yet")
    server = IssuerServer(issuer, "127.0.0.1", 0, ["127.0.0.1"])
    server.start()
    stop = threading.Event()
    renewal = Renewal(f"https://127.0.0.1:{server.port}", identity, folder)
    thread = threading.Thread(target=renewal.keep, args=(stop,), daemon=True)
    thread.start()
    try:
        (identity / "token").write_text(pods.token("api"))
        wait_for(lambda: (folder / "certificate.pem").exists(), "the certificate")
        found = x509.load_pem_x509_certificate((folder / "certificate.pem").read_bytes())
        assert _names(found) == ["plexrl://router/api-pod"]
    finally:
        stop.set()
        thread.join(10)
        server.close()


def test_a_request_that_names_another_role_gets_its_own(issuer: Issuer, pods: Pods) -> None:
    _, request = make_request()
    signed = issuer.sign(pods.token("api"), request.decode(), "127.0.0.1")
    found = x509.load_pem_x509_certificate(signed["certificate"].encode())
    assert _names(found) == ["plexrl://router/api-pod"]


def test_keys_are_made_once_with_the_rights_of_the_chart(
    kubernetes: Kubernetes, namespace: str, tmp_path: Path
) -> None:
    from kubernetes.client import CoreV1Api
    from kubernetes.utils import create_from_dict

    needs_helm()
    objects = render({}, tmp_path, namespace=namespace)
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        create_from_dict(
            kubernetes.api(), of_kind(objects, kind)["demo-plexrl-keys"], namespace=namespace
        )
    names = {
        "keys": "demo-plexrl-keys",
        "authority": "demo-plexrl-authority",
        "certificate": "demo-plexrl-authority",
    }
    api = kubernetes.api(kubernetes.account(namespace, "demo-plexrl-keys"))
    core = CoreV1Api(kubernetes.api())

    def read() -> list[Any]:
        secrets = [
            core.read_namespaced_secret(names[each], namespace).data
            for each in ("keys", "authority")
        ]
        return [*secrets, core.read_namespaced_config_map(names["certificate"], namespace).data]

    make_keys(api, namespace, **names)
    first = read()
    assert len(base64.b64decode(first[0]["ticket-key"])) == KEY_BYTES
    assert base64.b64decode(first[1]["tls.crt"]).decode() == first[2]["ca.pem"]
    make_keys(api, namespace, **names)
    assert read() == first
    if kubernetes.audit_log is not None:
        assert kubernetes.calls_of(namespace, "demo-plexrl-keys") == {
            ("create", "", "secrets"),
            ("create", "", "configmaps"),
            ("get", "", "secrets"),
            ("patch", "", "configmaps"),
        }
    folder = tmp_path / "authority"
    folder.mkdir(mode=0o700)
    (folder / "ca.pem").write_bytes(base64.b64decode(first[1]["tls.crt"]))
    (folder / "ca.key").write_bytes(base64.b64decode(first[1]["tls.key"]))
    assert Authority.open(folder).pem.decode() == first[2]["ca.pem"]


def test_the_leaders_pod_has_the_label_and_the_lease(
    kubernetes: Kubernetes, namespace: str, tmp_path: Path
) -> None:
    from kubernetes.client import CoordinationV1Api, CoreV1Api

    from plexrl.cluster.kubernetes.leader import LABEL, LeaderLabel, run_scheduler_pod
    from tests.cluster.kubernetes.leading import make_scheduler_account, scheduler_settings

    api = kubernetes.api(make_scheduler_account(kubernetes, namespace, tmp_path))
    core = CoreV1Api(kubernetes.api())
    for pod in ("first", "second"):
        body = {
            "metadata": {"name": pod, "labels": {"app": "scheduler", LABEL: "true"}},
            "spec": {"containers": [{"name": "main", "image": "main"}]},
        }
        core.create_namespaced_pod(namespace, body)

    def leaders() -> list[str]:
        found = core.list_namespaced_pod(namespace, label_selector=f"{LABEL}=true").items
        return [each.metadata.name for each in found]

    async def run(pod: str, stop: asyncio.Event) -> int:
        config, listens = scheduler_settings(tmp_path, pod)
        label = LeaderLabel(api, namespace, pod, "demo-plexrl-scheduler", "app=scheduler")
        return await run_scheduler_pod(config, label, listens, stop)

    async def seen(wanted: list[str]) -> None:
        await asyncio.to_thread(wait_for, lambda: leaders() == wanted, f"the leader {wanted}")

    async def both() -> None:
        stops = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(run("first", stops[0]))
        await seen(["first"])
        second = asyncio.create_task(run("second", stops[1]))
        lease = CoordinationV1Api(kubernetes.api()).read_namespaced_lease
        await asyncio.to_thread(
            wait_for,
            lambda: lease("demo-plexrl-scheduler", namespace).spec.holder_identity == "first",
            "the lease",
        )
        stops[0].set()
        assert await first == 0
        await seen(["second"])
        stops[1].set()
        assert await second == 0
        assert leaders() == []

    asyncio.run(both())
    if kubernetes.audit_log is not None:
        assert kubernetes.calls_of(namespace, "demo-plexrl-scheduler") == {
            ("list", "", "pods"),
            ("patch", "", "pods"),
            ("create", "coordination.k8s.io", "leases"),
            ("get", "coordination.k8s.io", "leases"),
            ("update", "coordination.k8s.io", "leases"),
        }
