"""The StateManager's socket: one blocking thread per connection, so a call costs a few µs."""

import logging
import os
import select
import socket
import threading
import uuid
from functools import partial
from pathlib import Path

from plexrl.errors import (
    ConnectionLostError,
    OverloadedError,
    PermissionDeniedError,
    PlexRLError,
)
from plexrl.statemanager.bytes.fair_queue import FairQueue
from plexrl.statemanager.checkpoint.jobs import CheckpointJobs
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.daemon.handlers.caller import Services
from plexrl.statemanager.daemon.memory.prefetch import ArenaPrefetcher
from plexrl.statemanager.daemon.registry.fencing import Fencing
from plexrl.statemanager.daemon.registry.incarnations import Incarnations
from plexrl.statemanager.daemon.registry.registry import Registry
from plexrl.statemanager.daemon.session import ClientSession
from plexrl.statemanager.device.backend import DeviceBackend, DeviceKind
from plexrl.statemanager.device.frozen_weights import FrozenWeightsCache
from plexrl.statemanager.observe.counters import Counters
from plexrl.statemanager.protocol.channel import Channel, Kind, close_all
from plexrl.statemanager.protocol.connection import peer_pid, peer_uid
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.protocol.ticket_key import make_ticket_key
from plexrl.statemanager.store.background.drain import Drainer
from plexrl.statemanager.store.background.earlier_versions import EarlierVersions
from plexrl.statemanager.store.background.prefetch import Prefetcher
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.transfer.relayout_load import Relayouter
from plexrl.statemanager.transfer.replicas import Replicas

LOG = logging.getLogger(__name__)

BACKLOG = 128
SEND_TIMEOUT_S = 30
"""Timeout of sending an answer; then the client is disconnected."""
REFUSAL_TIMEOUT_S = 1
"""Timeout of sending a refusal, which the accepting thread does."""
DRAIN_TIMEOUT_S = 60.0
"""Time for running moves to finish when the server closes."""
ACCEPT_RETRY_S = 0.1
"""Backoff after a failed accept, for example for lack of descriptors."""
CHECKPOINTS_TIMEOUT_S = 60.0
"""Time for queued checkpoints to be written when the server closes."""

_REQUEST, _RESULT = Kind.REQUEST, Kind.RESULT


