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
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from plexrl.errors import ConnectionLostError, UnavailableError
from plexrl.statemanager.layout.plan.columns import Ints
from plexrl.statemanager.layout.strided_copies import BYTES_CAST, StridedCopies, cut_at, single_rows
from plexrl.statemanager.transfer.copy.strided_copy import Bytes
from plexrl.statemanager.transfer.delta.delta import DeltaPolicy
from plexrl.statemanager.transfer.transport.mapped_files import MappedData
from plexrl.statemanager.transfer.transport.source import Arrived, Shard, ShardCopies
from plexrl.statemanager.transfer.transport.tcp.client import Tcp, TcpSource

BYTES_PER_S = 20e9
REQUEST_S = 5e-6
DESCRIPTORS_MAX = 16 << 10
"""Maximum rows of one transfer."""
POLL_S = 100e-6


class Lent(msgspec.Struct, frozen=True):
    """Addresses of a source's version, for a reader."""

    agent: bytes
    """The metadata of the source's NIXL agent."""
    shards: tuple[tuple[tuple[int, int, int], ...], ...]
    """[shard][region] (address, bytes, offset in the data), by offset."""


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
                [(address, nbytes, 0, "") for address, nbytes, _ in each], "DRAM"
            )
            for each in regions
            if each
        ]
        return Lent(agent=self._agent.get_agent_metadata(), shards=tuple(regions)), registered

    def take_back(self, registered: Sequence[Any]) -> None:
        """End the registrations."""
        for each in registered:
            self._agent.deregister_memory(each)


class Nixl:
    """Opens sources by the `host:port` of their TCP server."""

    def __init__(self, tcp: Tcp, timeout_s: float, backend: str = "UCX") -> None:
        """`timeout_s` bounds a transfer. Raises as `NixlLender`."""
        self._tcp = tcp
        self._timeout_s = timeout_s
        self._agent = _agent(backend)
        self._target: tuple[int, int] | None = None
        self._registered: Any = None

    def open(self, address: str, deployment: str, seq: int, known: Collection[str]) -> "NixlSource":
        """As `Transport.open`."""
        tcp = self._tcp.open(address, deployment, seq, known)
        try:
            lent = msgspec.convert(tcp.ask({"type": "lend"}), Lent)
            return NixlSource(f"nixl://{address}", tcp, self, lent)
        except BaseException:
            tcp.close()
            raise

    def read(self, lent: Lent, parts: Sequence[tuple[int, StridedCopies]], target: Bytes) -> None:
        """Perform copies that cast nothing.

        Raises:
            ConnectionLostError: the transfer failed or took too long.
        """
        self._register(target)
        peer = self._agent.add_remote_agent(lent.agent)
        base = target.ctypes.data
        for shard, copies in parts:
            regions = np.array(lent.shards[shard], dtype=np.int64).reshape(-1, 3)
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


class NixlSource:
    """An `OpenSource` whose memory is read by RDMA."""

    def __init__(self, address: str, tcp: TcpSource, nixl: Nixl, lent: Lent) -> None:
        self.address = address
        self.bytes_per_s = BYTES_PER_S
        self.request_s = REQUEST_S
        # The source does not see a read, so only `confirm` proves that the bytes were the version.
        self.arrives_whole = False
        self._tcp = tcp
        self._nixl = nixl
        self._lent = lent

    @property
    def shards(self) -> tuple[Shard, ...]:
        """As `OpenSource.shards`."""
        return self._tcp.shards

    def read(
        self,
        parts: tuple[ShardCopies, ...],
        target: Bytes,
        arrived: Arrived,
        delta: DeltaPolicy | None = None,
    ) -> None:
        """As `OpenSource.read`; deltas and casts go over TCP."""
        whole: list[tuple[int, StridedCopies]] = []
        others: list[ShardCopies] = []
        for part in parts:
            if delta is not None and part.base is not None:
                others.append(part)
                continue
            is_plain = part.copies.casts == BYTES_CAST
            whole.append((part.shard, part.copies.chosen(is_plain)))
            if not is_plain.all():
                others.append(replace(part, copies=part.copies.chosen(~is_plain)))
        self._nixl.read(self._lent, whole, target)
        for _, copies in whole:
            arrived(copies, copies.nbytes)
        if others:
            self._tcp.read(tuple(others), target, arrived, delta)

    def confirm(self) -> None:
        """As `OpenSource.confirm`."""
        self._tcp.confirm()

    def close(self) -> None:
        """As `OpenSource.close`."""
        self._tcp.close()


def _descriptors(addresses: Ints, sizes: Ints) -> Ints:
    """[row] (address, bytes, device), NIXL's bulk format."""
    return np.stack([addresses, sizes, np.zeros_like(sizes)], axis=1)


def _agent(backend: str) -> Any:
    try:
        # The package is optional and has no types.
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise UnavailableError(
            "RDMA needs the package nixl: pip install 'plexrl[nixl]', or use tcp:// addresses"
        ) from error
    # Its log handlers write to standard output, where the daemon reports that it is ready.
    logging.getLogger("nixl").handlers.clear()
    try:
        name = f"plexrl-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        return api.nixl_agent(name, api.nixl_agent_config(backends=[backend]))
    except Exception as error:
        # NIXL's errors have no documented common base.
        raise UnavailableError(f"NIXL's backend {backend!r} did not start: {error}") from error
