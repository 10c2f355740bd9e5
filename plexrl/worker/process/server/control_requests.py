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
from plexrl.worker.interface.backend import Backend, RolloutBackend
from plexrl.worker.interface.command import RunName
from plexrl.worker.process.server.server import Request
from plexrl.worker.process.server.token_streams import TokenStreams
from plexrl.worker.state.state_mover import StateMover

LOG = logging.getLogger(__name__)

ABORTED_MAX = 1024
"""Aborts that are remembered, because an abort may arrive before its generation."""

ANSWERED = ("engine_stats", "engine_load", "read_stream", "pause", "resume", "set_tp")

Plain = dict[str, Any]


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

    def handle(self, request: Request) -> bool:
        """Handle `request` if it is a control request. False: it is not."""
        header = request.header
        kind = header.get("request")
        if kind == "abort":
            if header.get("token"):
                self._interrupt(header["operation"], header["token"])
            else:
                self._abort(header["operation"], header.get("rows"))
            return True
        if kind not in ANSWERED:
            return False
        try:
            if kind == "read_stream":
                self._streams.read(request.connection, header)
            else:
                request.connection.answer(header["ask"], self._answer(kind, header))
        except PlexRLError as error:
            request.connection.refuse(header["ask"], error)
        return True

    def _abort(self, operation: str, rows: list[int] | None) -> None:
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

    def _answer(self, kind: str, header: Plain) -> Plain:
        engine = self._engine()
        if kind == "pause":
            engine.pause()
            self._resume_at = time.monotonic() + header["for_s"]
        elif kind == "resume":
            engine.resume()
            self._resume_at = None
        elif kind == "set_tp":
            engine.set_tp(header["tp"], header["kv"])
        answer = asdict(engine.stats())
        if kind != "engine_load":
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
