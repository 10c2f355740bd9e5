"""Deletes what the archive has of one tenant: its events, its runs, and snapshots with its state.

Events of other tenants stay, and so do times and positions. A replay over deleted events is not
possible: the reader says what is missing. Snapshots hold all tenants' states, so those made while
the tenant had any are deleted.

Later events are told by earlier ones and by snapshots, which name the jobs. So these go last: a
deletion that was interrupted finds all the rest when it is repeated.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from plexrl.errors import CorruptStateError
from plexrl.ids import TenantId
from plexrl.scheduler.operations.operations import OWN_MARK
from plexrl.scheduler.service.journal.history.archive import Archive
from plexrl.scheduler.service.journal.history.event_files import (
    EventRows,
    decode_events,
    repack,
)
from plexrl.scheduler.service.journal.history.pieces import (
    EVENTS,
    RUNS,
    STATE,
    ArchivePiece,
    unseal,
)
from plexrl.scheduler.service.journal.history.run_files import (
    RESOLUTIONS_S,
    decode_runs,
    encode_runs,
)

OPERATIONS_MAX: Final = 1_000_000
"""Operations of the tenant that are known at a time; many more than a scheduler keeps."""
LISTS = frozenset({"states", "workers"})
"""Fields of reports of nodes that name several tenants' deployments."""


@dataclass(slots=True)
class Deleted:
    """What was deleted."""

    events: int = 0
    runs: int = 0
    snapshots: int = 0
    damaged: list[str] = field(default_factory=list)
    """Pieces that could not be read, which were deleted as a whole."""


def delete_tenant(archive: Archive, tenant: TenantId) -> Deleted:
    """Delete a tenant's history. Call it again if it fails: what is done stays done.

    Raises:
        StorageError: the archive cannot be written.
    """
    deleted, owned = Deleted(), _Owned(tenant)
    pieces = archive.pieces()
    # Snapshots name the jobs that began before the oldest event.
    states = [
        piece
        for piece in pieces
        if piece.kind == STATE and _has_state(archive, piece, owned, deleted)
    ]
    _delete_events(archive, [each for each in pieces if each.kind == EVENTS], owned, deleted)
    for piece in pieces:
        if piece.kind == RUNS:
            _delete_runs(archive, piece, tenant, deleted)
    archive.delete(states)
    deleted.snapshots = len(states)
    return deleted


