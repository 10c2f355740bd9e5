"""Workers that share one engine: the first leads, and the others do what it does, in its order.

Generations go to the leader alone, and its steps are told to the others. Everything else that the
scheduler admits is sent to every rank; each begins it when the leader does, so that the ranks meet
in the same collectives whatever order the messages arrive in. A rank that loses the others ends,
and the scheduler starts all of them anew.
"""

import logging
import queue
import threading
from collections import deque

from plexrl.errors import InvalidRequestError
from plexrl.wire.operations import OperationKind
from plexrl.worker.process.backend import Backend
from plexrl.worker.process.process import Worker
from plexrl.worker.process.replies import RunName
from plexrl.worker.process.server import REQUESTS_MAX, Request
from plexrl.worker.rollout.engine.backend import TorchRolloutBackend
from plexrl.worker.rollout.engine.tensor_parallel import Order, Orders, RankGroup, is_of_lost_rank
from plexrl.worker.state.residency import StateMover

LOG = logging.getLogger(__name__)

RUN = "run"
"""The order to begin a run that every rank is sent."""
GONE = "gone"
"""What a rank tells itself once it hears nothing any more."""


def make_worker(backend: Backend, mover: StateMover, requests: "queue.Queue[Request]") -> Worker:
    """The worker for this rank."""
    if isinstance(backend, TorchRolloutBackend) and backend.ranks is not None:
        if backend.orders is not None:
            return LeadingWorker(backend, mover, requests, backend.orders)
        return FollowingWorker(backend, mover, requests, backend.ranks)
    return Worker(backend, mover, requests)


class LeadingWorker(Worker):
    """Tells the others what it begins; its engine tells them of its steps."""

    def __init__(
        self,
        backend: Backend,
        mover: StateMover,
        requests: "queue.Queue[Request]",
        orders: Orders,
    ) -> None:
        super().__init__(backend, mover, requests)
        self._orders = orders

    def _admitted(self, name: RunName, kind: OperationKind) -> None:
        if kind != OperationKind.GENERATE:
            self._orders.send(RUN, name)

    def _tells_of_lost_ranks(self, error: Exception) -> bool:
        return is_of_lost_rank(error)


class FollowingWorker(Worker):
    """Does what it is told, and answers for the runs that it is sent."""

    def __init__(
        self,
        backend: TorchRolloutBackend,
        mover: StateMover,
        requests: "queue.Queue[Request]",
        ranks: RankGroup,
    ) -> None:
        super().__init__(backend, mover, requests)
        self._rank_backend = backend
        self._ranks = ranks
        self._inbox: queue.Queue[Request | list[Order]] = queue.Queue(REQUESTS_MAX)
        self._told: deque[Order] = deque()
        self._arrived: dict[RunName, Request] = {}
        for receive in (self._hear, self._forward):
            threading.Thread(target=receive, daemon=True).start()

    def turn(self, *, block: bool) -> None:
        """Take the next message, then obey as far as everything for it is here."""
        found = self._inbox.get(block=block)
        if isinstance(found, Request):
            self._arrive(found)
        else:
            self._told.extend(found)
        while self._told and self._obey(self._told[0]):
            self._told.popleft()

    def _hear(self) -> None:
        while True:
            try:
                orders = self._ranks.hear()
            except RuntimeError as error:
                LOG.info("the leader is gone: %s", error)
                self._inbox.put([(GONE, ())])
                return
            self._inbox.put(orders)

    def _forward(self) -> None:
        while True:
            self._inbox.put(self._requests.get())

    def _arrive(self, request: Request) -> None:
        header = request.header
        if header.get("request") == "abort":
            # The leader is sent it too, and tells when.
            return
        if header.get("request") != RUN:
            error = InvalidRequestError(
                f"{header.get('request')!r} is for the first rank of an engine: ask that one"
            ).to_wire()
            ask = header.get("ask", "")
            request.connection.send(
                {"reply": "failed", "operation": ask, "token": 0, "error": error}
            )
            return
        name: RunName = (header["command"]["operation"], int(header["command"]["token"]))
        if self._replies.known(name):
            self._attach(name, request.connection)
        else:
            self._arrived[name] = request

    def _obey(self, order: Order) -> bool:
        """False: what it is about has not arrived yet."""
        name, arguments = order
        if name == GONE:
            raise SystemExit(1)
        if name == RUN:
            run: RunName = arguments[0]
            request = self._arrived.pop(run, None)
            if request is None:
                return False
            self._listeners[run] = [request.connection]
            kind = OperationKind(request.header["command"]["kind"])
            self._begin(run, kind, request.header, request.payload)
            return True
        try:
            getattr(self._rank_backend.engine, name)(*arguments)
        except Exception:
            LOG.exception("%s failed", name)
            raise SystemExit(1) from None
        return True
