"""The worker process: one rank's operations, one after the other, in the order they were admitted.

The main thread runs operations; threads read the sockets. While a rollout engine has work, the main
thread alternates between taking requests and drawing tokens.
"""

import logging
import queue
import time
from collections import deque
from typing import Any

import msgspec

from plexrl.errors import (
    ConflictError,
    ExecutionError,
    InvalidRequestError,
    NonFiniteWeightsError,
    PlexRLError,
    StorageFullError,
)
from plexrl.statemanager.store.disk_space import is_full
from plexrl.wire.operations import MUTATING, PARAMS_BY_KIND, OperationKind, SyncWeightsParams
from plexrl.wire.tensors import decode_body, encode_body
from plexrl.worker.process.backend import Backend, BackendCall, BackendResult, RolloutBackend
from plexrl.worker.process.replies import Replies, Reply, RunName
from plexrl.worker.process.server import Connection, Request
from plexrl.worker.rollout.controls import Controls
from plexrl.worker.rollout.token_streams import TokenLog, TokenStreams
from plexrl.worker.state.residency import MOVES, StateMover

LOG = logging.getLogger(__name__)


class Worker:
    """Serves requests with one backend."""

    def __init__(
        self, backend: Backend, mover: StateMover, requests: "queue.Queue[Request]"
    ) -> None:
        self._backend = backend
        self._mover = mover
        self._requests = requests
        self._replies = Replies()
        self._listeners: dict[RunName, list[Connection]] = {}
        self._started: dict[str, tuple[RunName, float]] = {}
        self._deferred: deque[Request] = deque()
        self._streams = TokenStreams()
        self._controls = Controls(backend, mover, self._streams)

    def run(self) -> None:
        """Serve for ever."""
        while True:
            self.turn(block=True)

    def turn(self, *, block: bool) -> None:
        """Take the requests that are there, then draw one token for all that generate."""
        generating = self._generator is not None and self._generator.has_work
        if not generating and self._deferred:
            waiting, self._deferred = self._deferred, deque()
            for request in waiting:
                self._take(request)
            return
        try:
            waits = block and not generating
            self._take(self._requests.get(block=waits, timeout=self._controls.paused_for_s()))
            while True:
                self._take(self._requests.get_nowait())
        except queue.Empty:
            pass
        self._controls.resume_if_due()
        if self._generator is not None and self._generator.has_work:
            self._step(self._generator)

    @property
    def _generator(self) -> RolloutBackend | None:
        return self._backend if hasattr(self._backend, "step") else None  # type: ignore[return-value]

    def _take(self, request: Request) -> None:
        header = request.header
        if self._controls.take(request):
            return
        if header.get("request") != "run":
            error = InvalidRequestError(f"unknown request {header.get('request')!r}")
            request.connection.send({"reply": "failed", "error": error.to_wire()})
            return
        command = header["command"]
        name: RunName = (command["operation"], int(command["token"]))
        if self._replies.known(name):
            self._attach(name, request.connection)
            return
        kind = OperationKind(command["kind"])
        busy = self._generator is not None and self._generator.has_work
        if (busy and not _runs_beside(kind, command)) or self._deferred:
            # Nothing overtakes what waits for the running generations.
            self._deferred.append(request)
            return
        self._listeners[name] = [request.connection]
        self._admitted(name, kind)
        self._begin(name, kind, header, request.payload)

    def _admitted(self, name: RunName, kind: OperationKind) -> None:
        """A run is begun with the next call; for workers that have others do the same."""

    def _attach(self, name: RunName, connection: Connection) -> None:
        reply = self._replies.answer(name)
        if reply is None:
            self._listeners[name].append(connection)
        else:
            connection.send(reply.header, reply.payload)

    def _begin(
        self, name: RunName, kind: OperationKind, header: dict[str, Any], payload: bytearray
    ) -> None:
        command = header["command"]
        started = time.perf_counter()
        try:
            if not self._replies.begin(name, command):
                self._finish(name, BackendResult(), started)
                return
            if not self._mover.is_resident and kind != OperationKind.LOAD:
                raise ConflictError(f"{kind.value} needs the state on the device")
            if kind in MOVES:
                result = BackendResult(result=self._mover.move(kind, command))
            elif kind == OperationKind.BARRIER:
                result = BackendResult()
            else:
                call = _call(command, kind, header.get("rank_params", {}), payload)
                if kind == OperationKind.GENERATE:
                    self._generate(name, call, started)
                    return
                if kind == OperationKind.SAVE_CHECKPOINT:
                    result = BackendResult(result=self._mover.save_checkpoint(command, call.params))
                else:
                    if kind in MUTATING:
                        self._mover.written()
                    result = self._backend.run(call)
            if kind == OperationKind.LOAD or kind in MUTATING:
                self._replies.applied_seq = int(command["seq"])
            self._finish(name, result, started, replay=bool(command["replay"]))
        except PlexRLError as error:
            # A mutation that made such weights has made them: what was there before is loaded.
            is_spoilt = kind in MUTATING and isinstance(error, NonFiniteWeightsError)
            self._fail(name, error, state_intact=not (is_spoilt or self._mover.is_torn))
        except Exception as error:
            if isinstance(error, OSError) and is_full(error):
                # What was written by then is not known, so the state counts as lost.
                LOG.warning("%s: %s", name[0], error)
                full = StorageFullError(f"{kind.value} found no room on {error.filename}: {error}")
                self._fail(name, full, state_intact=False)
                return
            LOG.exception("%s failed", name[0])
            failure = ExecutionError(
                f"{kind.value} failed on the worker: see `plexrl logs`; the workers are restarted "
                "from their last complete state"
            )
            self._fail(name, failure, state_intact=False)

    def _generate(self, name: RunName, call: BackendCall, started: float) -> None:
        assert self._generator is not None, "only rollout deployments are sent generates"
        log = self._streams.begin(call.operation, streamed=call.params.stream)
        self._started[call.operation] = (name, started)
        try:
            self._generator.submit(call, None if log is None else log.append)
        except PlexRLError:
            del self._started[call.operation]
            self._streams.end(call.operation)
            raise
        self._controls.begun(call.operation)

    def _tells_of_lost_ranks(self, error: Exception) -> bool:
        """Generations ended because another rank did, and through no fault of theirs."""
        del error
        return False

    def _step(self, generator: RolloutBackend) -> None:
        try:
            finished = generator.step()
        except Exception as cause:
            LOG.exception("generation failed")
            error = ExecutionError("generation failed on the worker: see `plexrl logs`")
            # Unanswered, a generation is begun anew by the workers that come next.
            unanswered = self._tells_of_lost_ranks(cause)
            for name, _ in [] if unanswered else list(self._started.values()):
                self._fail(name, error, state_intact=False)
            # What the engine holds is beyond repair; the agent reports the exit.
            raise SystemExit(1) from None
        for operation, result in finished:
            name, started = self._started.pop(operation)
            self._finish(name, _with_order(result, self._streams.end(operation)), started)
        self._streams.serve()

    def _finish(
        self, name: RunName, result: BackendResult, started: float, *, replay: bool = False
    ) -> None:
        payload = encode_body({}, result.arrays) if result.arrays and not replay else b""
        header = {
            "reply": "finished",
            "operation": name[0],
            "token": name[1],
            "result": result.result,
            "compute_s": time.perf_counter() - started,
        }
        self._answer(name, Reply(header, payload))

    def _fail(self, name: RunName, error: PlexRLError, *, state_intact: bool) -> None:
        header = {
            "reply": "failed",
            "operation": name[0],
            "token": name[1],
            "error": error.to_wire(),
            "state_intact": state_intact,
        }
        self._answer(name, Reply(header, b""))

    def _answer(self, name: RunName, reply: Reply) -> None:
        self._replies.end(name, reply)
        for connection in self._listeners.pop(name, []):
            connection.send(reply.header, reply.payload)


def _runs_beside(kind: OperationKind, command: dict[str, Any]) -> bool:
    """Whether it is done between two tokens of the generations under way, not after them."""
    if kind == OperationKind.SYNC_WEIGHTS:
        return msgspec.json.decode(command["params_json"], type=SyncWeightsParams).in_flight
    return kind == OperationKind.GENERATE


def _with_order(result: BackendResult, log: TokenLog | None) -> BackendResult:
    """The result of a generation, and in which order it was streamed."""
    if log is None:
        return result
    return BackendResult(
        result={**result.result, "stream": log.name},
        arrays={**result.arrays, "stream_order": log.order()},
    )


def _call(
    command: dict[str, Any], kind: OperationKind, rank_params: dict[str, Any], payload: bytearray
) -> BackendCall:
    arrays = decode_body(payload)[1] if payload else {}
    return BackendCall(
        operation=command["operation"],
        kind=kind,
        params=msgspec.json.decode(command["params_json"], type=PARAMS_BY_KIND[kind]),
        rank_params=rank_params,
        arrays=arrays,
        seq=int(command["seq"]),
        trainer_step=int(command.get("trainer_step", 0)),
    )
