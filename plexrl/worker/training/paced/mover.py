"""Moves of a paced worker's state: the tiny state is moved, in the time of the modelled one.

Reports name the bytes that were really moved and the time that was really taken.
"""

from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.latency.pace import Pace
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.wire.messages import Load, Offload, Publish, SaveCheckpoint, Snapshot, Sync
from plexrl.worker.interface.backend import Backend
from plexrl.worker.state.state_mover import StateMover
from plexrl.worker.training.paced.pacer import Pacer

HOST = "host"


class PacedMover(StateMover):
    """A `StateMover` whose moves take their modelled time."""

    def __init__(
        self,
        backend: Backend,
        client: StateManagerClient,
        group: str,
        *,
        spec: DeploymentSpec,
        pace: Pace,
        pacer: Pacer,
    ) -> None:
        super().__init__(backend, client, group)
        self._pace, self._pacer = pace, pacer
        self._spec = spec
        gpus = spec.workers if spec.kind == "train" else spec.layout.tp
        self._state_bytes = pace.state_bytes(spec.kind, gpus)

    def move(self, command: Load | Offload | Snapshot | Publish | Sync) -> dict[str, Any]:
        """As `StateMover.move`."""
        was_resident = self.is_resident
        since = self._pacer.now()
        measured = super().move(command)
        if isinstance(command, Load) and was_resident:
            return measured
        tier = str(measured.get("tier", HOST))
        part = self._moved_part(measured)
        seconds = self._pacer.rest(since, self._modelled_s(command, tier, part))
        for name in ("seconds", "pause_s"):
            if name in measured:
                measured[name] = seconds
        if "prefetched_bytes" in measured:
            # The tiny state may have been there already; of the modelled one nothing was.
            measured["prefetched_bytes"], measured["prefetch_s"] = 0, 0.0
        return measured

    def save_checkpoint(self, command: SaveCheckpoint) -> dict[str, Any]:
        """Refused.

        Raises:
            InvalidRequestError: always.
        """
        del command
        raise InvalidRequestError(
            "a paced deployment has no model to save: leave pace out, or leave the checkpoint out"
        )

    def _moved_part(self, measured: dict[str, Any]) -> float:
        """The part of the state that a move moved: 0 for one that is stored already."""
        parts = self._backend.live_parts()
        whole = sum(piece.nbytes for piece in self._backend.slices() if piece.key.part in parts)
        return min(1.0, float(measured.get("bytes_moved", 0)) / whole)

    def _modelled_s(
        self, command: Load | Offload | Snapshot | Publish | Sync, tier: str, part: float
    ) -> float:
        match command:
            case Publish():
                return self._pace.training(self._spec.workers).publish_s()
            case Sync():
                return self._pace.decoding(self._spec.layout.tp).pull_s()
            case _:
                return self._pace.move_s(part * self._state_bytes, tier, self._spec.workers)
