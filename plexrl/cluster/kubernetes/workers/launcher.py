"""Launches workers as pods on the agent's own node; the `Launcher` of an agent on Kubernetes.

Agent and worker share a folder of the node. The worker's process connects to a Unix socket there,
gets its configuration, and keeps the connection: its end is the end of the process, seen at once
and without the API server. A worker whose agent is gone sees the same and ends.
"""

import contextlib
import logging
import os
import select
import socket
import struct
import tempfile
import time
from http import HTTPStatus
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.cluster.kubernetes.api import TIMEOUT_S, has_status
from plexrl.cluster.kubernetes.workers.pods import (
    GROUP,
    PodsConfig,
    group_name,
    pod_group,
    worker_pod,
)
from plexrl.process.memory.tuning import tune
from plexrl.worker.agent.launcher import last_line
from plexrl.worker.interface.config import WorkerConfig

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

LOG = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""For the image to be pulled and the container to start."""
LOOK_S = 0.5
STOP_GRACE_S = 2
REASON_S = 5.0
"""For the kubelet to report why a container ended."""
HOPELESS = frozenset({"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"})
PASSED_ON = ("NVIDIA_VISIBLE_DEVICES", "NCCL_", "GLOO_", "HF_HOME", "HF_HUB_")
"""Beginnings of the agent's variables that workers get too. With the first, the runtime class gives
them the GPUs that the device plugin gave to the node's pod. None is a secret, because many may read
pods; workers get credentials from the Secret that the pods' template names."""


