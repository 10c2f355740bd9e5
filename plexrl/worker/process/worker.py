"""The worker process: runs one rank's operations one after the other, in the order of admission.

The main thread runs operations; other threads read the sockets. While a rollout engine has work,
the main thread alternates between handling requests and drawing tokens.
"""

import logging
import queue
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from plexrl.errors import (
    ConflictError,
    ExecutionError,
    InvalidRequestError,
    NonFiniteWeightsError,
    PayloadTooLargeError,
    PlexRLError,
)
from plexrl.statemanager.store.disk_space import held_error
from plexrl.wire.framing import encode_head
from plexrl.wire.messages import (
    AnyCompute,
    AnyRequest,
    AnyRun,
    Barrier,
    Failed,
    Finished,
    Generate,
    Load,
    Offload,
    OptimStep,
    Publish,
    RankShare,
    RunName,
    SaveCheckpoint,
    Snapshot,
    StartRun,
    Sync,
    frame_header,
    read_request,
)
from plexrl.wire.operations import MUTATING, OperationKind
from plexrl.wire.tensors import decode_body, encode_body
from plexrl.worker.interface.backend import Backend, BackendCall, BackendResult, RolloutBackend
from plexrl.worker.process.server.control_requests import ControlRequests
from plexrl.worker.process.server.reply_cache import KeptReply, ReplyCache
from plexrl.worker.process.server.server import Payload, ReceivedRequest, WorkerConnection
from plexrl.worker.process.server.token_streams import Log, RowLog, TokenLog, TokenStreams
from plexrl.worker.state.state_mover import StateMover

LOG = logging.getLogger(__name__)

MOVES = (Load, Offload, Snapshot, Publish, Sync)
"""Runs that move the state, or a part of it."""


