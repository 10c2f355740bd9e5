"""In place of a kubelet: runs the pods of one node as processes of this machine.

A pod's container becomes a process with the pod's command, arguments and variables; folders of the
node are this machine's. Phases, exit codes and deletions are reported as the kubelet does. There is
no isolation: what needs a container's file system or user is not shown by these tests.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

Plain = dict[str, Any]


class PodRunner:
    """Runs the pods of a namespace that are bound to `node`."""

    def __init__(self, api: "ApiClient", namespace: str, node: str, folder: Path) -> None:
        from kubernetes.client import CoreV1Api

        self._core = CoreV1Api(api)
        self._namespace, self._node, self._folder = namespace, node, folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """By name of the pod; also those that have ended."""
        self.specs: dict[str, Any] = {}
        self._reported: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to run pods."""
        self._thread.start()

    def close(self) -> None:
        """End all processes."""
        self._stop.set()
        self._thread.join(30)
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            pods = self._core.list_namespaced_pod(
                self._namespace, field_selector=f"spec.nodeName={self._node}"
            ).items
            for pod in pods:
                self._look(pod)

    def _look(self, pod: Any) -> None:
        name = pod.metadata.name
        process = self.processes.get(name)
        if process is None:
            if pod.metadata.deletion_timestamp is None:
                self._spawn(pod)
            else:
                self._remove(name)
            return
        code = process.poll()
        if code is not None and name not in self._reported:
            self._reported.add(name)
            self._report(name, "Succeeded" if code == 0 else "Failed", code)
        if pod.metadata.deletion_timestamp is not None:
            self._end(process, float(pod.metadata.deletion_grace_period_seconds or 0))
            self._remove(name)

    def _spawn(self, pod: Any) -> None:
        name, container = pod.metadata.name, pod.spec.containers[0]
        command = [*(container.command or ()), *(container.args or ())]
        if command[0] == "python":
            command[0] = sys.executable
        variables = {each.name: each.value or "" for each in container.env or ()}
        log = (self._folder / f"{name}.log").open("wb")
        self.specs[name] = pod.spec
        self.processes[name] = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=log, stderr=log
        )
        log.close()
        self._report(name, "Running", None)

    def _report(self, name: str, phase: str, code: int | None) -> None:
        from kubernetes.client import ApiException

        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        state: Plain = {"running": {"startedAt": now}}
        if code is not None:
            killed = {"signal": -code} if code < 0 else {}
            state = {
                "terminated": {
                    "exitCode": code if code >= 0 else 128 - code,
                    "reason": "Completed" if code == 0 else "Error",
                    "startedAt": now,
                    "finishedAt": now,
                    **killed,
                }
            }
        container = {
            "name": self.specs[name].containers[0].name,
            "image": "image",
            "imageID": "image",
            "ready": code is None,
            "restartCount": 0,
            "state": state,
        }
        body = {"status": {"phase": phase, "startTime": now, "containerStatuses": [container]}}
        try:
            self._core.patch_namespaced_pod_status(name, self._namespace, body)
        except ApiException as error:
            if error.status != 404:
                raise

    def _remove(self, name: str) -> None:
        from kubernetes.client import ApiException

        try:
            self._core.delete_namespaced_pod(name, self._namespace, grace_period_seconds=0)
        except ApiException as error:
            if error.status != 404:
                raise

    @staticmethod
    def _end(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
