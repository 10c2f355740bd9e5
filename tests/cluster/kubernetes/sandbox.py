"""Runs the chart's pods without a kubelet, each container in a sandbox of bubblewrap.

A container sees this machine's files read-only in place of an image's, its volumes at the paths of
its mounts, the user of its pod, no capabilities, and the environment of its spec. Volumes of a pod
are folders; ConfigMaps and Secrets are read from the API server, and tokens are requested from it,
bound to the pod. Pods share this machine's network, and names of Services lead to 127.0.0.1.
"""

import base64
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.cluster.kubernetes.api_server import Kubernetes

Plain = dict[str, Any]
FILES = ("ssl", "ld.so.cache", "nsswitch.conf", "localtime", "alternatives")
"""What programs read of `/etc`."""
INIT_S = 120.0


class Sandbox:
    """Pods of one namespace on one node."""

    def __init__(self, kubernetes: Kubernetes, namespace: str, node: str, folder: Path) -> None:
        from kubernetes.client import CoreV1Api

        self._kubernetes, self._namespace, self._node = kubernetes, namespace, node
        self._folder = folder
        self._core = CoreV1Api(kubernetes.api())
        self._running: list[subprocess.Popen[bytes]] = []
        self._hosts = folder / "hosts"
        self._hosts.write_text("127.0.0.1 localhost\n")

    def add_host(self, name: str) -> None:
        """Let a Service's name lead here."""
        with self._hosts.open("a") as file:
            file.write(f"127.0.0.1 {name}.{self._namespace}.svc\n")

    def run(self, name: str, spec: Plain, labels: Plain) -> "list[subprocess.Popen[bytes]]":
        """Make the pod, and run its containers in their order; returns the main ones."""
        body = {
            "metadata": {"name": name, "labels": labels},
            "spec": {**spec, "nodeName": self._node},
        }
        pod = self._core.create_namespaced_pod(self._namespace, body)
        folder = self._folder / name
        volumes = {
            each["name"]: self._volume(each, folder / each["name"], pod)
            for each in spec.get("volumes", ())
        }
        if spec.get("automountServiceAccountToken"):
            volumes["api"] = self._api_token(folder / "api", pod)
        for each in spec.get("initContainers", ()):
            process = self._start(each, spec, volumes, pod, folder)
            if each.get("restartPolicy") == "Always":
                self._await_start(each, volumes, process, folder)
            elif process.wait(INIT_S) != 0:
                raise AssertionError(f"{name}/{each['name']}: {self.log(name, each['name'])}")
        return [self._start(each, spec, volumes, pod, folder) for each in spec["containers"]]

    def log(self, pod: str, container: str) -> str:
        """What a container wrote."""
        return (self._folder / pod / f"{container}.log").read_text()

    def close(self) -> None:
        """End all containers, the newest first."""
        for process in reversed(self._running):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(
        self, container: Plain, spec: Plain, volumes: Plain, pod: Any, folder: Path
    ) -> "subprocess.Popen[bytes]":
        command = [*container.get("command", ()), *container.get("args", ())]
        if "command" not in container:
            command = ["python", "-m", "plexrl.cluster.kubernetes", *command]
        environment = {each["name"]: self._value(each, pod) for each in container.get("env", ())}
        command = [_expanded(word, environment) for word in command]
        security = spec["securityContext"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        mounts = [
            (each["mountPath"], volumes[each["name"]], each.get("readOnly", False))
            for each in container.get("volumeMounts", ())
        ]
        if "api" in volumes:
            mounts.append(("/var/run/secrets/kubernetes.io/serviceaccount", volumes["api"], True))
        with (folder / f"{container['name']}.log").open("ab") as log:
            process = subprocess.Popen(
                [*self._walls(security), *_binds(mounts), *self._variables(environment), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._running.append(process)
        return process

    def _walls(self, security: Plain) -> list[str]:
        walls = ["bwrap", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
        for folder in ("/tmp", "/run", "/var/lib", "/etc"):
            walls += ["--tmpfs", folder]
        for name in FILES:
            if Path("/etc", name).exists():
                walls += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
        # The tests' own files may lie under a folder that is hidden now.
        for path in (str(Path.cwd()), sys.prefix):
            if path.startswith("/tmp/"):
                walls += ["--ro-bind", path, path]
        walls += ["--ro-bind", str(self._hosts), "/etc/hosts", "--unshare-user", "--unshare-pid"]
        walls += ["--uid", str(security["runAsUser"]), "--gid", str(security["runAsGroup"])]
        return [*walls, "--cap-drop", "ALL", "--die-with-parent", "--clearenv", "--chdir", "/"]

    def _variables(self, environment: dict[str, str]) -> list[str]:
        server = urlsplit(self._kubernetes.url)
        given = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": str(Path.cwd()),
            "HOME": "/tmp",
            "OMP_NUM_THREADS": "1",
            "KUBERNETES_SERVICE_HOST": str(server.hostname),
            "KUBERNETES_SERVICE_PORT": str(server.port),
            **environment,
        }
        return [word for key, value in given.items() for word in ("--setenv", key, value)]

    def _value(self, variable: Plain, pod: Any) -> str:
        source = variable.get("valueFrom")
        if source is None:
            return str(variable.get("value", ""))
        if "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            secret = self._core.read_namespaced_secret(reference["name"], self._namespace)
            return str(base64.b64decode(secret.data[reference["key"]]), "utf-8")
        field = source["fieldRef"]["fieldPath"]
        return {
            "metadata.name": pod.metadata.name,
            "metadata.namespace": self._namespace,
            "metadata.uid": pod.metadata.uid,
            "spec.nodeName": self._node,
            "status.podIP": "127.0.0.1",
        }[field]

    def _volume(self, volume: Plain, folder: Path, pod: Any) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            self._config_map(volume["configMap"], folder)
        elif "secret" in volume:
            wanted = volume["secret"]
            found = self._core.read_namespaced_secret(wanted["secretName"], self._namespace).data
            for item in wanted["items"]:
                (folder / item["path"]).write_bytes(base64.b64decode(found[item["key"]]))
        for source in volume.get("projected", {}).get("sources", ()):
            if "configMap" in source:
                self._config_map(source["configMap"], folder)
            elif "serviceAccountToken" in source:
                wanted = source["serviceAccountToken"]
                token = self._token(pod, wanted.get("audience"))
                (folder / wanted["path"]).write_text(token)
        return folder

    def _api_token(self, folder: Path, pod: Any) -> Path:
        folder.mkdir(parents=True)
        (folder / "token").write_text(self._token(pod, None))
        self._authority(folder / "ca.crt")
        (folder / "namespace").write_text(self._namespace)
        return folder

    def _config_map(self, wanted: Plain, folder: Path) -> None:
        if wanted["name"] == "kube-root-ca.crt":
            self._authority(folder / "ca.crt")
            return
        found = self._core.read_namespaced_config_map(wanted["name"], self._namespace).data
        items = wanted.get("items") or [{"key": key, "path": key} for key in found]
        for item in items:
            (folder / item["path"]).write_text(found[item["key"]])

    def _authority(self, path: Path) -> None:
        shutil.copy(self._kubernetes.api().configuration.ssl_ca_cert, path)

    def _token(self, pod: Any, audience: str | None) -> str:
        reference = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": pod.metadata.name,
            "uid": pod.metadata.uid,
        }
        spec: Plain = {"expirationSeconds": 3600, "boundObjectRef": reference}
        spec["audiences"] = [audience] if audience else []
        account = pod.spec.service_account_name or "default"
        made = self._core.create_namespaced_service_account_token(
            account, self._namespace, {"spec": spec}
        )
        return str(made.status.token)

    def _await_start(
        self, container: Plain, volumes: Plain, process: "subprocess.Popen[bytes]", folder: Path
    ) -> None:
        path = Path(container["startupProbe"]["exec"]["command"][-1])
        real = next(
            volumes[each["name"]] / path.relative_to(each["mountPath"])
            for each in container["volumeMounts"]
            if path.is_relative_to(each["mountPath"])
        )
        end = time.monotonic() + INIT_S
        while not real.exists():
            log = (folder / f"{container['name']}.log").read_text()
            assert process.poll() is None, log
            assert time.monotonic() < end, log
            time.sleep(0.1)


def _binds(mounts: list[tuple[str, Path, bool]]) -> list[str]:
    words = []
    for path, folder, is_read_only in sorted(mounts):
        target = path.replace("/var/run/", "/run/")
        words += ["--ro-bind" if is_read_only else "--bind", str(folder), target]
    # Folders above the mounts belong to the sandbox, and are read-only as the root is.
    return [*words, "--remount-ro", "/etc", "--remount-ro", "/run", "--remount-ro", "/var/lib"]


def _expanded(word: str, environment: dict[str, str]) -> str:
    for name, value in environment.items():
        word = word.replace(f"$({name})", value)
    return word


def is_possible() -> bool:
    """Whether this machine lets tests make sandboxes."""
    if shutil.which("bwrap") is None:
        return False
    tried = subprocess.run(
        ["bwrap", "--ro-bind", "/", "/", "--unshare-user", "--uid", "10001", "true"],
        capture_output=True,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    return tried.returncode == 0
