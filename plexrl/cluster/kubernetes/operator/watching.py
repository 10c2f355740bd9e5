"""A copy of one kind of object, kept by list and watch.

The copy begins with a list, and a watch from the list's resourceVersion brings every change. A
watch that ends goes on from the last version seen; when the server has forgotten that version
(410), or after an error, the list is read again. So no change is missed, and a deletion is seen
late at worst.
"""

import logging
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from plexrl.cluster.kubernetes.api import TIMEOUT_S, KubeObject, has_status

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

LOG = logging.getLogger(__name__)
Key = tuple[str, str]
"""Namespace (empty: none) and name."""

WATCH_S = 240
"""Length of one watch; the server ends it."""
RETRY_S = 1.0
RETRY_S_MAX = 30.0


class Watched:
    """Objects of one kind, and a thread that keeps them. Thread-safe."""

    def __init__(
        self,
        api: "ApiClient",
        listing: Callable[..., Any],
        on_change: Callable[[Key], None],
        **options: Any,
    ) -> None:
        """`listing` is a `list_…` function of the client; `options` are its arguments. `on_change`
        is called with the key of each object that appeared, changed or went."""
        self._api, self._listing, self._options = api, listing, options
        self._on_change = on_change
        self._objects: dict[Key, KubeObject] = {}
        self._lock = threading.Lock()
        self.is_listed = threading.Event()
        """Set once the copy is complete for the first time."""
        self.active_at = time.monotonic()
        """When the server last answered."""

    def get(self, key: Key) -> KubeObject | None:
        """A copy of the object, as last seen."""
        with self._lock:
            return self._objects.get(key)

    def all(self) -> dict[Key, KubeObject]:
        """All objects, as last seen."""
        with self._lock:
            return dict(self._objects)

    def keep(self, stop: threading.Event) -> None:
        """List and watch until `stop`."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        version, retry_s = "", RETRY_S
        while not stop.is_set():
            try:
                if not version:
                    version = self._list()
                version = self._watch(version, stop)
                retry_s = RETRY_S
            except ApiException as error:
                version = ""
                if not has_status(error, HTTPStatus.GONE):
                    LOG.warning("%s: %s", self._listing.__name__, error.reason)
                    stop.wait(retry_s)
                    retry_s = min(2 * retry_s, RETRY_S_MAX)
            except (HTTPError, OSError) as error:
                LOG.warning("%s: %s", self._listing.__name__, error)
                version = ""
                stop.wait(retry_s)
                retry_s = min(2 * retry_s, RETRY_S_MAX)

    def _list(self) -> str:
        found = self._api.sanitize_for_serialization(
            self._listing(**self._options, _request_timeout=TIMEOUT_S)
        )
        fresh = {_key(each): each for each in found["items"]}
        with self._lock:
            former, self._objects = self._objects, fresh
        self.active_at = time.monotonic()
        for key in former.keys() | fresh.keys():
            if _version(former.get(key)) != _version(fresh.get(key)):
                self._on_change(key)
        self.is_listed.set()
        return str(found["metadata"]["resourceVersion"])

    def _watch(self, version: str, stop: threading.Event) -> str:
        """Follow changes after `version` until the watch ends; returns the last version."""
        from kubernetes.client import ApiException
        from kubernetes.watch import Watch

        stream = Watch().stream(
            self._listing,
            **self._options,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_S,
            _request_timeout=(TIMEOUT_S, WATCH_S + TIMEOUT_S),
        )
        for event in stream:
            self.active_at = time.monotonic()
            kind, found = event["type"], event["raw_object"]
            if kind == "ERROR":
                raise ApiException(status=found.get("code"), reason=found.get("message"))
            version = found["metadata"]["resourceVersion"]
            if kind == "BOOKMARK":
                continue
            key = _key(found)
            with self._lock:
                if kind == "DELETED":
                    self._objects.pop(key, None)
                else:
                    self._objects[key] = found
            self._on_change(key)
            if stop.is_set():
                break
        self.active_at = time.monotonic()
        return version


def _key(found: KubeObject) -> Key:
    return found["metadata"].get("namespace", ""), found["metadata"]["name"]


def _version(found: KubeObject | None) -> str:
    return "" if found is None else str(found["metadata"]["resourceVersion"])
