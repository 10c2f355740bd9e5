"""Questions and orders to a rollout's engine that are no operations: they are answered between two
tokens, whatever runs, and no scheduler has to admit them.
"""

import logging
import time
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from plexrl.errors import ConflictError, InvalidRequestError, PlexRLError
from plexrl.worker.process.backend import Backend, RolloutBackend
from plexrl.worker.process.server import Request
from plexrl.worker.rollout.token_streams import TokenStreams
from plexrl.worker.state.residency import StateMover

LOG = logging.getLogger(__name__)

ABORTED_MAX = 1024
"""Orders to end a generation that are remembered, in case they come before it."""

Plain = dict[str, Any]


class Controls:
    """Of one worker."""

    def __init__(self, backend: Backend, mover: StateMover, streams: TokenStreams) -> None:
        self._generator: RolloutBackend | None = None
        if hasattr(backend, "step"):
            self._generator = backend  # type: ignore[assignment]
        self._mover = mover
        self._streams = streams
        self._aborted: OrderedDict[str, None] = OrderedDict()
        self._resume_at: float | None = None
        """On the process's clock; absent: not paused."""

    def take(self, request: Request) -> bool:
        """Answer `request`, if it is one of these."""
        header = request.header
        kind = header.get("request")
        if kind == "abort":
            if self._generator is not None:
                self._aborted[header["operation"]] = None
                while len(self._aborted) > ABORTED_MAX:
                    self._aborted.popitem(last=False)
                if self._mover.is_resident:
                    self._generator.abort(header["operation"])
            return True
        if kind not in ("engine_stats", "read_stream", "pause", "resume"):
            return False
        reply: Plain = {"operation": header["ask"], "token": 0}
        try:
            if kind == "read_stream":
                self._streams.read(request.connection, header)
            else:
                answer = self._answer(kind, header)
                request.connection.send({**reply, "reply": "answer", "answer": answer})
        except PlexRLError as error:
            request.connection.send({**reply, "reply": "failed", "error": error.to_wire()})
        return True

    def begun(self, operation: str) -> None:
        """A generation has begun; the order to end it may have overtaken its payload."""
        if self._generator is not None and operation in self._aborted:
            self._generator.abort(operation)

    def paused_for_s(self) -> float | None:
        """Until generations go on by themselves; None: nobody has paused them."""
        return None if self._resume_at is None else max(0.0, self._resume_at - time.monotonic())

    def resume_if_due(self) -> None:
        """Let paused generations go on once their time is over."""
        if self._generator is not None and self.paused_for_s() == 0.0:
            self._resume_at = None
            if self._mover.is_torn:
                # Nothing may be drawn with what is there; the process is about to be ended.
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
        return asdict(engine.stats())

    def _engine(self) -> RolloutBackend:
        if self._generator is None:
            raise InvalidRequestError("this is no rollout deployment: it has no engine")
        if not self._mover.is_resident:
            raise ConflictError("the engine's weights are not on the device: it runs nothing")
        if self._mover.is_torn:
            raise ConflictError(
                "a weight sync was cut, so the engine's weights are of no version: it is being "
                "restarted, and begins anew what was under way"
            )
        return self._generator
