"""What the scheduler is told of where state lies on a node: what has changed, and no more."""

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.protocol.messages import Where

Plain = dict[str, Any]


class StateWatch:
    """Asks a node's StateManager. Thread-safe."""

    def __init__(self, connect: Callable[[], StateManagerClient]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._life, self._serial = "", 0
        self._on_nvme: set[str] = set()
        """What was said to lie there."""

    def changes(self) -> list[Plain]:
        """What lies elsewhere than when this was last asked.

        Raises:
            UnavailableError: the StateManager cannot be reached.
        """
        with self._lock, closing(self._connect()) as client:
            answer = client.request(Where(life=self._life, since=self._serial))
            states: list[Plain] = answer["states"]
            is_all = answer["life"] != self._life
            self._life, self._serial = answer["life"], answer["serial"]
            if is_all:
                # One that was told of before and is not named any more has nothing here.
                gone = self._on_nvme - {state["deployment"] for state in states}
                states += [
                    {"deployment": name, "host_bytes": 0, "nvme_bytes": 0} for name in sorted(gone)
                ]
            # The scheduler takes all of a new version to lie in one tier: it is told of what is on
            # NVMe whenever something moved, and once that nothing is there any more.
            told = [
                {name: state[name] for name in ("deployment", "host_bytes", "nvme_bytes")}
                for state in states
                if is_all or state["nvme_bytes"] or state["deployment"] in self._on_nvme
            ]
            for state in states:
                if state["nvme_bytes"]:
                    self._on_nvme.add(state["deployment"])
                else:
                    self._on_nvme.discard(state["deployment"])
            return told

    def tell_all(self) -> None:
        """Have the next answer be of everything: whoever was told may be gone."""
        with self._lock:
            self._life, self._serial = "", 0
