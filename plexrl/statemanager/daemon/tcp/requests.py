"""Requests of one connection of `tcp.server`.

    open        {source, seq, known}              →  {shards}   of a published version
    open_state  {deployment, seq, rank, digests, kind}  →  {shards: [{manifest, blocks}]}
    read        {shard, stamp, verify, base, delta} + copies  →  the copies' bytes as the payload,
                then their checksum; or, with {delta}, their changes since the base
    read_state  {shard, stamp, verify} + copies   →  likewise, without a delta
    lend        {}                                →  {agent, shards}   addresses for NIXL
    confirm     {}                                →  {}   the versions were held until now
    write_files {deployment, seq, name, …, files} →  {}   files of a checkpoint, in the background
    ask_files   {}                                →  {bytes_done, is_over, tensors, error}

The connection holds published versions until it closes, and the state versions that it opened last.
With `digests` a shard includes the checksums of its blocks, by section, and the manifest includes
the digest over all of them.
"""

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from plexrl.errors import (
    ConnectionLostError,
    InvalidRequestError,
    OverloadedError,
    PermissionDeniedError,
    PlexRLError,
    StateLostError,
)
from plexrl.statemanager.bytes.mapped_files import MappedData, MappedFiles
from plexrl.statemanager.checkpoint.requests import AskFiles, WriteFiles
from plexrl.statemanager.daemon.handlers.caller import OPENED_MAX, Services
from plexrl.statemanager.daemon.handlers.checkpoints import begin_files
from plexrl.statemanager.layout.plan.columns import DTYPES, Bytes
from plexrl.statemanager.layout.strided.copies import BYTES_CAST, StridedCopies, pack
from plexrl.statemanager.layout.versions import VersionKind
from plexrl.statemanager.protocol.delta_policy import DeltaPolicy
from plexrl.statemanager.protocol.tickets import Claims, TicketRole
from plexrl.statemanager.store.versions.lease import VersionLease
from plexrl.statemanager.store.versions.leasing import (
    lease_by_stamp,
    lease_published,
    lease_states,
    offer,
)
from plexrl.statemanager.transfer.delta.stream import encode_delta
from plexrl.statemanager.transfer.transport.copy_stream import (
    ANSWER_BYTES_MAX,
    DIGEST_BYTES,
    Digest,
    decode_copies,
    send_copies,
)
from plexrl.statemanager.transfer.transport.nixl import NixlLender
from plexrl.wire.framing import encode_head, send_frame
from plexrl.wire.links.dial import BlockingSocket

if TYPE_CHECKING:
    from plexrl.statemanager.checkpoint.write.files_job import FilesJob

REQUEST_BYTES_MAX = 16 << 20
READ_BYTES_MAX = 64 << 20
"""Limit of one read from NVMe, which passes through memory."""
BASES_MAX = 64
"""Maximum bases of one connection: a pull uses one for each shard."""


class _Open(msgspec.Struct, tag="open"):
    source: str
    seq: int
    known: tuple[str, ...] = ()


class _OpenState(msgspec.Struct, tag="open_state"):
    deployment: str
    seq: int
    rank: int | None = None
    digests: bool = False
    kind: VersionKind = VersionKind.STATE


class _Read(msgspec.Struct, tag="read"):
    shard: int
    stamp: str
    verify: bool = False
    base: str | None = None
    delta: DeltaPolicy | None = None


class _ReadState(msgspec.Struct, tag="read_state"):
    shard: int
    stamp: str
    verify: bool = False


class _Confirm(msgspec.Struct, tag="confirm"):
    pass


class _Lend(msgspec.Struct, tag="lend"):
    pass


class _BegunError(Exception):
    """A failure after the payload has begun, when no error can be sent any more."""

    def __init__(self, cause: PlexRLError) -> None:
        super().__init__()
        self.cause = cause