class _Owned:
    """Tells a tenant's events, by the ids of its jobs and operations as they appear."""

    def __init__(self, tenant: TenantId) -> None:
        self.tenant = tenant
        self._jobs: set[str] = set()
        self._operations: dict[str, None] = {}
        """The tenant's newest operations, oldest first. One may be reported again after its end."""

    def add_jobs(self, jobs: Iterable[str], operations: Mapping[str, Any]) -> None:
        """Jobs of the tenant, and the operations of all tenants beside them."""
        self._jobs.update(jobs)
        for name, operation in operations.items():
            if self._names(operation["deployment"]):
                self._add_operation(name)

    def rest_of(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """The event without what is the tenant's; None: nothing is left of it."""
        if self._is_own(event):
            return None
        lists = {
            name: each for name, each in event.items() if name in LISTS and isinstance(each, list)
        }
        kept = {name: [each for each in lists[name] if not self._names(each)] for name in lists}
        return {**event, **kept} if kept != lists else event

    def _is_own(self, event: dict[str, Any]) -> bool:
        job, operation = event.get("job"), event.get("operation")
        if "tenant" in event:
            is_own: bool = event["tenant"] == self.tenant
            if isinstance(job, str):
                # The id of an ended job may be another tenant's now.
                (self._jobs.add if is_own else self._jobs.discard)(job)
            return is_own
        if isinstance(job, str) or event.get("deployment"):
            is_own = job in self._jobs or self._names(event.get("deployment"))
            if event["type"] == "OperationSubmitted":
                if is_own:
                    self._add_operation(str(operation))
                else:
                    self._operations.pop(str(operation), None)
            return is_own
        # The scheduler's own operations are named after the deployment, or the sync they serve.
        name = str(operation).partition(OWN_MARK)[0]
        return name in self._operations or self._names(name)

    def _add_operation(self, name: str) -> None:
        self._operations[name] = None
        if len(self._operations) > OPERATIONS_MAX:
            del self._operations[next(iter(self._operations))]

    def _names(self, found: object) -> bool:
        """Whether a deployment, an operation of the scheduler's own, or a report of one is the
        tenant's: the ids begin with the job's."""
        text = found.get("deployment") if isinstance(found, dict) else found
        return isinstance(text, str) and "/" in text and text.partition("/")[0] in self._jobs


def _has_state(archive: Archive, piece: ArchivePiece, owned: _Owned, deleted: Deleted) -> bool:
    """Whether the snapshot has anything of the tenant, whose jobs are noted."""
    content = archive.read(piece)
    if content is None:
        return False
    try:
        state = msgspec.msgpack.decode(unseal(piece.name, content))["state"]
    except CorruptStateError:
        _delete_damaged(archive, piece, deleted)
        return False
    jobs = [name for name, job in state["jobs"].items() if job["tenant"] == owned.tenant]
    owned.add_jobs(jobs, state["operations"])
    return bool(jobs) or owned.tenant in state["tenants"] or owned.tenant in state["forgotten"]


def _delete_events(
    archive: Archive, pieces: Sequence[ArchivePiece], owned: _Owned, deleted: Deleted
) -> None:
    """Delete from the last piece to the first, once all were read."""
    found: list[tuple[ArchivePiece, _Rest]] = []
    for piece in pieces:
        rows = _rows(archive, piece, deleted)
        rest = None if rows is None else _rest_of(rows, owned)
        if rest is not None and rest.events:
            deleted.events += rest.events
            found.append((piece, rest))
    for piece, rest in reversed(found):
        rows = _rows(archive, piece, deleted)
        if rows is not None:
            rest.replace(rows)
            archive.write(piece, repack(piece, rows))


class _Rest:
    """What is left of the events of one piece."""

    def __init__(self, count: int) -> None:
        self.events = 0
        """Those of which something is deleted."""
        self.is_gone = bytearray(count)
        self.parts: dict[int, str] = {}

    def replace(self, rows: EventRows) -> None:
        """Put it in place of the events."""
        for number, is_gone in enumerate(self.is_gone):
            if is_gone:
                rows.bodies[number] = ""
        for number, body in self.parts.items():
            rows.bodies[number] = body


def _rows(archive: Archive, piece: ArchivePiece, deleted: Deleted) -> EventRows | None:
    content = archive.read(piece)
    if content is None:
        return None
    try:
        return decode_events(piece, content)
    except CorruptStateError:
        _delete_damaged(archive, piece, deleted)
        return None


def _rest_of(rows: EventRows, owned: _Owned) -> _Rest:
    found = _Rest(len(rows.bodies))
    for number, body in enumerate(rows.bodies):
        if not body:
            continue
        event = msgspec.json.decode(body)
        rest = owned.rest_of(event)
        if rest is event:
            continue
        found.events += 1
        if rest is None:
            found.is_gone[number] = True
        else:
            found.parts[number] = msgspec.json.encode(rest).decode()
    return found


def _delete_damaged(archive: Archive, piece: ArchivePiece, deleted: Deleted) -> None:
    deleted.damaged.append(piece.name)
    archive.delete([piece])


def _delete_runs(archive: Archive, piece: ArchivePiece, tenant: TenantId, deleted: Deleted) -> None:
    def read(start: int, stop: int) -> bytes | None:
        return archive.read(piece, start, stop)

    try:
        runs = decode_runs(piece.name, read, len(RESOLUTIONS_S) - 1, None)
    except CorruptStateError:
        _delete_damaged(archive, piece, deleted)
        return
    others = [run for run in runs or () if run.job is None or run.job.tenant != tenant]
    if runs is not None and len(others) < len(runs):
        deleted.runs += len(runs) - len(others)
        archive.write(replace(piece, nbytes=0), encode_runs(piece.name, others))
