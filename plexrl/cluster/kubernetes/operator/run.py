"""The operator's process: the replica that holds a Lease runs controller and follower."""

import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from plexrl.cluster.kubernetes.lease import KubernetesLease

LOG = logging.getLogger(__name__)

EXIT_LEASE_LOST = 75


class OperatorHealth:
    """Serves `/healthz`."""

    def __init__(self, port: int, is_healthy: Callable[[], bool]) -> None:
        handler = type("Handler", (_HealthHandler,), {"is_healthy": staticmethod(is_healthy)})
        self._server = ThreadingHTTPServer(("", port), handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()


class _HealthHandler(BaseHTTPRequestHandler):
    is_healthy: Callable[[], bool]
    timeout = 10.0

    def do_GET(self) -> None:
        """Whether the operator works, or stands by."""
        is_well = self.path == "/healthz" and self.is_healthy()
        self.send_response(HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Probes are not logged."""


def lead(
    lease: KubernetesLease, works: list[Callable[[threading.Event], None]], stop: threading.Event
) -> bool:
    """Run `works` in threads while the lease is held, until `stop`. Returns whether the lease was
    lost; the caller must then end the process at once, since a work may be in a call still."""
    ended = threading.Event()
    threads: list[threading.Thread] = []
    try:
        while not stop.is_set():
            _try_hold(lease)
            if lease.is_held and not threads:
                LOG.info("leads")
                threads = [threading.Thread(target=work, args=(ended,)) for work in works]
                for thread in threads:
                    thread.start()
            elif threads and not lease.is_held:
                LOG.error("lost the lease")
                return True
            if any(not thread.is_alive() for thread in threads):
                LOG.error("a thread ended")
                return True
            stop.wait(lease.renew_s)
    finally:
        ended.set()
    for thread in threads:
        thread.join(timeout=30.0)
    _try(lease.release)
    return False


def _try_hold(lease: KubernetesLease) -> None:
    _try(lease.try_hold)


def _try(work: Callable[[], object]) -> None:
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        work()
    except (ApiException, HTTPError) as error:
        LOG.warning("the lease could not be changed, trying again: %s", error)
