"""StateManagers of other nodes that write files of a checkpoint, each its part."""

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import msgspec

from plexrl.errors import (
    OperationCancelledError,
    PlexRLError,
    from_wire,
)
from plexrl.statemanager.checkpoint.format.plan import PlannedFile
from plexrl.statemanager.checkpoint.format.record import TensorRecord
from plexrl.statemanager.checkpoint.requests import AskFiles, FilesReport, WriteFiles
from plexrl.statemanager.checkpoint.write.division import divide
from plexrl.statemanager.checkpoint.write.progress import CheckpointProgress
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.transfer.transport.tcp.client import TcpConnection

LOG = logging.getLogger(__name__)

POLL_S = 0.2
TIMEOUT_S = 30.0
"""Longest wait for one answer."""
STOP_S = 5.0
"""Longest wait until the others have stopped, before their connections are cut."""
HERE = ""
"""Address of this node's StateManager, as its readers have it."""


class OtherNodes:
    """The other nodes that hold versions of a checkpoint. One checkpoint at a time."""

    def __init__(
        self, network: Network, addresses: Sequence[str], ticket: bytes, request: WriteFiles
    ) -> None:
        """`addresses` are remote ones, as readers of the versions there have them; `ticket` is an
        agent's; `request` lacks only the files."""
        self._network = network
        self._addresses = addresses
        self._ticket = ticket
        self._request = request
        self._lock = threading.Lock()
        self._connections: set[TcpConnection] = set()
        self._stopped = threading.Event()

    @contextmanager
    def writing(
        self, files: Sequence[PlannedFile], held_by: Sequence[str], progress: CheckpointProgress
    ) -> "Iterator[tuple[Sequence[PlannedFile], Sequence[Future[list[TensorRecord]]]]]":
        """Have them write their parts while the block runs, at whose end they stop. Gives the part
        of this node, and what they write. `held_by` has the address of each reader."""
        self._stopped.clear()
        own, *parts = divide(files, held_by, (HERE, *self._addresses))
        with ThreadPoolExecutor(len(self._addresses)) as pool:
            futures = [
                pool.submit(self._write, address, [file.path for file in part], progress)
                for address, part in zip(self._addresses, parts, strict=True)
                if part
            ]
            try:
                yield own, futures
            finally:
                self._stopped.set()
                # Each tells its node to stop, so that no file comes after those are deleted.
                if wait(futures, STOP_S).not_done:
                    self._cut()

    def _write(
        self, address: str, files: Sequence[str], progress: CheckpointProgress
    ) -> list[TensorRecord]:
        """What is in files that a node has written; empty: it could not write them. Raises
        `OperationCancelledError`."""
        connection: TcpConnection | None = None
        try:
            connection = TcpConnection(self._network, address, self._ticket, TIMEOUT_S)
            with self._lock:
                self._connections.add(connection)
            return [] if self._stopped.is_set() else self._written(connection, files, progress)
        except OperationCancelledError:
            raise
        except (PlexRLError, OSError) as error:
            LOG.warning("%s does not write files of a checkpoint: %s", address, error)
            return []
        finally:
            if connection is not None:
                with self._lock:
                    self._connections.discard(connection)
                connection.close()

    def _written(
        self, connection: TcpConnection, files: Sequence[str], progress: CheckpointProgress
    ) -> list[TensorRecord]:
        request = msgspec.structs.replace(self._request, files=tuple(files))
        connection.ask(_plain(request))
        found: list[TensorRecord] = []
        done = 0
        try:
            while True:
                report = msgspec.convert(connection.ask(_plain(AskFiles())), FilesReport)
                progress.add_elsewhere(report.bytes_done - done)
                done = report.bytes_done
                found += report.tensors
                if report.error is not None:
                    raise from_wire(report.error)
                if report.is_over:
                    return found
                if self._stopped.wait(POLL_S):
                    connection.ask(_plain(AskFiles(stop=True)))
                    return []
                progress.wait(0.0)
        except OperationCancelledError:
            connection.ask(_plain(AskFiles(stop=True)))
            raise
        except BaseException:
            # This node writes them again.
            progress.add_elsewhere(-done)
            raise

    def _cut(self) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.cut()


def _plain(request: msgspec.Struct) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(request)
    return plain
