"""One client's connection as the daemon sees it: requests in, replies out.

What a request may name is said by the ticket that the connection began with. A worker's connection
belongs to one rank and moves no other's state.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Union

import msgspec

from plexrl.errors import InvalidRequestError, PlexRLError, StateTierFullError
from plexrl.statemanager.daemon.handlers import HANDLERS
from plexrl.statemanager.daemon.handlers.caller import AnyHandler, Caller, Reply, Services
from plexrl.statemanager.observe.counters import MoveKind
from plexrl.statemanager.protocol.channel import close_all
from plexrl.statemanager.protocol.messages import Request
from plexrl.statemanager.store.disk_space import is_full

LOG = logging.getLogger(__name__)

_REQUESTS: Any = Union[tuple(HANDLERS)]  # noqa: UP007  # made of a table
_decode: Callable[[bytes | memoryview], Request] = msgspec.msgpack.Decoder(_REQUESTS).decode


class Session:
    """Carries out one connection's requests, one after the other."""

    def __init__(
        self, services: Services, uid: int, is_there: Callable[[], bool] = lambda: True
    ) -> None:
        """`uid`: whose process is at the other end, by the kernel's word. `is_there` says whether
        it still is."""
        self._caller = Caller(services=services, uid=uid)
        self._is_there = is_there

    def answer(self, body: bytes | memoryview, fds: Sequence[int]) -> Reply:
        """What comes of a request.

        The descriptors that came with the request are closed here.

        Raises:
            PlexRLError: the request is refused; nothing has changed.
            ConnectionLostError: nobody waits for the answer; nothing has changed.
        """
        try:
            try:
                request = _decode(body)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                # msgspec lets bad UTF-8 and deep nesting through as Python's own errors.
                raise InvalidRequestError(f"malformed request: {error}") from error
            _, handler, roles, is_move = HANDLERS[type(request)]
            caller = self._caller
            if roles and (caller.said is None or caller.said.role not in roles):
                caller.refuse(roles, request)
            if is_move:
                return self._move(handler, request, fds)
            return handler(caller, request, fds)
        except PlexRLError as error:
            self._caller.services.tally.refused(error.code)
            raise
        except OSError as error:
            if not is_full(error):
                raise self._failed(error) from error
            self._caller.services.tally.refused(StateTierFullError.code)
            raise StateTierFullError(
                f"the StateManager has no room for a {type(request).__name__} ({error}): free "
                "space there; the state stays where it was"
            ) from error
        except Exception as error:
            raise self._failed(error) from error
        finally:
            if fds:
                close_all(fds)

    def _failed(self, error: Exception) -> PlexRLError:
        # A bug of ours must not leave this client without an answer or end the others' daemon.
        LOG.error("a request failed", exc_info=error)
        return PlexRLError(
            f"the StateManager failed ({error!r}): see its log; the state stays where it was"
        )

    def close(self) -> None:
        """The client is gone: forget its arena and let go of what it reads."""
        self._caller.close()

    def _move(self, handler: AnyHandler, request: Request, fds: Sequence[int]) -> Reply:
        caller = self._caller
        services, name = caller.services, type(request).__name__
        claims = caller.claims
        with services.line.place(name, claims.holder, claims.tenant, self._is_there):
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
                services.tally.moved(
                    MoveKind(request=name, outcome=outcome, tier=answer.get("tier", "")),
                    nbytes=answer.get("bytes_moved", 0),
                    seconds=time.perf_counter() - started,
                )