class DaemonServer:
    """Listens from construction on; answers requests from `serve` until `close`."""

    def __init__(self, config: StateManagerConfig, store: Store, devices: DeviceBackend) -> None:
        self._config = config
        key = make_ticket_key(config.ticket_key_path)
        network = Network.of(config.tls, config.fabric)
        registry = Registry()
        self.services = Services(
            config=config,
            store=store,
            registry=registry,
            fencing=Fencing(Path(config.host_dir) / "fencing.json"),
            relayouter=Relayouter(store),
            prefetcher=Prefetcher(store),
            arena_prefetcher=ArenaPrefetcher(
                store,
                registry,
                only_idle=config.device == DeviceKind.CPU and config.device_bytes is None,
            ),
            replicas=Replicas(store, network, key, config.published_versions),
            checkpoints=CheckpointJobs(config),
            devices=devices,
            key=key,
            network=network,
            incarnations=Incarnations(Path(config.host_dir) / "incarnations.json"),
            move_queue=FairQueue(config.moves_max, config.moves_waiting_max),
            counters=Counters(),
            run_id=uuid.uuid4().hex,
            frozen_weights=FrozenWeightsCache(devices),
            earlier_versions=EarlierVersions(store),
        )
        self._drainer = Drainer(store, config.host_bytes) if config.drain else None
        self._lock = threading.Lock()
        self._served: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()
        users = {*config.served_uids, *config.tenant_uids.values()}
        self._served_uids = frozenset({0, os.getuid(), *users})
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(config.listen)
        if users:
            # Other users are refused by the uid that the kernel reports.
            Path(config.listen).chmod(0o666)
        self._socket.listen(BACKLOG)

    def serve(self) -> None:
        """Accept connections until `close`."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                # Either `close` shut the socket down, or the error is temporary: clients that
                # exhaust the descriptors must not end the service.
                if self._closing.wait(ACCEPT_RETRY_S):
                    return
                LOG.warning("accepting a connection failed, retrying: %s", error)
                continue
            try:
                self._admit(connection)
            except PlexRLError as error:
                LOG.warning("a connection was refused: %s", error)
                self.services.counters.count_refusal(error.code)
                _refuse(connection, error)

    def connections(self) -> int:
        """Number of connected clients."""
        with self._lock:
            return len(self._served)

    def close(self) -> None:
        """Stop accepting, wait for running moves, then end every connection."""
        self._closing.set()
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
        self.services.prefetcher.close()
        self.services.arena_prefetcher.close()
        self.services.replicas.close()
        self.services.earlier_versions.close()
        self.services.checkpoints.close(CHECKPOINTS_TIMEOUT_S)
        if self._drainer is not None:
            self._drainer.close()
        self.services.devices.close()

    def _admit(self, connection: socket.socket) -> None:
        uid = check_peer(connection, self._served_uids)
        thread = threading.Thread(target=self._serve_one, args=(connection, uid), daemon=True)
        with self._lock:
            if len(self._served) >= self._config.connections_max:
                raise OverloadedError(
                    f"the StateManager of {self._config.node!r} serves "
                    f"{self._config.connections_max} connections, its maximum: try again, or raise "
                    "connections_max",
                    retry_after_s=1.0,
                )
            self._served[connection] = thread
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                del self._served[connection]
            raise OverloadedError(
                f"the StateManager of {self._config.node!r} cannot start a thread ({error}): raise "
                "the process limit of its user",
                retry_after_s=1.0,
            ) from error

    def _serve_one(self, connection: socket.socket, uid: int) -> None:
        is_there = partial(_is_there, connection)
        session = ClientSession(self.services, uid, is_there, pid=peer_pid(connection))
        try:
            channel = Channel(connection, send_timeout_s=SEND_TIMEOUT_S)
            while True:
                kind, body, fds = channel.receive()
                if kind != _REQUEST:
                    close_all(fds)
                    raise ConnectionLostError(f"a client sent a message of kind {kind}")
                _answer(channel, session, body, fds)
        except ConnectionLostError as error:
            LOG.debug("a client left: %s", error)
        except (OSError, PlexRLError) as error:
            # Message boundaries are lost, so an answer cannot be sent.
            LOG.warning("a connection broke: %s", error)
        finally:
            session.close()
            with self._lock:
                del self._served[connection]
            connection.close()


def _answer(channel: Channel, session: ClientSession, body: memoryview, fds: list[int]) -> None:
    try:
        answer, sent = session.answer(body, fds)
        try:
            channel.send(_RESULT, answer, sent)
        finally:
            if sent:
                close_all(sent)
    except PlexRLError as error:
        channel.send(Kind.ERROR, error.to_wire())


def _is_there(connection: socket.socket) -> bool:
    """Whether the client is still connected. Does not read, because `close` may have shut that side
    down while an answer is still to be sent."""
    poll = select.poll()
    poll.register(connection, 0)
    return not poll.poll(0)


def check_peer(connection: socket.socket, served_uids: frozenset[int]) -> int:
    """The client's user, as the kernel reports it.

    Raises:
        PermissionDeniedError: this user is not served.
    """
    uid = peer_uid(connection)
    if uid not in served_uids:
        raise PermissionDeniedError(
            f"this StateManager does not serve user {uid}: run workers as its own user, or add "
            "theirs to served_uids",
            uid=uid,
        )
    return uid


def _refuse(connection: socket.socket, error: PlexRLError) -> None:
    """Send the error and disconnect; the client reads it as the answer to its first request."""
    try:
        channel = Channel(connection, send_timeout_s=REFUSAL_TIMEOUT_S)
        channel.send(Kind.ERROR, error.to_wire())
    except OSError as lost:
        LOG.debug("a refused client left first: %s", lost)
    connection.close()
