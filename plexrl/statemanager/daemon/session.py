"""One client's connection: requests in, replies out.

The ticket that the client showed decides what its requests may name. A worker's connection belongs
to one rank and moves only that rank's state.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Union

import msgspec

from plexrl.errors import (
    InvalidRequestError,
    PlexRLError,
    StateTierFullError,
    StorageUnavailableError,
)
from plexrl.process.folders.disk_errors import FAILING
from plexrl.statemanager.daemon.handlers import HANDLERS
from plexrl.statemanager.daemon.handlers.caller import (
    AnyHandler,
    DaemonCaller,
    DaemonReply,
    Services,
)
from plexrl.statemanager.observe.counters import MoveKind
from plexrl.statemanager.protocol.channel import close_all
from plexrl.statemanager.protocol.messages import Request
from plexrl.statemanager.store.disk_space import is_full, write_error

LOG = logging.getLogger(__name__)

_REQUESTS: Any = Union[tuple(HANDLERS)]  # noqa: UP007  # built from the table
_decode: Callable[[bytes | memoryview], Request] = msgspec.msgpack.Decoder(_REQUESTS).decode


class ClientSession:
    """Handles the requests of one connection, one at a time."""

    def __init__(
        self,
        services: Services,
        uid: int,
        is_there: Callable[[], bool] = lambda: True,
        *,
        pid: int = 0,
    ) -> None:
        """`uid`: user of the client process, as the kernel reports it, and `pid` its id; 0:
        unknown. `is_there()` returns whether the client is still connected."""
        self._caller = DaemonCaller(services=services, uid=uid, pid=pid)
        self._is_there = is_there

    def answer(self, body: bytes | memoryview, fds: Sequence[int]) -> DaemonReply:
        """Handle a request; closes the descriptors that came with it.

        Raises:
            PlexRLError: the request is refused; nothing has changed.
            ConnectionLostError: the client has disconnected; nothing has changed.
        """
        try:
            try:
                request = _decode(body)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                # msgspec reports bad UTF-8 and deep nesting with Python's own errors.
                raise InvalidRequestError(f"malformed request: {error}") from error
            _, handler, roles, is_move = HANDLERS[type(request)]
            caller = self._caller
            if roles and (caller.shown_claims is None or caller.shown_claims.role not in roles):
                caller.refuse(roles, request)
            if is_move:
                return self._move(handler, request, fds)
            return handler(caller, request, fds)
        except PlexRLError as error:
            self._caller.services.counters.count_refusal(error.code)
            raise
        except OSError as error:
            if error.errno in FAILING:
                self._caller.services.counters.count_refusal(StorageUnavailableError.code)
                raise write_error("the StateManager's file system", error) from error
            if not is_full(error):
                raise self._failed(error) from error
            self._caller.services.counters.count_refusal(StateTierFullError.code)
            raise StateTierFullError(
                f"the StateManager's file system is full, {type(request).__name__} failed "
                f"({error}): "
                "free space there; the state stays where it was"
            ) from error
        except Exception as error:
            raise self._failed(error) from error
        finally:
            if fds:
                close_all(fds)

    def _failed(self, error: Exception) -> PlexRLError:
        # A bug must neither leave this client without an answer nor end the daemon.
        LOG.error("a request failed", exc_info=error)
        return PlexRLError(
            f"the StateManager failed ({error!r}): see its log; the state stays where it was"
        )

    def close(self) -> None:
        """End the client's leases and registration."""
        self._caller.close()

    def _move(self, handler: AnyHandler, request: Request, fds: Sequence[int]) -> DaemonReply:
        caller = self._caller
        services, name = caller.services, type(request).__name__
        claims = caller.claims
        with services.move_queue.slot(name, claims.holder, claims.tenant, self._is_there):
            outcome, answer = "failed", dict[str, Any]()
            started = time.perf_counter()
            try:
                reply = handler(caller, request, fds)
                outcome, answer = "ok", reply.answer
                return reply
            except PlexRLError as error:
                outcome = error.code
                raise
            finally:
                services.counters.count_move(
                    MoveKind(request=name, outcome=outcome, tier=answer.get("tier", "")),
                    nbytes=answer.get("bytes_moved", 0),
                    seconds=time.perf_counter() - started,
                    prefetched_bytes=answer.get("prefetched_bytes", 0),
                )
