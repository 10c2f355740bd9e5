"""Follows `kubectl cordon`: the PlexRL node of a cordoned Kubernetes node is drained.

Which nodes the operator drained is kept in a ConfigMap, so that after `kubectl uncordon` it takes
back those and no node that a person drained with `plexrl nodes drain`.
"""

import logging
import threading
import time
from typing import TYPE_CHECKING

from plexrl.cluster.kubernetes.api import TIMEOUT_S
from plexrl.cluster.kubernetes.operator.jobs import JobsOfCluster
from plexrl.cluster.kubernetes.operator.watching import WATCH_S, Key, Watched
from plexrl.errors import PlexRLError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

LOG = logging.getLogger(__name__)


class CordonFollower:
    """Watches the Kubernetes nodes."""

    def __init__(
        self,
        api: "ApiClient",
        jobs: JobsOfCluster,
        namespace: str,
        record: str,
        resync_s: float = 30.0,
    ) -> None:
        """`record` is the ConfigMap, which the chart makes."""
        from kubernetes.client import CoreV1Api

        self._core = CoreV1Api(api)
        self._jobs, self._namespace, self._record = jobs, namespace, record
        self._resync_s = resync_s
        self._changed = threading.Event()
        self._nodes = Watched(api, self._core.list_node, self._on_change)

    def _on_change(self, key: Key) -> None:
        del key
        self._changed.set()

    @property
    def is_healthy(self) -> bool:
        """Whether the API server has answered lately."""
        return time.monotonic() - self._nodes.active_at < 2 * WATCH_S

    def run(self, stop: threading.Event) -> None:
        """Follow until `stop`."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        threading.Thread(target=self._nodes.keep, args=(stop,), daemon=True).start()
        looked_at = float("-inf")
        while not stop.is_set():
            is_due = time.monotonic() - looked_at >= self._resync_s
            if self._nodes.is_listed.is_set() and (self._changed.is_set() or is_due):
                self._changed.clear()
                looked_at = time.monotonic()
                try:
                    self.follow()
                except (ApiException, HTTPError, PlexRLError) as error:
                    LOG.warning("cordoned nodes could not be followed, trying again: %s", error)
            stop.wait(0.5)

    def follow(self) -> None:
        """Drain what is cordoned, and take back what is so no longer.

        Raises:
            ApiException, PlexRLError: one of the two could not be asked.
        """
        cordoned = {
            name
            for (_, name), node in self._nodes.all().items()
            if node.get("spec", {}).get("unschedulable")
        }
        draining = self._jobs.nodes()
        record = self._core.read_namespaced_config_map(
            self._record, self._namespace, _request_timeout=TIMEOUT_S
        )
        ours = set(record.data or ())
        for node in sorted(cordoned & draining.keys()):
            if not draining[node]:
                # The record first: a node that is drained without one stays drained for good.
                self._mark(node, "cordoned")
                self._jobs.set_drained(node, True)
                LOG.info("drain %s: it is cordoned", node)
        for node in sorted(ours - cordoned):
            if draining.get(node):
                self._jobs.set_drained(node, False)
                LOG.info("take %s back: it is no longer cordoned", node)
            self._mark(node, None)

    def _mark(self, node: str, value: str | None) -> None:
        self._core.patch_namespaced_config_map(
            self._record, self._namespace, {"data": {node: value}}, _request_timeout=TIMEOUT_S
        )