class PodLauncher:
    """Starts workers as pods."""

    def __init__(self, api: "ApiClient", config: PodsConfig, run_dir: Path) -> None:
        """`run_dir` is a folder for sockets, at the same path in the workers' pods."""
        from kubernetes.client import CoreV1Api, CustomObjectsApi

        self._core, self._objects = CoreV1Api(api), CustomObjectsApi(api)
        self._config, self._run_dir = config, run_dir
        self._groups_version = groups_version(api) if config.pod_groups else None
        if config.pod_groups and self._groups_version is None:
            LOG.warning("the API server has no PodGroups: workers are bound to the node directly")

    def warm_up(self) -> None:
        """Fetch no image in advance: workers use the one that the node's own pod runs."""

    def start(self, config: WorkerConfig) -> "PodWorker":
        """Start a worker.

        Raises:
            OSError: its pod cannot be made, or does not start.
        """
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        with (
            tempfile.TemporaryDirectory(prefix="l-", dir=self._run_dir) as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        ):
            path = f"{folder}/s"
            listener.bind(path)
            listener.listen(2)
            listener.settimeout(LOOK_S)
            version = self._groups_version
            body = worker_pod(
                self._config,
                config,
                path,
                _environment(config),
                in_group=version is not None,
            )
            pod = body["metadata"]["name"]
            try:
                if version is not None:
                    self._make_group(config, version)
                self._core.create_namespaced_pod(
                    self._config.namespace, body, _request_timeout=TIMEOUT_S
                )
            except (ApiException, HTTPError) as error:
                raise OSError(f"the worker's pod was refused: {_text(error)}") from error
            try:
                ready = self._accept(listener, pod)
                lifeline = self._accept(listener, pod)
                ready.send(config)
            except BaseException:
                self.delete(pod, config, grace_s=0)
                raise
        return PodWorker(self, pod, config, ready, lifeline)

    def reason(self, pod: str) -> str:
        """Why a pod's container ended, as the kubelet says."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        end = time.monotonic() + REASON_S
        while time.monotonic() < end:
            try:
                found = self._read(pod)
            except (ApiException, HTTPError) as error:
                return f"the API server does not say why: {_text(error)}"
            for status in found.status.container_statuses or ():
                if (ended := status.state.terminated) is not None:
                    signal = f", signal {ended.signal}" if ended.signal else ""
                    return f"{ended.reason or 'ended'}, exit code {ended.exit_code}{signal}"
            if found.status.reason:
                return f"{found.status.reason}: {found.status.message or ''}"
            time.sleep(LOOK_S)
        return "the kubelet does not say why"

    def delete(self, pod: str, config: WorkerConfig, *, grace_s: int) -> None:
        """End a pod, if it is there, and its gang. An API server that cannot be reached is only
        logged: the pod goes with the agent's own."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            self._core.delete_namespaced_pod(
                pod,
                self._config.namespace,
                grace_period_seconds=grace_s,
                _request_timeout=TIMEOUT_S,
            )
        except (ApiException, HTTPError) as error:
            if not has_status(error, HTTPStatus.NOT_FOUND):
                LOG.warning("the pod %s was not deleted: %s", pod, _text(error))
        if self._groups_version is None or config.rank != 0:
            return
        try:
            self._objects.delete_namespaced_custom_object(
                GROUP,
                self._groups_version,
                self._config.namespace,
                "podgroups",
                group_name(config),
                _request_timeout=TIMEOUT_S,
            )
        except (ApiException, HTTPError) as error:
            if not has_status(error, HTTPStatus.NOT_FOUND):
                LOG.warning("the PodGroup %s was not deleted: %s", group_name(config), _text(error))

    def _make_group(self, config: WorkerConfig, version: str) -> None:
        from kubernetes.client import ApiException

        try:
            self._objects.create_namespaced_custom_object(
                GROUP,
                version,
                self._config.namespace,
                "podgroups",
                pod_group(self._config, config, version),
                _request_timeout=TIMEOUT_S,
            )
        except ApiException as error:
            # Another rank's launcher has made it.
            if not has_status(error, HTTPStatus.CONFLICT):
                raise

    def _accept(self, listener: socket.socket, pod: str) -> Connection:
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                self._check(pod)
                continue
            _check_user(sock)
            sock.setblocking(True)
            return Connection(sock.detach())
        raise OSError(f"the worker's pod {pod} did not start in {START_TIMEOUT_S:g} s")

    def _check(self, pod: str) -> None:
        """Raises OSError if the pod will never start."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            found = self._read(pod)
        except (ApiException, HTTPError) as error:
            if has_status(error, HTTPStatus.NOT_FOUND):
                raise OSError(f"the worker's pod {pod} was deleted") from error
            return
        if found.status.phase in ("Failed", "Succeeded"):
            raise OSError(f"the worker's pod {pod} ended at once: {self.reason(pod)}")
        for status in found.status.container_statuses or ():
            waiting = status.state.waiting
            if waiting is not None and waiting.reason in HOPELESS:
                raise OSError(f"{pod} cannot start: {waiting.reason}: {waiting.message or ''}")

    def _read(self, pod: str) -> Any:
        return self._core.read_namespaced_pod(
            pod, self._config.namespace, _request_timeout=TIMEOUT_S
        )


class PodWorker:
    """A worker in a pod."""

    def __init__(
        self,
        launcher: PodLauncher,
        pod: str,
        config: WorkerConfig,
        ready: Connection,
        lifeline: Connection,
    ) -> None:
        """The worker sends nothing over `lifeline`, which ends with it."""
        self._launcher, self.pod, self._config = launcher, pod, config
        self._ready, self._lifeline = ready, lifeline

    @property
    def sentinel(self) -> int:
        return self._lifeline.fileno()

    @property
    def ready(self) -> Connection:
        return self._ready

    def exit_reason(self) -> str:
        """The kubelet's reason, and the last line of the log. The pod is deleted."""
        reason = self._launcher.reason(self.pod)
        self._launcher.delete(self.pod, self._config, grace_s=0)
        return f"{reason}; its log ends with: {last_line(Path(self._config.log_path))}"

    def stop(self) -> None:
        """Delete the pod: SIGTERM, then SIGKILL. The closed connection ends the worker too, if the
        API server cannot be reached."""
        self._launcher.delete(self.pod, self._config, grace_s=STOP_GRACE_S)
        if not self._has_ended(STOP_GRACE_S + REASON_S):
            self._ready.send(False)
            self._has_ended(REASON_S)

    def kill(self) -> None:
        """Tell the worker to end at once; its pod is deleted when it has ended."""
        with contextlib.suppress(OSError):
            self._ready.send(False)

    def _has_ended(self, timeout_s: float) -> bool:
        return bool(select.select([self._lifeline], [], [], timeout_s)[0])


def groups_version(api: "ApiClient") -> str | None:
    """The newest version of PodGroups that the API server has."""
    from kubernetes.client import ApiException, ApisApi, CustomObjectsApi

    groups = ApisApi(api).get_api_versions(_request_timeout=TIMEOUT_S).groups
    for group in groups:
        if group.name != GROUP:
            continue
        for version in group.versions:
            try:
                found = CustomObjectsApi(api).get_api_resources(
                    GROUP, version.version, _request_timeout=TIMEOUT_S
                )
            except ApiException:
                continue
            if any(resource.name == "podgroups" for resource in found.resources):
                return str(version.version)
    return None


def _environment(config: WorkerConfig) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    return tune({**own, "OMP_NUM_THREADS": str(config.threads), "HF_HUB_OFFLINE": "1"})


def _check_user(sock: socket.socket) -> None:
    """Raises OSError if another user's process connected."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        sock.close()
        raise OSError(f"a process of user {user} answered instead of the worker")


def _text(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)
