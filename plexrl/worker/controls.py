"""Questions and orders to a rollout's engine that are no operations: they are answered between two
tokens, whatever runs, and no scheduler has to admit them.
"""

from dataclasses import asdict
from typing import Any

from plexrl.errors import ConflictError, InvalidRequestError, PlexRLError
from plexrl.worker.backend import Backend, RolloutBackend
from plexrl.worker.residency import StateMover
from plexrl.worker.server import Request
from plexrl.worker.token_streams import TokenStreams

Plain = dict[str, Any]


class Controls:
    """Of one worker."""

    def __init__(self, backend: Backend, mover: StateMover, streams: TokenStreams) -> None:
        self._generator: RolloutBackend | None = None
        if hasattr(backend, "step"):
            self._generator = backend  # type: ignore[assignment]
        self._mover = mover
        self._streams = streams

    def take(self, request: Request) -> bool:
        """Answer `request`, if it is one of these."""
        header = request.header
        kind = header.get("request")
        if kind == "abort":
            if self._generator is not None:
                self._generator.abort(header["operation"])
            return True
        if kind not in ("engine_stats", "read_stream"):
            return False
        reply: Plain = {"operation": header["ask"], "token": 0}
        try:
            if kind == "read_stream":
                self._streams.read(request.connection, header)
            else:
                answer = asdict(self._engine().stats())
                request.connection.send({**reply, "reply": "answer", "answer": answer})
        except PlexRLError as error:
            request.connection.send({**reply, "reply": "failed", "error": error.to_wire()})
        return True

    def _engine(self) -> RolloutBackend:
        if self._generator is None:
            raise InvalidRequestError("this is no rollout deployment: it has no engine")
        if not self._mover.is_resident:
            raise ConflictError("the engine's weights are not on the device: it runs nothing")
        return self._generator
