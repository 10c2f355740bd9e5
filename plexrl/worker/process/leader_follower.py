"""Workers that share one tensor-parallel engine: the first rank leads and the others follow.

Generations are sent to the leader alone, which broadcasts its engine calls to the followers. Every
other operation is sent to every rank. Each rank begins it when the leader does, so that all ranks
enter the same collectives, whatever the order in which messages arrive. A rank that loses its peers
exits, and the scheduler restarts all ranks.
"""

import logging
import queue
import threading
from collections import deque
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.wire.messages import AbortRun, AnyRun, Generate, RunName, StartRun
from plexrl.worker.interface.backend import Backend
from plexrl.worker.process.server.server import REQUESTS_MAX, ReceivedRequest
from plexrl.worker.process.worker import Worker
from plexrl.worker.rollout.engine.backend import EngineBackend
from plexrl.worker.rollout.engine.tensor_parallel import (
    EngineCall,
    EngineCalls,
    RankGroup,
)
from plexrl.worker.state.state_mover import StateMover

LOG = logging.getLogger(__name__)

RUN = "run"
"""Broadcast to begin a run that every rank receives."""
LEADER_LOST = "leader_lost"
"""A follower puts this in its own inbox when it has lost the leader."""


def make_worker(
    backend: Backend, mover: StateMover, requests: "queue.Queue[ReceivedRequest]"
) -> Worker:
    """The worker for this rank."""
    if isinstance(backend, EngineBackend) and backend.ranks is not None:
        if backend.calls is not None:
            return LeadingWorker(backend, mover, requests, backend.calls)
        return FollowingWorker(backend, mover, requests, backend.ranks)
    return Worker(backend, mover, requests)


class LeadingWorker(Worker):
    """Broadcasts the runs that it begins; its engine broadcasts its own calls."""

    def __init__(
        self,
        backend: Backend,
        mover: StateMover,
        requests: "queue.Queue[ReceivedRequest]",
        calls: EngineCalls,
    ) -> None:
        super().__init__(backend, mover, requests)
        self._calls = calls

    def _will_begin(self, command: AnyRun) -> None:
        if not isinstance(command, Generate):
            self._calls.send(RUN, command.name)


class FollowingWorker(Worker):
    """Repeats the leader's engine calls, and replies to the runs that it receives itself."""

    def __init__(
        self,
        backend: EngineBackend[Any],
        mover: StateMover,
        requests: "queue.Queue[ReceivedRequest]",
        ranks: RankGroup,
    ) -> None:
        super().__init__(backend, mover, requests)
        self._rank_backend = backend
        self._ranks = ranks
        self._inbox: queue.Queue[ReceivedRequest | list[EngineCall]] = queue.Queue(REQUESTS_MAX)
        self._calls: deque[EngineCall] = deque()
        self._arrived: dict[RunName, tuple[StartRun, ReceivedRequest]] = {}
        for receive in (self._receive_calls, self._receive_requests):
            threading.Thread(target=receive, daemon=True).start()

    def run_once(self, *, block: bool) -> None:
        """Take the next message, then make the leader's calls until one lacks its request."""
        found = self._inbox.get(block=block)
        if isinstance(found, ReceivedRequest):
            self._arrive(found)
        else:
            self._calls.extend(found)
        while self._calls and self._carry_out(self._calls[0]):
            self._calls.popleft()

    def _receive_calls(self) -> None:
        while True:
            try:
                calls = self._ranks.receive()
            except RuntimeError as error:
                LOG.info("lost the connection to the leader: %s", error)
                self._inbox.put([(LEADER_LOST, ())])
                return
            self._inbox.put(calls)

    def _receive_requests(self) -> None:
        while True:
            self._inbox.put(self._requests.get())

    def _arrive(self, request: ReceivedRequest) -> None:
        message = self._read(request)
        match message:
            case None | AbortRun():
                # The leader receives the abort too, and broadcasts when it happens.
                return
            case StartRun(run=command):
                if self._replies.known(command.name):
                    self._reply_or_listen(command.name, request.connection)
                else:
                    self._arrived[command.name] = message, request
            case _:
                error = InvalidRequestError(
                    f"only the first rank of an engine serves {request.header['request']!r}: send "
                    "it there"
                )
                request.connection.refuse(message.ask, error)

    def _carry_out(self, call: EngineCall) -> bool:
        """Carry out one call of the leader. False: the request that it names has not arrived."""
        name, arguments = call
        if name == LEADER_LOST:
            raise SystemExit(1)
        if name == RUN:
            run: RunName = arguments[0]
            if run not in self._arrived:
                return False
            message, request = self._arrived.pop(run)
            self._listeners[run] = [request.connection]
            self._begin(message.run, message.share, request.payload)
            return True
        try:
            getattr(self._rank_backend.engine, name)(*arguments)
        except Exception:
            LOG.exception("%s failed", name)
            raise SystemExit(1) from None
        return True
