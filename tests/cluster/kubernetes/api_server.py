"""A real Kubernetes API server for tests.

`KUBECONFIG` names a cluster, and the tests run there, in namespaces of their own. Otherwise etcd
and kube-apiserver are started from the folder in `KUBEBUILDER_ASSETS` (what `setup-envtest`
unpacks), or from `PATH`; kube-controller-manager and kube-scheduler too if they are there. There is
no kubelet.
"""

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

Plain = dict[str, Any]
ADMIN = "admin-token"
ASSETS = "/usr/local/kubebuilder/bin"
"""Where Kubernetes' own tests look for these programs."""
START_S = 120.0
POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules: [{level: Metadata}]
"""


def find_tool(name: str) -> str | None:
    """Path of a program of Kubernetes."""
    assets = os.environ.get("KUBEBUILDER_ASSETS", ASSETS)
    return shutil.which(name, path=assets) or shutil.which(name)


def missing_tools() -> list[str]:
    """Which programs the API server lacks here."""
    return [name for name in ("etcd", "kube-apiserver") if find_tool(name) is None]


@dataclass
class Kubernetes:
    """An API server and what tests do with it."""

    kubeconfig: str
    """As the variable `KUBECONFIG`: a path, or several."""
    folder: Path
    """For kubeconfigs of accounts."""
    url: str
    audit_log: Path | None = None
    """The API server's audit log; None: a cluster that is not ours."""
    controllers: tuple[str, ...] = ()
    """Which of Kubernetes' controllers run."""
    _clients: list["ApiClient"] = field(default_factory=list)

    def api(self, kubeconfig: Path | None = None) -> "ApiClient":
        """A client as administrator, or as another kubeconfig says."""
        from kubernetes import config

        client = config.new_client_from_config(str(kubeconfig or self.kubeconfig))
        self._clients.append(client)
        return client

    def close(self) -> None:
        """End the clients' connections."""
        for client in self._clients:
            client.rest_client.pool_manager.clear()
            client.close()

    @contextmanager
    def namespace(self) -> Iterator[str]:
        """A namespace of its own for a test."""
        from kubernetes.client import CoreV1Api, V1Namespace, V1ObjectMeta

        name = f"plexrl-{uuid.uuid4().hex[:8]}"
        core = CoreV1Api(self.api())
        core.create_namespace(V1Namespace(metadata=V1ObjectMeta(name=name)))
        if "kube-controller-manager" in self.controllers or self.audit_log is None:
            _wait(lambda: _has_account(core, name), "the default ServiceAccount")
        try:
            yield name
        finally:
            core.delete_namespace(name)

    def account(self, namespace: str, name: str) -> Path:
        """A kubeconfig of a ServiceAccount."""
        from kubernetes.client import AuthenticationV1TokenRequest, CoreV1Api, V1TokenRequestSpec

        request = AuthenticationV1TokenRequest(
            spec=V1TokenRequestSpec(audiences=[], expiration_seconds=3600)
        )
        token = (
            CoreV1Api(self.api())
            .create_namespaced_service_account_token(name, namespace, request)
            .status.token
        )
        path = self.folder / f"{namespace}-{name}.kubeconfig"
        given = self.api().configuration
        path.write_text(kubeconfig_text(given.host, token, given.ssl_ca_cert))
        return path

    def calls_of(self, namespace: str, account: str) -> set[tuple[str, str, str]]:
        """What a ServiceAccount has asked of the API server: (verb, API group, resource)."""
        assert self.audit_log is not None
        user = f"system:serviceaccount:{namespace}:{account}"
        found = set()
        for line in self.audit_log.read_text().splitlines():
            event = json.loads(line)
            if event["user"]["username"] != user or "objectRef" not in event:
                continue
            target = event["objectRef"]
            parts = (target["resource"], target.get("subresource"))
            resource = "/".join(part for part in parts if part)
            found.add((event["verb"], target.get("apiGroup", ""), resource))
        return found


