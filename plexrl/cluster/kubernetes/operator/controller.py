"""The controller of RLJobs: watches them and their Jobs, and reconciles each that changed.

One thread reconciles, so no RLJob is worked on twice at a time. A failed attempt is repeated with a
delay that doubles; a conflict is repeated at once, with what the watch has brought since.
"""

import heapq
import logging
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from plexrl.cluster.kubernetes.api import has_status
from plexrl.cluster.kubernetes.operator.manifest import GROUP, LABEL, PLURAL, VERSION
from plexrl.cluster.kubernetes.operator.reconcile import Reconciler
from plexrl.cluster.kubernetes.operator.watching import WATCH_S, Key, Watched
from plexrl.errors import PlexRLError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

LOG = logging.getLogger(__name__)

RETRY_S = 0.5
RETRY_S_MAX = 60.0
CONFLICT_S = 0.1


class WorkQueue:
    """Keys to work on, each at most once, not before their time. Thread-safe."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._changed = threading.Condition()

    def add(self, key: Key, after_s: float = 0.0) -> None:
        """Work on `key` in `after_s` seconds, or at its earlier time."""
        at = time.monotonic() + after_s
        with self._changed:
            if key in self._due and self._due[key] <= at:
                return
            self._due[key] = at
            heapq.heappush(self._heap, (at, key))
            self._changed.notify()

    def take(self, timeout_s: float) -> Key | None:
        """The next key that is due; None if there was none for `timeout_s` seconds."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now = time.monotonic()
                while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
                    heapq.heappop(self._heap)
                if self._heap and self._heap[0][0] <= now:
                    _, key = heapq.heappop(self._heap)
                    del self._due[key]
                    return key
                if now >= end:
                    return None
                until = min(end, self._heap[0][0]) if self._heap else end
                self._changed.wait(until - now)


class OperatorController:
    """Runs the RLJobs of some namespaces."""

    def __init__(
        self,
        api: "ApiClient",
        reconciler: Reconciler,
        namespaces: Sequence[str],
        resync_s: float = 30.0,
    ) -> None:
        """Each RLJob is looked at every `resync_s` seconds too, since PlexRL sends no events."""
        from kubernetes.client import BatchV1Api, CustomObjectsApi

        self._reconciler, self._resync_s = reconciler, resync_s
        self._queue = WorkQueue()
        self._failures: dict[Key, int] = {}
        custom, batch = CustomObjectsApi(api), BatchV1Api(api)
        self._rljobs = {
            namespace: Watched(
                api,
                custom.list_namespaced_custom_object,
                self._queue.add,
                group=GROUP,
                version=VERSION,
                namespace=namespace,
                plural=PLURAL,
            )
            for namespace in namespaces
        }
        self._jobs = {
            namespace: Watched(
                api,
                batch.list_namespaced_job,
                self._queue.add,
                namespace=namespace,
                label_selector=LABEL,
            )
            for namespace in namespaces
        }

    @property
    def is_healthy(self) -> bool:
        """Whether the API server has answered lately."""
        oldest = min(each.active_at for each in self._watched())
        return time.monotonic() - oldest < 2 * WATCH_S

    def run(self, stop: threading.Event) -> None:
        """Reconcile until `stop`."""
        keepers = [
            threading.Thread(target=each.keep, args=(stop,), daemon=True)
            for each in self._watched()
        ]
        for keeper in keepers:
            keeper.start()
        for each in self._watched():
            # Without the Jobs every RLJob would look as if it had none.
            while not each.is_listed.wait(1.0):
                if stop.is_set():
                    return
        resync_at = time.monotonic() + self._resync_s
        while not stop.is_set():
            if time.monotonic() >= resync_at:
                for rljobs in self._rljobs.values():
                    for key in rljobs.all():
                        self._queue.add(key)
                resync_at = time.monotonic() + self._resync_s
            taken = self._queue.take(timeout_s=0.5)
            if taken is not None:
                self._work(taken)

    def _work(self, key: Key) -> None:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        rljob = self._rljobs[key[0]].get(key)
        if rljob is None:
            self._failures.pop(key, None)
            return
        try:
            self._reconciler.reconcile(rljob, self._jobs[key[0]].get(key))
        except ApiException as error:
            if has_status(error, HTTPStatus.CONFLICT):
                self._queue.add(key, CONFLICT_S)
            elif not has_status(error, HTTPStatus.NOT_FOUND):
                self._retry(key, f"{error.status} {error.reason}")
        except (HTTPError, PlexRLError) as error:
            self._retry(key, str(error))
        else:
            self._failures.pop(key, None)

    def _retry(self, key: Key, why: str) -> None:
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        wait_s = min(RETRY_S * 2.0**count, RETRY_S_MAX)
        LOG.warning("RLJob %s/%s: %s; trying again in %.1f s", *key, why, wait_s)
        self._queue.add(key, wait_s)

    def _watched(self) -> list[Watched]:
        return [*self._rljobs.values(), *self._jobs.values()]
