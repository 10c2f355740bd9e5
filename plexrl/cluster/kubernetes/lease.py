"""A `Lease` object as a lock: of all processes that try to hold it, one does.

Times are measured by each process's own monotonic clock, as client-go does: a holder counts as gone
when the object has not changed for the lease's duration as seen from here. So clocks may differ.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from plexrl.cluster.kubernetes.api import TIMEOUT_S, has_status

if TYPE_CHECKING:
    from kubernetes.client import ApiClient


class KubernetesLease:
    """One process's view of a Lease."""

    def __init__(
        self,
        api: "ApiClient",
        namespace: str,
        name: str,
        identity: str,
        duration_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from kubernetes.client import CoordinationV1Api

        self._api = CoordinationV1Api(api)
        self._namespace, self._name, self._identity = namespace, name, identity
        self._duration_s = duration_s
        self._clock = clock
        self._seen: tuple[str, float] = ("", 0.0)
        """Newest version of the object, and when this process first saw it."""
        self._held_until = 0.0

    @property
    def renew_s(self) -> float:
        """Interval at which its holder renews the lease, and others try to take it."""
        return self._duration_s / 5

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lease, by its own clock: false after a time without
        renewal that is shorter than the one after which others take it."""
        return self._clock() < self._held_until

    def try_hold(self, *, by_force: bool = False) -> bool:
        """Take the lease, or renew it. `by_force`: also from a holder that renews it; for a record
        of a leader that is chosen otherwise.

        Raises:
            ApiException: the API server refuses, or cannot be reached.
        """
        from kubernetes.client import ApiException

        began_at = self._clock()
        try:
            lease = self._api.read_namespaced_lease(
                self._name, self._namespace, _request_timeout=TIMEOUT_S
            )
            if not by_force and not self._is_free(lease):
                self._held_until = 0.0
                return False
            self._write(lease)
        except ApiException as error:
            if has_status(error, HTTPStatus.NOT_FOUND):
                return self._create(began_at)
            if has_status(error, HTTPStatus.CONFLICT):
                # Another process changed it after it was read.
                self._held_until = 0.0
                return False
            raise
        self._held_until = began_at + self._duration_s * 2 / 3
        return True

    def release(self) -> None:
        """Give the lease to the next process at once."""
        from kubernetes.client import ApiException

        if not self.is_held:
            return
        self._held_until = 0.0
        try:
            lease = self._api.read_namespaced_lease(
                self._name, self._namespace, _request_timeout=TIMEOUT_S
            )
            if lease.spec.holder_identity == self._identity:
                lease.spec.holder_identity = None
                self._api.replace_namespaced_lease(
                    self._name, self._namespace, lease, _request_timeout=TIMEOUT_S
                )
        except ApiException as error:
            if not has_status(error, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                raise

    def _is_free(self, lease: Any) -> bool:
        version = lease.metadata.resource_version
        if version != self._seen[0]:
            self._seen = (version, self._clock())
        holder = lease.spec.holder_identity
        if not holder or holder == self._identity:
            return True
        lasts_s = float(lease.spec.lease_duration_seconds or self._duration_s)
        return self._clock() - self._seen[1] > lasts_s

    def _write(self, lease: Any) -> None:
        now = datetime.now(UTC)
        if lease.spec.holder_identity != self._identity:
            lease.spec.lease_transitions = (lease.spec.lease_transitions or 0) + 1
            lease.spec.acquire_time = now
        lease.spec.holder_identity = self._identity
        lease.spec.lease_duration_seconds = max(1, round(self._duration_s))
        lease.spec.renew_time = now
        self._api.replace_namespaced_lease(
            self._name, self._namespace, lease, _request_timeout=TIMEOUT_S
        )

    def _create(self, began_at: float) -> bool:
        from kubernetes.client import ApiException, V1Lease, V1LeaseSpec, V1ObjectMeta

        now = datetime.now(UTC)
        spec = V1LeaseSpec(
            holder_identity=self._identity,
            lease_duration_seconds=max(1, round(self._duration_s)),
            acquire_time=now,
            renew_time=now,
            lease_transitions=0,
        )
        body = V1Lease(metadata=V1ObjectMeta(name=self._name), spec=spec)
        try:
            self._api.create_namespaced_lease(self._namespace, body, _request_timeout=TIMEOUT_S)
        except ApiException as error:
            if has_status(error, HTTPStatus.CONFLICT):
                return False
            raise
        self._held_until = began_at + self._duration_s * 2 / 3
        return True