def kubeconfig_text(url: str, token: str, ca: str | None) -> str:
    """A kubeconfig with a token; without `ca` the server's certificate is not checked."""
    cluster: Plain = {"server": url}
    if ca:
        cluster["certificate-authority"] = ca
    else:
        cluster["insecure-skip-tls-verify"] = True
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "clusters": [{"name": "tests", "cluster": cluster}],
        "users": [{"name": "tests", "user": {"token": token}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
    }
    return json.dumps(content)


@contextmanager
def running_kubernetes(folder: Path, address: str = "127.0.0.1") -> Iterator[Kubernetes]:
    """The cluster of `KUBECONFIG`, or an API server of these tests at `address`; skips where there
    is none."""
    given = os.environ.get("KUBECONFIG")
    if given:
        # Not a copy: it may name certificates beside it.
        found = Kubernetes(given, folder, "")
        found.url = found.api().configuration.host
        yield found
        found.close()
        return
    missing = missing_tools()
    if missing:
        pytest.skip(
            f"no {' and no '.join(missing)}: set KUBEBUILDER_ASSETS to the folder of "
            "`setup-envtest use -p path`, or KUBECONFIG to a cluster"
        )
    with ExitStack() as stack:
        server = _start_server(folder, address, stack)
        controllers = tuple(
            name
            for name in ("kube-controller-manager", "kube-scheduler")
            if _start_controller(name, server, folder, stack)
        )
        server.controllers = controllers
        stack.callback(server.close)
        yield server


def _start_server(folder: Path, address: str, stack: ExitStack) -> Kubernetes:
    peer, client, api = (_free_port() for _ in range(3))
    etcd = f"http://127.0.0.1:{client}"
    spawn(
        stack,
        folder,
        "etcd",
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={etcd}",
        f"--advertise-client-urls={etcd}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
        "--unsafe-no-fsync" if _knows("etcd", "unsafe-no-fsync") else "--quota-backend-bytes=0",
    )
    _write_signing_key(folder / "accounts.key")
    (folder / "tokens.csv").write_text(f"{ADMIN},admin,admin,system:masters\n")
    (folder / "audit.yaml").write_text(POLICY)
    log = folder / "audit.log"
    spawn(
        stack,
        folder,
        "kube-apiserver",
        f"--etcd-servers={etcd}",
        f"--cert-dir={folder / 'certificates'}",
        f"--secure-port={api}",
        f"--bind-address={address}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'accounts.key'}",
        f"--service-account-signing-key-file={folder / 'accounts.key'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.96.0.0/16",
        f"--audit-policy-file={folder / 'audit.yaml'}",
        f"--audit-log-path={log}",
        *_gang_options(),
    )
    url = f"https://{address}:{api}"
    _wait(lambda: _is_ready(url), "the API server", folder / "kube-apiserver.log")
    path = folder / "kubeconfig"
    path.write_text(kubeconfig_text(url, ADMIN, str(folder / "certificates" / "apiserver.crt")))
    return Kubernetes(str(path), folder, url, log)


def _gang_options() -> tuple[str, ...]:
    if not _knows("kube-apiserver", "GenericWorkload"):
        return ()
    return ("--feature-gates=GenericWorkload=true", "--runtime-config=api/all=true")


def _start_controller(name: str, server: Kubernetes, folder: Path, stack: ExitStack) -> bool:
    if find_tool(name) is None:
        return False
    options = [f"--kubeconfig={server.kubeconfig}", "--leader-elect=false"]
    if name == "kube-controller-manager":
        options += [
            f"--service-account-private-key-file={folder / 'accounts.key'}",
            f"--root-ca-file={folder / 'certificates' / 'apiserver.crt'}",
            "--use-service-account-credentials=false",
        ]
    elif _knows(name, "GangScheduling"):
        options += ["--feature-gates=GenericWorkload=true,GangScheduling=true"]
    spawn(stack, folder, name, *options, f"--secure-port={_free_port()}")
    return True


def spawn(stack: ExitStack, folder: Path, name: str, *options: str) -> None:
    """Run a program until `stack` is closed; it writes to `NAME.log` in `folder`."""
    program = find_tool(name)
    assert program is not None, name
    log = stack.enter_context((folder / f"{name}.log").open("wb"))
    process = subprocess.Popen([program, *options], stdout=log, stderr=log, cwd=folder)

    def end() -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _knows(name: str, word: str) -> bool:
    program = find_tool(name)
    assert program is not None
    shown = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    return word in shown.stdout + shown.stderr


def _write_signing_key(path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )


def _is_ready(url: str) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(f"{url}/readyz", headers={"Authorization": f"Bearer {ADMIN}"})
    try:
        with urllib.request.urlopen(request, timeout=5, context=context) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _has_account(core: Any, namespace: str) -> bool:
    found = core.list_namespaced_service_account(namespace).items
    return any(each.metadata.name == "default" for each in found)


def _wait(condition: Any, what: str, log: Path | None = None) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.1)
    tail = "" if log is None else log.read_text()[-3000:]
    sys.stderr.write(tail)
    raise AssertionError(f"{what} did not come within {START_S:g} s\n{tail}")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
