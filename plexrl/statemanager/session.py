"""One client's connection as the daemon sees it: requests in, replies out.

A connection belongs to the one rank that registered on it, and moves no other rank's state. One
that registered none is the node agent's, and may take whole versions over from another node.
"""

import logging
from collections.abc import Sequence
from typing import Any, Union

import msgspec

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.statemanager.handlers import HANDLERS
from plexrl.statemanager.handlers.caller import Caller, Reply, Services
from plexrl.statemanager.protocol import Request, close_all

LOG = logging.getLogger(__name__)

_REQUEST: Any = Union[tuple(HANDLERS)]  # noqa: UP007  # made of a table


class Session:
    """Carries out one connection's requests, one after the other."""

    def __init__(self, services: Services, uid: int) -> None:
        """`uid` is the client's user."""
        self._caller = Caller(services=services, uid=uid)

    def answer(self, plain: object, fds: Sequence[int]) -> Reply:
        """What comes of a request.

        The descriptors that came with the request are closed here.

        Raises:
            PlexRLError: the request is refused; nothing has changed.
        """
        try:
            try:
                request: Request = msgspec.convert(plain, _REQUEST)
            except msgspec.ValidationError as error:
                raise InvalidRequestError(f"malformed request: {error}") from error
            return HANDLERS[type(request)](self._caller, request, fds)
        except PlexRLError:
            raise
        except Exception as error:
            # A bug of ours must not leave this client without an answer or end the others' daemon.
            LOG.exception("a request failed")
            raise PlexRLError(
                f"the StateManager failed ({error!r}): see its log; the state stays where it was"
            ) from error
        finally:
            close_all(fds)

    def close(self) -> None:
        """The client is gone: forget its arena and let go of what it reads."""
        self._caller.close()
