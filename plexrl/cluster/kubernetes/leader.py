"""The scheduler with standbys: labels the pod whose scheduler listens, so the Service finds it.

The lease in the journal decides who leads, and fences every write; a standby does not listen. What
Kubernetes adds is the way there: the leader's pod carries a label that the Service selects, and a
Lease object shows the leader to `kubectl get lease`.
"""

import asyncio
import logging
import sys
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from plexrl.cluster.kubernetes.api import TIMEOUT_S, has_status
from plexrl.cluster.kubernetes.lease import KubernetesLease

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

LOG = logging.getLogger(__name__)

LABEL = "plexrl.dev/leader"
LOOK_S = 1.0
RENEW_S = 5.0
_LISTEN = "0A"
"""State of a listening socket in `/proc/net/tcp`."""


class LeaderLabel:
    """The label on this pod."""

    def __init__(
        self, api: "ApiClient", namespace: str, pod: str, lease: str, selector: str
    ) -> None:
        from kubernetes.client import CoreV1Api

        self._core = CoreV1Api(api)
        self._namespace, self._pod, self._selector = namespace, pod, selector
        self._lease = KubernetesLease(api, namespace, lease, pod)

    def set(self) -> None:
        """Label this pod only. A former leader may be on a node that nobody can reach, so its pod
        cannot do this itself.

        Raises:
            ApiException: the API server refuses, or cannot be reached.
        """
        others = self._core.list_namespaced_pod(
            self._namespace,
            label_selector=f"{self._selector},{LABEL}=true",
            _request_timeout=TIMEOUT_S,
        )
        for item in others.items:
            if item.metadata.name != self._pod:
                self._patch(item.metadata.name, None)
        self._patch(self._pod, "true")
        self._lease.try_hold(by_force=True)

    def renew(self) -> None:
        """Renew the Lease object. Raises as `set`."""
        self._lease.try_hold(by_force=True)

    def clear(self) -> None:
        """Remove the label. A container that starts anew finds the one of its last run. Raises as
        `set`."""
        self._patch(self._pod, None)
        self._lease.release()

    def _patch(self, pod: str, value: str | None) -> None:
        from kubernetes.client import ApiException

        try:
            self._core.patch_namespaced_pod(
                pod,
                self._namespace,
                {"metadata": {"labels": {LABEL: value}}},
                _request_timeout=TIMEOUT_S,
            )
        except ApiException as error:
            if not has_status(error, HTTPStatus.NOT_FOUND):
                raise


async def run_scheduler_pod(
    config: Path, label: LeaderLabel, is_leading: Callable[[], bool], stop: asyncio.Event
) -> int:
    """Run the scheduler's process until it ends, or until `stop`; returns its exit status."""
    await _try(label.clear)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "plexrl.scheduler", "--config", str(config)
    )
    following = asyncio.create_task(_follow(label, is_leading))
    ended = asyncio.create_task(process.wait())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            process.terminate()
        return await ended
    finally:
        for task in (following, stopping):
            task.cancel()
        await asyncio.gather(following, stopping, return_exceptions=True)
        if process.returncode is None:
            process.kill()
            await process.wait()
        await _try(label.clear)


async def _follow(label: LeaderLabel, is_leading: Callable[[], bool]) -> None:
    """Keep the label as the scheduler is; what fails is tried again."""
    was_leading, renewed_at = False, 0.0
    loop = asyncio.get_running_loop()
    while True:
        leads = is_leading()
        if leads != was_leading:
            if await _try(label.set if leads else label.clear):
                was_leading, renewed_at = leads, loop.time()
        elif leads and loop.time() - renewed_at > RENEW_S and await _try(label.renew):
            renewed_at = loop.time()
        await asyncio.sleep(LOOK_S)


async def _try(work: Callable[[], None]) -> bool:
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        await asyncio.to_thread(work)
    except (ApiException, HTTPError) as error:
        LOG.warning("the leader's label could not be changed, trying again: %s", error)
        return False
    return True


def listens(port: int, tables: tuple[str, ...] = ("/proc/net/tcp", "/proc/net/tcp6")) -> bool:
    """Whether a process of this network namespace listens at a TCP port. A connection would ask
    the same, and be a failed handshake in the scheduler's log."""
    wanted = f":{port:04X}"
    for table in tables:
        path = Path(table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[1].endswith(wanted) and fields[3] == _LISTEN:
                return True
    return False
