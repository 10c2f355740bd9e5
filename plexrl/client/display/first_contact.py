"""Messages of a script while no router of its cluster has replied yet."""

import sys
import threading
from types import TracebackType
from typing import Final

from plexrl.client.display.handle_repr import without_credentials

FIRST_S: Final = 1.0
"""A router that replies sooner is not waited for in words."""
PERIOD_S: Final = 15.0
"""Time between two lines after the first."""


class FirstContact:
    """Prints lines on standard error while its block waits for the routers at `urls`."""

    def __init__(self, urls: str, timeout_s: float) -> None:
        where = without_credentials(urls)
        self._line = (
            f"plexrl: no PlexRL router replies at {where} yet; trying for {timeout_s:g} s: check "
            "that the cluster is up and that the URL (PLEXRL_URL) is right"
        )
        self._is_over = threading.Event()
        # A thread, because a name server or a silent host may block the request itself.
        self._thread = threading.Thread(target=self._print, name="first-contact", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()

    def _print(self) -> None:
        pause_s = FIRST_S
        while not self._is_over.wait(pause_s):
            if sys.stderr is not None:
                sys.stderr.write(self._line + "\n")
                sys.stderr.flush()
            pause_s = PERIOD_S
