"""The StateManager's socket: one thread a connection, blocking, so that a call costs a few µs."""

import logging
import os
import socket
import struct
import threading
from pathlib import Path

import msgspec

from plexrl.errors import (
    ConnectionLostError,
    OverloadedError,
    PermissionDeniedError,
    PlexRLError,
)
from plexrl.statemanager.checkpoint.jobs import CheckpointJobs
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.device.backend import DeviceBackend
from plexrl.statemanager.drain import Drainer
from plexrl.statemanager.fencing import Fencing
from plexrl.statemanager.handlers.caller import Services
from plexrl.statemanager.prefetch import Prefetcher
from plexrl.statemanager.protocol import close_all, recv_request, send_answer, send_error
from plexrl.statemanager.registry import Registry
from plexrl.statemanager.session import Session
from plexrl.statemanager.store import Store

LOG = logging.getLogger(__name__)

BACKLOG = 128
SEND_TIMEOUT_S = 30
"""A client that takes no answer for so long is cut off."""
DRAIN_TIMEOUT_S = 60.0
"""Moves under way when the server closes have so long to finish."""
CHECKPOINTS_TIMEOUT_S = 60.0
"""Checkpoints taken in before the server closes have so long to be written."""

_CREDENTIALS = struct.Struct("3i")
_TIMEVAL = struct.Struct("@ll")


class Server:
    """Listens from its construction on; answers workers from `serve` until `close`."""

    def __init__(self, config: StateManagerConfig, store: Store, devices: DeviceBackend) -> None:
        self._config = config
        self._services = Services(
            config=config,
            store=store,
            registry=Registry(),
            fencing=Fencing(Path(config.host_dir) / "fencing.json"),
            prefetcher=Prefetcher(store),
            checkpoints=CheckpointJobs(config),
            devices=devices,
        )
        self._drainer = Drainer(store, config.host_bytes) if config.drain else None
        self._lock = threading.Lock()
        self._served: dict[socket.socket, threading.Thread] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(config.listen)
        self._socket.listen(BACKLOG)

    def serve(self) -> None:
        """Accept connections until `close`."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # `close` shut the socket down.
                return
            try:
                self._admit(connection)
            except PlexRLError as error:
                LOG.warning("a connection was refused: %s", error)
                _refuse(connection, error)

    def close(self) -> None:
        """Accept no more; let moves that are under way finish, then end every connection."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            served = dict(self._served)
        for connection in served:
            try:
                connection.shutdown(socket.SHUT_RD)
            except OSError as error:
                LOG.debug("a client left first: %s", error)
        for thread in served.values():
            thread.join(DRAIN_TIMEOUT_S)
        self._services.prefetcher.close()
        self._services.checkpoints.close(CHECKPOINTS_TIMEOUT_S)
        if self._drainer is not None:
            self._drainer.close()
        self._services.devices.close()

    def _admit(self, connection: socket.socket) -> None:
        uid = check_peer(connection, frozenset({0, os.getuid()}))
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(SEND_TIMEOUT_S, 0)
        )
        thread = threading.Thread(target=self._serve_one, args=(connection, uid), daemon=True)
        with self._lock:
            if len(self._served) >= self._config.connections_max:
                raise OverloadedError(
                    f"the StateManager of {self._config.node!r} serves "
                    f"{self._config.connections_max} connections already: try again, or raise "
                    "connections_max",
                    retry_after_s=1.0,
                )
            self._served[connection] = thread
        thread.start()

    def _serve_one(self, connection: socket.socket, uid: int) -> None:
        session = Session(self._services, uid)
        try:
            while True:
                plain, fds = recv_request(connection)
                self._answer(connection, session, plain, fds)
        except ConnectionLostError:
            LOG.debug("a client left")
        except (OSError, PlexRLError, msgspec.MsgspecError) as error:
            # The stream is no longer in step, so there is nothing to answer on.
            LOG.warning("a connection broke: %s", error)
        finally:
            session.close()
            with self._lock:
                del self._served[connection]
            connection.close()

    def _answer(
        self, connection: socket.socket, session: Session, plain: object, fds: list[int]
    ) -> None:
        try:
            answer, sent = session.answer(plain, fds)
        except PlexRLError as error:
            send_error(connection, error)
            return
        try:
            send_answer(connection, answer, sent)
        finally:
            close_all(sent)


def check_peer(connection: socket.socket, served_uids: frozenset[int]) -> int:
    """The client's user, by the kernel's word, if it is one that is served.

    Raises:
        PermissionDeniedError: it is another user's.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid not in served_uids:
        raise PermissionDeniedError(
            f"user {uid} is not the one this StateManager serves: run workers as its user", uid=uid
        )
    assert isinstance(uid, int)
    return uid


def _refuse(connection: socket.socket, error: PlexRLError) -> None:
    """Tell a client why before it is cut off; it reads this as the answer to its first request."""
    try:
        send_error(connection, error)
    except OSError as lost:
        LOG.debug("a refused client left first: %s", lost)
    connection.close()
