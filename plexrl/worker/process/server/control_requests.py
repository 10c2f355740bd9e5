"""Requests to a rollout's engine that are not operations.

They are abort, pause, resume, stats, streams, and `set_tp`: another size of the tensor-parallel
groups.

The scheduler does not admit them. The worker handles them between two tokens, whatever runs.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from plexrl.errors import ConflictError, InvalidRequestError, PlexRLError
from plexrl.wire.messages import (
    AbortRun,
    AnyEngineRequest,
    EngineLoad,
    Pause,
    ReadStream,
    Resume,
    RunName,
    SetTp,
)
from plexrl.worker.interface.backend import Backend, RolloutBackend
from plexrl.worker.process.server.server import WorkerConnection
from plexrl.worker.process.server.token_streams import TokenStreams
from plexrl.worker.state.state_mover import StateMover

LOG = logging.getLogger(__name__)

ABORTED_MAX = 1024
"""Aborts that are remembered, because an abort may arrive before its generation."""


class ControlRequests:
    """Handles the control requests of one worker."""

    def __init__(
        self,
        backend: Backend,
        mover: StateMover,
        streams: TokenStreams,
        generations: Mapping[str, tuple[RunName, float]],
    ) -> None:
        """`generations`: the worker's running generations by operation, with their runs."""
        self._generations = generations
        self._generator = backend if isinstance(backend, RolloutBackend) else None
        self._mover = mover
        self._streams = streams
        self._aborted: OrderedDict[str, frozenset[int] | None] = OrderedDict()
        """The rows to end by operation; None: all."""
        self._interrupted: OrderedDict[str, int] = OrderedDict()
        """Token of the latest run to interrupt, by operation."""
        self._resume_at: float | None = None
        """Time at which a pause ends, on the monotonic clock; absent: not paused."""

    def handle(self, message: AbortRun | AnyEngineRequest, connection: WorkerConnection) -> None:
        """Carry out a control request, and answer what is answered."""
        if isinstance(message, AbortRun):
            abort = message.abort
            if abort.token:
                self._interrupt(abort.operation, abort.token)
            else:
                self._abort(abort.operation, abort.rows)
            return
        try:
            if isinstance(message, ReadStream):
                self._streams.read(connection, message)
            else:
                connection.answer(message.ask, self._answer(message))
        except PlexRLError as error:
            connection.refuse(message.ask, error)

    def _abort(self, operation: str, rows: tuple[int, ...] | None) -> None:
        if self._generator is None:
            return
        known = self._aborted.pop(operation, frozenset())
        ended = None if rows is None or known is None else known | frozenset(rows)
        self._aborted[operation] = ended
        while len(self._aborted) > ABORTED_MAX:
            self._aborted.popitem(last=False)
        if self._mover.is_resident:
            self._generator.abort(operation, ended)

    def _interrupt(self, operation: str, token: int) -> None:
        """End one run of a generation; later ones continue it."""
        if self._generator is None:
            return
        self._interrupted.pop(operation, None)
        self._interrupted[operation] = token
        while len(self._interrupted) > ABORTED_MAX:
            self._interrupted.popitem(last=False)
        run = self._generations.get(operation)
        if run is not None and run[0][1] == token and self._mover.is_resident:
            self._generator.abort(operation)

    def generation_began(self, operation: str, token: int) -> None:
        """Abort a generation that has just begun, or rows of it, if that was requested before."""
        if self._generator is None:
            return
        if self._interrupted.get(operation) == token:
            self._generator.abort(operation)
        elif operation in self._aborted:
            self._generator.abort(operation, self._aborted[operation])

    def paused_for_s(self) -> float | None:
        """Seconds until the pause ends by itself; None: not paused."""
        return None if self._resume_at is None else max(0.0, self._resume_at - time.monotonic())

    def resume_if_due(self) -> None:
        """Resume paused generations when the pause is over."""
        if self._generator is not None and self.paused_for_s() == 0.0:
            self._resume_at = None
            if self._mover.is_torn:
                # The weights belong to no version, so no token may be drawn; the process will end.
                return
            LOG.info("the pause is over")
            self._generator.resume()

    def _answer(self, message: AnyEngineRequest) -> dict[str, Any]:
        engine = self._engine()
        match message:
            case Pause():
                engine.pause()
                self._resume_at = time.monotonic() + message.for_s
            case Resume():
                engine.resume()
                self._resume_at = None
            case SetTp():
                engine.set_tp(message.tp, message.kv)
        answer = asdict(engine.stats())
        if not isinstance(message, EngineLoad):
            return answer
        arrived = self._mover.arrival.arrived
        return {**answer, **engine.load(), "arrived": None if arrived is None else arrived[0]}

    def _engine(self) -> RolloutBackend:
        if self._generator is None:
            raise InvalidRequestError(
                "this deployment has no engine: send the request to a rollout deployment"
            )
        if not self._mover.is_resident:
            raise ConflictError("the engine's weights are not on the device: no generation runs")
        if self._mover.is_torn:
            raise ConflictError(
                "a weight sync was interrupted, so the engine's weights belong to no version: the "
                "engine is restarted and repeats its unfinished generations"
            )
        return self._generator
