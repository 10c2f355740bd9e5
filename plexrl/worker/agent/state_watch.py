"""Computes the changes of the locations of state on a node, and how far its host tier is ready, for
reports to the scheduler."""

import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec

from plexrl.ids import DeploymentId
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.protocol.messages import Where
from plexrl.wire.messages.reports import StateResidency

READY_STEPS = 100
"""Most reports while the host tier is made ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """How much of a host tier has been allocated in advance."""

    ready_bytes: int
    wanted_bytes: int

    @property
    def steps(self) -> int:
        """Its progress in steps of `READY_STEPS`; all of them if nothing is wanted."""
        if self.ready_bytes >= self.wanted_bytes:
            return READY_STEPS
        return self.ready_bytes * READY_STEPS // self.wanted_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What has changed since the last look."""

    states: tuple[StateResidency, ...]
    """The deployments whose state has moved."""
    host_memory: HostMemory | None
    """Absent: it is as far as before."""
    reasons: tuple[str, ...]
    """Why the StateManager is not healthy now; empty: it is."""


class StateWatch:
    """Queries a node's StateManager. Thread-safe."""

    def __init__(self, connect: Callable[[], StateManagerClient]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._life, self._serial = "", 0
        self._on_nvme: dict[str, StateResidency] = {}
        """The deployments with state on NVMe, as it was at the last look."""
        self._steps = READY_STEPS
        """How far the host tier was reported to be."""

    def changes(self) -> Changes:
        """What has changed since the last call.

        Raises:
            UnavailableError: the StateManager cannot be reached.
        """
        with self._lock, closing(self._connect()) as client:
            answer = client.request(Where(life=self._life, since=self._serial))
            states = msgspec.convert(answer["states"], list[StateResidency])
            is_all = answer["life"] != self._life
            self._life, self._serial = answer["life"], answer["serial"]
            if is_all:
                # A deployment that was reported before and is missing now has no state here.
                gone = set(self._on_nvme) - {state.deployment for state in states}
                states += [
                    StateResidency(deployment=DeploymentId(name), host_bytes=0, nvme_bytes=0)
                    for name in sorted(gone)
                ]
            reported = tuple(state for state in states if is_all or self._is_news(state))
            for state in states:
                self._on_nvme.pop(state.deployment, None)
                if state.nvme_bytes or state.on_nvme:
                    self._on_nvme[state.deployment] = state
            return Changes(
                states=reported,
                host_memory=self._readiness(answer),
                reasons=tuple(answer["reasons"]),
            )

    def reset(self) -> None:
        """Make the next call of `changes` return everything, for a new scheduler connection."""
        with self._lock:
            self._life, self._serial = "", 0
            self._steps = READY_STEPS

    def _is_news(self, state: StateResidency) -> bool:
        """The scheduler assumes that a new version is in one tier. So deployments on NVMe are
        reported at every change, and once more when they have left NVMe."""
        before = self._on_nvme.get(state.deployment)
        if before is None:
            return bool(state.nvme_bytes or state.on_nvme)
        return bool(state.nvme_bytes or before.nvme_bytes) or state.on_nvme != before.on_nvme

    def _readiness(self, answer: Mapping[str, Any]) -> HostMemory | None:
        found = HostMemory(
            ready_bytes=answer["host_ready_bytes"], wanted_bytes=answer["host_prefault_bytes"]
        )
        before, self._steps = self._steps, found.steps
        return None if found.steps == before else found