class Worker:
    """Serves requests with one backend."""

    def __init__(
        self, backend: Backend, mover: StateMover, requests: "queue.Queue[ReceivedRequest]"
    ) -> None:
        self._backend = backend
        self._generator = backend if isinstance(backend, RolloutBackend) else None
        self._mover = mover
        self._requests = requests
        self._replies = ReplyCache()
        self._listeners: dict[RunName, list[WorkerConnection]] = {}
        self._generations: dict[str, tuple[RunName, float]] = {}
        """Running generations, by operation: their run and start time."""
        self._deferred: deque[tuple[ReceivedRequest, AnyRun]] = deque()
        """Requests that wait, in the order of arrival, and their commands."""
        self._streams = TokenStreams()
        self._controls = ControlRequests(backend, mover, self._streams, self._generations)

    def run(self) -> None:
        """Serve forever."""
        while True:
            self.run_once(block=True)

    def run_once(self, *, block: bool) -> None:
        """Handle the queued requests, then draw one token for every running generation."""
        generating = self._generator is not None and self._generator.has_work
        if self._deferred and (not generating or self._runs_beside(self._deferred[0][1])):
            waiting, self._deferred = self._deferred, deque()
            for request, _ in waiting:
                self._handle(request)
            return
        try:
            waits = block and not generating
            self._handle(self._requests.get(block=waits, timeout=self._controls.paused_for_s()))
            while True:
                self._handle(self._requests.get_nowait())
        except queue.Empty:
            pass
        self._controls.resume_if_due()
        if self._generator is not None and self._generator.has_work:
            self._step(self._generator)

    def _handle(self, request: ReceivedRequest) -> None:
        message = self._read(request)
        if message is None:
            return
        if not isinstance(message, StartRun):
            self._controls.handle(message, request.connection)
            return
        command = message.run
        if self._replies.known(command.name):
            self._reply_or_listen(command.name, request.connection)
            return
        busy = self._generator is not None and self._generator.has_work
        if (busy and not self._runs_beside(command)) or self._deferred:
            # Deferred requests keep their order: no later request overtakes them.
            self._deferred.append((request, command))
            return
        self._listeners[command.name] = [request.connection]
        self._will_begin(command)
        self._begin(command, message.share, request.payload)

    def _read(self, request: ReceivedRequest) -> AnyRequest | None:
        """What a frame asks for. None: nothing that is known, and the router was told so."""
        try:
            return read_request(request.header)
        except msgspec.ValidationError as cause:
            name = request.header.get("request")
            error = InvalidRequestError(f"malformed or unknown request {name!r}: {cause}")
            request.connection.refuse(str(request.header.get("ask", "")), error)
            return None

    def _runs_beside(self, command: AnyRun) -> bool:
        """Whether a run may start now, between two tokens of running generations. What a sync needs
        from other nodes is fetched before, beside the generations."""
        if isinstance(command, Sync):
            in_flight = command.params is not None and command.params.in_flight
            return self._mover.arrival.is_there(command) and in_flight
        return isinstance(command, Generate)

    def _will_begin(self, command: AnyRun) -> None:
        """Hook before each run, for a worker whose peer ranks begin the same run."""

    def _reply_or_listen(self, name: RunName, connection: WorkerConnection) -> None:
        """Send the kept reply of a known run, or send it to this connection when the run ends."""
        reply = self._replies.answer(name)
        if reply is None:
            self._listeners[name].append(connection)
        else:
            connection.send(reply.header, reply.payload)

    def _begin(self, command: AnyRun, share: RankShare, payload: Payload) -> None:
        name, kind = command.name, command.kind
        started = time.perf_counter()
        try:
            if not self._replies.begin(command):
                self._finish(name, BackendResult(), started)
                return
            with _logged(command):
                result = self._execute(command, share, payload, started)
            if result is None:
                return
            if kind == OperationKind.LOAD or kind in MUTATING:
                self._replies.applied_seq = command.seq
            self._finish(name, result, started, replay=command.replay)
        except PlexRLError as error:
            # The mutation has written the weights that are not finite: the earlier state is gone.
            is_spoilt = kind in MUTATING and isinstance(error, NonFiniteWeightsError)
            self._fail(name, error, state_intact=not (is_spoilt or self._mover.is_torn))
        except Exception as error:
            held = held_error(error, f"{kind.value} could not go on")
            if held is not None:
                # It is unknown what was written before the error, so the state counts as lost.
                LOG.warning("%s: %s", name[0], error)
                self._fail(name, held, state_intact=False)
                return
            LOG.exception("%s failed", name[0])
            if self._is_peer_loss(error):
                # Without a reply the run is repeated, once the scheduler has restarted all ranks.
                LOG.info("%s lost other ranks, so this one ends", name[0])
                raise SystemExit(1) from None
            failure = ExecutionError(
                f"{kind.value} failed on the worker: see `plexrl logs`; the workers are restarted "
                "from their last complete state"
            )
            self._fail(name, failure, state_intact=False)

    def _execute(
        self, command: AnyRun, share: RankShare, payload: Payload, started: float
    ) -> BackendResult | None:
        """The result of a run. None: a generation, which finishes in a later step."""
        on_stored = isinstance(command, OptimStep) and command.stored is not None
        needs_device = not (on_stored or isinstance(command, Load | SaveCheckpoint))
        if needs_device and not self._mover.is_resident:
            raise ConflictError(f"{command.kind.value} needs the state on the device")
        match command:
            case Load() | Offload() | Snapshot() | Publish() | Sync():
                return BackendResult(result=self._mover.move(command))
            case Barrier():
                return BackendResult()
            case SaveCheckpoint():
                return BackendResult(result=self._mover.save_checkpoint(command))
            case OptimStep(stored=order) if order is not None:
                return self._mover.step_stored(_call(command, share, payload), order)
            case Generate():
                self._generate(command.name, _call(command, share, payload), started)
                return None
            case _:
                if command.kind in MUTATING:
                    self._mover.written()
                return self._backend.run(_call(command, share, payload))

    def _generate(self, name: RunName, call: BackendCall, started: float) -> None:
        assert self._generator is not None, "only rollout deployments receive generates"
        log = self._streams.begin(call.operation, call.params.stream)
        self._generations[call.operation] = (name, started)
        try:
            self._generator.submit(
                call,
                log.append if isinstance(log, TokenLog) else None,
                log.append if isinstance(log, RowLog) else None,
            )
        except PlexRLError:
            del self._generations[call.operation]
            self._streams.end(call.operation)
            raise
        self._controls.generation_began(call.operation, name[1])

    def _is_peer_loss(self, error: Exception) -> bool:
        """Whether a run or a step failed because another rank is gone."""
        if "torch" not in sys.modules:
            # There are no collectives. A paced worker has no torch, and is not to import it now.
            return False
        from plexrl.worker.rollout.engine.tensor_parallel import is_lost_rank_error

        return is_lost_rank_error(error)

    def _step(self, generator: RolloutBackend) -> None:
        try:
            finished = generator.step()
        except Exception as cause:
            LOG.exception("generation failed")
            error: PlexRLError = ExecutionError(
                "generation failed on the worker: see `plexrl logs`"
            )
            if isinstance(cause, PlexRLError):
                error = cause
            # A generation without a reply is repeated by the restarted workers.
            if not self._is_peer_loss(cause):
                for name, _ in list(self._generations.values()):
                    self._fail(name, error, state_intact=False)
            # The engine's state cannot be repaired. The agent reports the exit.
            raise SystemExit(1) from None
        for operation, result in finished:
            name, started = self._generations.pop(operation)
            self._finish(name, _with_stream_order(result, self._streams.end(operation)), started)
        self._streams.serve()

    def _finish(
        self, name: RunName, result: BackendResult, started: float, *, replay: bool = False
    ) -> None:
        """Reply with a result, or with an error if no frame can carry it."""
        payload = encode_body({}, result.arrays) if result.arrays and not replay else b""
        finished = Finished(
            operation=name[0],
            token=name[1],
            result=result.result,
            compute_s=time.perf_counter() - started,
            peak_bytes=self._mover.take_peak_bytes(),
        )
        header = frame_header(finished)
        try:
            encode_head(header, len(payload))
        except PayloadTooLargeError as error:
            # Mutations return less than they are sent, so no state depends on this result.
            self._fail(name, error, state_intact=True)
            return
        self._reply(name, KeptReply(header, payload))

    def _fail(self, name: RunName, error: PlexRLError, *, state_intact: bool) -> None:
        failed = Failed(
            operation=name[0], token=name[1], error=error.to_wire(), state_intact=state_intact
        )
        self._reply(name, KeptReply(frame_header(failed), b""))

    def _reply(self, name: RunName, reply: KeptReply) -> None:
        self._replies.end(name, reply)
        for connection in self._listeners.pop(name, []):
            connection.send(reply.header, reply.payload)


@contextmanager
def _logged(command: AnyRun) -> Iterator[None]:
    """Log begin and end of a run that changes the state or moves it: a reader of all ranks' logs
    sees who had a GPU, and that no two deployments had it at once."""
    if command.kind not in MUTATING and not isinstance(command, MOVES):
        yield
        return
    run = (command.kind.value, command.operation, command.token, command.seq)
    LOG.info("begin %s %s token %d seq %d", *run)
    try:
        yield
    finally:
        LOG.info("end %s %s token %d seq %d", *run)


def _with_stream_order(result: BackendResult, log: Log | None) -> BackendResult:
    """The result of a generation, with the order in which its tokens or rows were streamed."""
    if log is None:
        return result
    order = "row_order" if isinstance(log, RowLog) else "stream_order"
    return BackendResult(
        result={**result.result, "stream": log.name},
        arrays={**result.arrays, order: log.order()},
    )


def _call(command: AnyCompute | Generate, share: RankShare, payload: Payload) -> BackendCall:
    return BackendCall(
        operation=command.operation,
        job=command.job,
        kind=command.kind,
        params=command.params,
        share=share,
        arrays=decode_body(payload)[1] if payload else {},
        seq=command.seq,
        trainer_step=command.trainer_step,
    )
