"""Notifications to systemd (sd_notify(3)); no effect if systemd did not start this process."""

import logging
import socket
import threading
from collections.abc import Callable, Mapping

LOG = logging.getLogger(__name__)


class ServiceManager:
    """Reports the service's state to systemd, and answers its watchdog."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` is the process's environment, which names systemd's socket."""
        self._path = environment.get("NOTIFY_SOCKET", "")
        watchdog_us = environment.get("WATCHDOG_USEC", "")
        self._watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdigit() else 0.0
        self._stopping = threading.Event()

    def ready(self, is_alive: Callable[[], bool]) -> None:
        """Report that the service is ready; then answer the watchdog twice per interval while
        `is_alive()` is true."""
        self._notify("READY=1")
        if self._path and self._watchdog_s:
            threading.Thread(target=self._keep_alive, args=(is_alive,), daemon=True).start()

    def stopping(self) -> None:
        """Report that the service stops."""
        self._stopping.set()
        self._notify("STOPPING=1")

    def _keep_alive(self, is_alive: Callable[[], bool]) -> None:
        while not self._stopping.wait(self._watchdog_s / 2):
            if is_alive():
                self._notify("WATCHDOG=1")

    def _notify(self, state: str) -> None:
        if not self._path:
            return
        # A leading @ stands for the NUL byte of an abstract socket.
        path = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            try:
                out.connect(path)
                out.sendall(state.encode())
            except OSError as error:
                LOG.warning("systemd could not be notified of %s: %s", state, error)