class Requests:
    """Answers one connection's requests, one after the other."""

    def __init__(
        self, services: Services, claims: Claims, leases: ExitStack, lender: NixlLender | None
    ) -> None:
        """`leases` closes with the connection."""
        self._services = services
        self._store = services.store
        self._claims = claims
        self._opened = 0
        self._lender = lender
        self._leases = leases
        self._state_leases = leases.enter_context(ExitStack())
        self._published: list[VersionLease] = []
        self._states: list[VersionLease] = []
        self._lent: list[MappedData] = []
        self._bases: dict[str, VersionLease | None] = {}
        self._files: FilesJob | None = None

    def answer(
        self, connection: BlockingSocket, header: dict[str, Any], payload: bytearray
    ) -> None:
        """Answer one request.

        Raises:
            PlexRLError: the connection cannot be used any more.
        """
        try:
            request = msgspec.convert(
                header,
                _Open | _Read | _Lend | _Confirm | _OpenState | _ReadState | WriteFiles | AskFiles,
            )
            result: dict[str, Any] = {}
            match request:
                case _Read() | _ReadState():
                    self._read(connection, request, payload)
                    return
                case _Open():
                    result = self._open(request)
                case _OpenState():
                    result = self._open_state(request)
                case _Lend():
                    result = self._lend()
                case WriteFiles():
                    self._write_files(request)
                case AskFiles():
                    result = self._ask_files(request)
                case _Confirm():
                    pass
            send_frame(connection, {"result": result})
        except msgspec.ValidationError as error:
            refused = InvalidRequestError(f"malformed request: {error}")
            send_frame(connection, {"error": refused.to_wire()})
        except _BegunError as begun:
            raise begun.cause from begun
        except (ConnectionLostError, OSError):
            raise
        except PlexRLError as error:
            send_frame(connection, {"error": error.to_wire()})

    def _open(self, request: _Open) -> dict[str, Any]:
        self._claims.check_may_pull(request.source)
        if self._opened >= OPENED_MAX:
            raise OverloadedError(
                f"{self._opened} versions are open on this connection: close it and open another",
                retry_after_s=0.0,
            )
        self._opened += 1
        self._published += lease_published(self._store, self._leases, request)
        offers = [offer(lease, request.known) for lease in self._published]
        return {"shards": msgspec.to_builtins(offers)}

    def _open_state(self, request: _OpenState) -> dict[str, Any]:
        claims = self._claims
        if request.kind == VersionKind.PUBLISHED:
            claims.check_may_pull(request.deployment)
        elif claims.role != TicketRole.AGENT and claims.deployment != request.deployment:
            raise PermissionDeniedError(
                f"{claims.holder} may read only the state of its own deployment, not of "
                f"{request.deployment!r}"
            )
        self._states = []
        self._state_leases.close()
        self._states = lease_states(
            *(self._store, self._state_leases, request.deployment, request.seq),
            rank=request.rank,
            kind=request.kind,
        )
        offers = []
        for lease in self._states:
            manifest, blocks = lease.manifest, list[bytes]()
            if request.digests:
                blocks = lease.block_digests()
                manifest = replace(manifest, digest=lease.digest())
            offers.append({"manifest": manifest, "blocks": blocks})
        return {"shards": msgspec.to_builtins(offers)}

    def _lend(self) -> dict[str, Any]:
        if self._lender is None:
            raise InvalidRequestError(
                "this StateManager does not serve RDMA: set serve_nixl there, or use tcp://"
            )
        # A mapping of its own, because memory is registered once for each connection.
        shards = [
            MappedData.of(lease.regions, MappedFiles().of(lease.regions))
            for lease in self._published
        ]
        self._lent += shards
        lent, registered = self._lender.lend(shards)
        self._leases.callback(self._lender.take_back, registered)
        return {"agent": lent.agent, "shards": lent.shards}

    def _write_files(self, request: WriteFiles) -> None:
        if self._claims.role != TicketRole.AGENT:
            raise PermissionDeniedError(
                f"{self._claims.holder} may not write files of a checkpoint: another node's "
                "StateManager has them written"
            )
        if self._files is not None:
            self._files.end()
        self._files = begin_files(self._services, request)
        self._leases.callback(self._files.end)

    def _ask_files(self, request: AskFiles) -> dict[str, Any]:
        if self._files is None:
            raise InvalidRequestError("nothing is written: send write_files first")
        if request.stop:
            self._files.end()
        report: dict[str, Any] = msgspec.to_builtins(self._files.report())
        return report

    def _read(
        self, connection: BlockingSocket, request: _Read | _ReadState, payload: bytearray
    ) -> None:
        lease = self._held(request)
        copies = _checked_copies(payload, lease.manifest.nbytes)
        if isinstance(request, _Read) and request.base is not None and request.delta is not None:
            base = self._base(lease, request.base)
            if base is not None and base.mapped is not None and lease.mapped is not None:
                parts = encode_delta(
                    base.mapped, lease.mapped, copies, request.delta, verify=request.verify
                )
                if parts is not None:
                    send_frame(connection, {"result": {"delta": True}}, b"".join(parts))
                    return
        head = encode_head({"result": {}}, copies.nbytes + (DIGEST_BYTES if request.verify else 0))
        digest = Digest(request.verify)
        if lease.mapped is None:
            # Data on NVMe may be damaged, which can be reported only before sending begins.
            found = _from_nvme(lease, copies)
            digest.add(found)
            connection.sendall(head)
            connection.sendall(found.data)
            connection.sendall(digest.value())
            return
        connection.sendall(head)
        try:
            send_copies(connection, lease.regions, lease.mapped, copies, digest)
        except PlexRLError as error:
            raise _BegunError(error) from error

    def _held(self, request: _Read | _ReadState) -> VersionLease:
        held = self._published if isinstance(request, _Read) else self._states
        if not 0 <= request.shard < len(held):
            raise InvalidRequestError(f"shard {request.shard} is not open: open the version first")
        lease = held[request.shard]
        if lease.stamp != request.stamp:
            raise StateLostError(
                f"{lease.manifest.description} no longer has the stamp {request.stamp!r}: "
                "open it again"
            )
        return lease

    def _base(self, lease: VersionLease, stamp: str) -> VersionLease | None:
        """An earlier version of the shard, if it is kept and has the same layout."""
        if stamp not in self._bases:
            if len(self._bases) >= BASES_MAX + len(self._published):
                raise InvalidRequestError("the connection uses too many bases: pull again")
            earlier = lease_by_stamp(self._store, self._leases, lease.manifest.shard, stamp)
            alike = earlier is not None and earlier.layout.digest == lease.layout.digest
            self._bases[stamp] = earlier if alike else None
        return self._bases[stamp]


