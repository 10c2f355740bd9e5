"""Computes the changes of the locations of state on a node, for reports to the scheduler."""

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.protocol.messages import Where

Plain = dict[str, Any]


class StateWatch:
    """Queries a node's StateManager. Thread-safe."""

    def __init__(self, connect: Callable[[], StateManagerClient]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._life, self._serial = "", 0
        self._on_nvme: set[str] = set()
        """Deployments that were reported to have state on NVMe."""

    def changes(self) -> list[Plain]:
        """The deployments whose state has moved since the last call.

        Raises:
            UnavailableError: the StateManager cannot be reached.
        """
        with self._lock, closing(self._connect()) as client:
            answer = client.request(Where(life=self._life, since=self._serial))
            states: list[Plain] = answer["states"]
            is_all = answer["life"] != self._life
            self._life, self._serial = answer["life"], answer["serial"]
            if is_all:
                # A deployment that was reported before and is missing now has no state here.
                gone = self._on_nvme - {state["deployment"] for state in states}
                states += [
                    {"deployment": name, "host_bytes": 0, "nvme_bytes": 0} for name in sorted(gone)
                ]
            # The scheduler assumes that a new version is in one tier. So deployments on NVMe are
            # reported at every change, and once more when they have left NVMe.
            reported = [
                {name: state[name] for name in ("deployment", "host_bytes", "nvme_bytes")}
                for state in states
                if is_all or state["nvme_bytes"] or state["deployment"] in self._on_nvme
            ]
            for state in states:
                if state["nvme_bytes"]:
                    self._on_nvme.add(state["deployment"])
                else:
                    self._on_nvme.discard(state["deployment"])
            return reported

    def reset(self) -> None:
        """Make the next call of `changes` return everything, for a new scheduler connection."""
        with self._lock:
            self._life, self._serial = "", 0
