"""Transport over RDMA: NIXL reads a source's memory; a TCP connection does everything else.

The TCP connection opens, holds and confirms a version as in `tcp.client`, and the source sends the
addresses of its bytes. Casts go over TCP, because a remote read cannot convert. NIXL is an optional
package and is imported at first use.
"""

import importlib
import logging
import os
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np

from plexrl.errors import ConnectionLostError, UnavailableError
from plexrl.statemanager.bytes.mapped_files import MappedData
from plexrl.statemanager.layout.plan.columns import Bytes, Ints
from plexrl.statemanager.layout.strided.copies import BYTES_CAST, StridedCopies, cut_at, single_rows
from plexrl.statemanager.store.receiving.reader import Arrived, Delta, while_there
from plexrl.statemanager.transfer.transport.tcp.client import Tcp, TcpReader

BYTES_PER_S = 20e9
REQUEST_S = 5e-6
DESCRIPTORS_MAX = 16 << 10
"""Maximum rows of one transfer."""
POLL_S = 100e-6

Regions = tuple[tuple[int, int, int], ...]
"""(address, bytes, offset in the data) of each region of a version, by offset."""


class Lent(msgspec.Struct, frozen=True):
    """Addresses of a source's version, for a reader."""

    agent: bytes
    """The metadata of the source's NIXL agent."""
    shards: tuple[Regions, ...]


class NixlLender:
    """Server side: registers memory for remote reads and describes it. As thread-safe as NIXL's
    agent."""

    def __init__(self, backend: str = "UCX") -> None:
        """Raises UnavailableError: the package is missing, or the backend does not start."""
        self._agent = _agent(backend)
        self._backend = backend

    def lend(self, shards: Sequence[MappedData]) -> tuple[Lent, list[Any]]:
        """The description of mapped versions, and the registrations to pass to `take_back`."""
        regions = [
            tuple(
                (piece.ctypes.data, len(piece), start)
                for piece, start in zip(shard.pieces, shard.starts.tolist(), strict=True)
            )
            for shard in shards
        ]
        registered = [
            self._agent.register_memory(
                [(address, nbytes, 0, "") for address, nbytes, _ in region], "DRAM"
            )
            for region in regions
            if region
        ]
        return Lent(agent=self._agent.get_agent_metadata(), shards=tuple(regions)), registered

    def take_back(self, registered: Sequence[Any]) -> None:
        """End the registrations."""
        for each in registered:
            self._agent.deregister_memory(each)


class Nixl:
    """Opens sources by the `nixl://host:port` of their TCP server."""

    def __init__(self, tcp: Tcp, timeout_s: float, backend: str = "UCX") -> None:
        """`timeout_s` bounds a transfer. Raises as `NixlLender`."""
        self._tcp = tcp
        self._timeout_s = timeout_s
        self._agent = _agent(backend)
        self._target: tuple[int, int] | None = None
        self._registered: Any = None

    def open(
        self, held: ExitStack, address: str, deployment: str, seq: int, known: Collection[str]
    ) -> "list[NixlReader]":
        """As `Transport.open`."""
        readers = self._tcp.open(held, address, deployment, seq, known)
        if not readers:
            return []
        lent = msgspec.convert(readers[0].connection.ask({"type": "lend"}), Lent)
        return [
            NixlReader(address, tcp, self, lent.agent, regions)
            for tcp, regions in zip(readers, lent.shards, strict=True)
        ]

    def read(self, agent: bytes, held: Regions, copies: StridedCopies, target: Bytes) -> None:
        """Perform copies that cast nothing, from the memory `held` of another agent.

        Raises:
            ConnectionLostError: the transfer failed or took too long.
        """
        self._register(target)
        peer = self._agent.add_remote_agent(agent)
        base = target.ctypes.data
        regions = np.array(held, dtype=np.int64).reshape(-1, 3)
        rows, homes = cut_at(single_rows(copies), regions[:, 2])
        remote = rows.src_offsets - regions[homes, 2] + regions[homes, 0]
        for at in range(0, len(rows), DESCRIPTORS_MAX):
            few = slice(at, at + DESCRIPTORS_MAX)
            sizes = rows.items[few]
            self._transfer(
                peer,
                _descriptors(base + rows.dst_offsets[few], sizes),
                _descriptors(remote[few], sizes),
            )

    def close(self) -> None:
        """Deregister the target, so that it may be unmapped."""
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
            self._registered = self._target = None

    def _register(self, target: Bytes) -> None:
        # Registration is expensive, so a target is registered once for all its pulls.
        place = (target.ctypes.data, len(target))
        if self._target == place:
            return
        self.close()
        self._registered = self._agent.register_memory([(*place, 0, "")], "DRAM")
        self._target = place

    def _transfer(self, peer: str, local: Ints, remote: Ints) -> None:
        agent = self._agent
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(local, "DRAM"),
            agent.get_xfer_descs(remote, "DRAM"),
            peer,
            b"",
        )
        try:
            deadline = time.monotonic() + self._timeout_s
            state = agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > deadline:
                    raise ConnectionLostError(f"an RDMA read took over {self._timeout_s} s")
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise ConnectionLostError(f"an RDMA read ended as {state}")
        finally:
            agent.release_xfer_handle(handle)


class NixlReader:
    """A `VersionReader` whose memory is read by RDMA. One thread at a time."""

    bytes_per_s = BYTES_PER_S
    request_s = REQUEST_S
    # The source does not see a read, so only `confirm` proves that the bytes were the version.
    arrives_whole = False

    def __init__(
        self, address: str, tcp: TcpReader, nixl: Nixl, agent: bytes, regions: Regions
    ) -> None:
        self.address = address
        self.rank = tcp.rank
        self.stamp = tcp.stamp
        self.layout = tcp.layout
        self.confirm = tcp.confirm
        self._tcp = tcp
        self._nixl = nixl
        self._agent = agent
        self._regions = regions

    def read(
        self,
        copies: StridedCopies,
        target: Bytes,
        arrived: Arrived | None = None,
        delta: Delta | None = None,
    ) -> None:
        """As `VersionReader.read`; deltas and casts go over TCP."""
        is_plain = (copies.casts == BYTES_CAST) & (delta is None)
        plain, others = copies.chosen(is_plain), copies.chosen(~is_plain)
        if len(plain):
            with while_there(self.address):
                self._nixl.read(self._agent, self._regions, plain, target)
            if arrived is not None:
                arrived(plain, plain.nbytes)
        if len(others):
            self._tcp.read(others, target, arrived, delta)


def _descriptors(addresses: Ints, sizes: Ints) -> Ints:
    """[row] (address, bytes, device), NIXL's bulk format."""
    return np.stack([addresses, sizes, np.zeros_like(sizes)], axis=1)


def _agent(backend: str) -> Any:
    try:
        # The package is optional and has no types.
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise UnavailableError(
            "RDMA needs the package nixl: pip install 'plexrl[nixl]', or do not set serve_nixl"
        ) from error
    # Its log handlers write to standard output, where the daemon reports that it is ready.
    logging.getLogger("nixl").handlers.clear()
    try:
        name = f"plexrl-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        return api.nixl_agent(name, api.nixl_agent_config(backends=[backend]))
    except Exception as error:
        # NIXL's errors have no documented common base.
        raise UnavailableError(f"NIXL's backend {backend!r} did not start: {error}") from error