def _from_nvme(lease: VersionLease, copies: StridedCopies) -> Bytes:
    if copies.nbytes > READ_BYTES_MAX:
        raise InvalidRequestError(
            f"a request reads {copies.nbytes} bytes from NVMe; the limit is {READ_BYTES_MAX}: "
            "read less at once"
        )
    found: Bytes = np.empty(copies.nbytes, dtype=np.uint8)
    lease.read(pack(copies), found)
    return found


def _checked_copies(payload: bytearray, nbytes: int) -> StridedCopies:
    """Decode received copies and check them as `_check_within` does."""
    try:
        copies = decode_copies(payload)
    except ValueError as error:
        raise InvalidRequestError(f"malformed copies: {error}") from error
    _check_within(copies, nbytes)
    return copies


def _check_within(copies: StridedCopies, nbytes: int) -> None:
    """Check that copies lie within `nbytes` bytes and fit one answer.

    Raises:
        InvalidRequestError: they do not.
    """
    casts = (copies.casts == BYTES_CAST) | ((copies.casts >= 0) & (copies.casts < len(DTYPES) ** 2))
    limits = np.int64(1) << np.int64(48)
    small = (
        (copies.items >= 1)
        & (copies.counts >= 1)
        & (copies.src_strides >= 0)
        & (copies.src_offsets >= 0)
    )
    small &= (copies.items <= nbytes) & (
        copies.counts <= limits // np.maximum(1, copies.src_strides)
    )
    if not (casts & small).all():
        raise InvalidRequestError("copies need positive sizes and known dtypes")
    # In floating point, so that no product can overflow to a small number.
    total = (copies.row_bytes().astype(np.float64) * copies.counts).sum()
    if (copies.src_offsets > nbytes).any() or total > ANSWER_BYTES_MAX:
        raise InvalidRequestError(
            f"copies must begin within the {nbytes} bytes of the data, and together have at most "
            f"{ANSWER_BYTES_MAX} bytes"
        )
    ends = (
        copies.src_offsets + (copies.counts - 1) * copies.src_strides + copies.row_bytes_at_source()
    )
    if not (ends <= nbytes).all():
        raise InvalidRequestError(f"copies end beyond the {nbytes} bytes of the data")
