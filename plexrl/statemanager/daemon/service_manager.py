"""Word to systemd, where it started this process (sd_notify(3)); elsewhere nothing happens."""

import logging
import socket
import threading
from collections.abc import Callable, Mapping

LOG = logging.getLogger(__name__)


class ServiceManager:
    """Tells how the service is, and, where it asks for that, that it still lives."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` is the process's: systemd says there where it listens."""
        self._path = environment.get("NOTIFY_SOCKET", "")
        watchdog_us = environment.get("WATCHDOG_USEC", "")
        self._watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdigit() else 0.0
        self._stopping = threading.Event()

    def ready(self, lives: Callable[[], bool]) -> None:
        """The service serves. From now on it says so twice in the watchdog's time, as long as
        `lives` holds."""
        self._notify("READY=1")
        if self._path and self._watchdog_s:
            threading.Thread(target=self._keep_alive, args=(lives,), daemon=True).start()

    def stopping(self) -> None:
        """The service ends."""
        self._stopping.set()
        self._notify("STOPPING=1")

    def _keep_alive(self, lives: Callable[[], bool]) -> None:
        while not self._stopping.wait(self._watchdog_s / 2):
            if lives():
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
                LOG.warning("systemd was not told %s: %s", state, error)
