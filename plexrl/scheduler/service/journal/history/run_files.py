"""Runs as bytes: the file of a `runs` piece, in three resolutions.

    head | jobs, groups and tenants | spans of ≥ 300 s | of ≥ 10 s | every run

A window of a week reads the first spans only. In the coarser resolutions runs of one job that are
less than so many seconds apart are one, and shorter ones of several jobs too, as on the screen.
Each part has a checksum of its own, so it can be read alone.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from plexrl.errors import CorruptStateError
from plexrl.ids import GroupId, JobId, TenantId
from plexrl.scheduler.queries.overview.runs import GroupRun, RunGroup, RunJob
from plexrl.scheduler.queries.overview.spans import Run, merge
from plexrl.scheduler.service.journal.history.pieces import seal, unseal
from plexrl.wire.messages.overview_views import SEVERAL_JOBS, Span

RESOLUTIONS_S: Final = (300.0, 10.0, 0.0)
"""In the order of the file."""
_HEAD: Final = struct.Struct("<4s4I")
_MAGIC: Final = b"PXR1"
HEAD_BYTES: Final = _HEAD.size
_OF_ALL: Final = -1
"""In place of the tenant: the span is of several tenants' runs."""

Read = Callable[[int, int], bytes | None]
"""The bytes from start to stop of the file; None: it is gone."""


class _Names(msgspec.Struct, array_like=True):
    jobs: list[tuple[JobId, str, TenantId]]
    groups: list[tuple[GroupId, int, str]]
    tenants: list[TenantId]


class _Rows(msgspec.Struct, array_like=True):
    """Columns of spans; times in milliseconds."""

    groups: list[int] = msgspec.field(default_factory=list)
    begins: list[int] = msgspec.field(default_factory=list)
    """After the begin of the row before."""
    lengths: list[int] = msgspec.field(default_factory=list)
    jobs: list[int] = msgspec.field(default_factory=list)
    kinds: list[int] = msgspec.field(default_factory=list)
    owners: list[int] = msgspec.field(default_factory=list)
    """The tenant whose runs alone the span is of; `_OF_ALL`; or below it, for number n
    `_OF_ALL - 1 - n`: a tenant's part of spans that are also there as `_OF_ALL`."""

    def add(self, last_ms: int, group: int, span: Span, owner: int) -> int:
        """Add a row; returns its begin."""
        begin, end, job, kind = span
        begin_ms = round(begin * 1000)
        self.groups.append(group)
        self.begins.append(begin_ms - last_ms)
        self.lengths.append(max(1, round(end * 1000) - begin_ms))
        self.jobs.append(job)
        self.kinds.append(kind)
        self.owners.append(owner)
        return begin_ms


def encode_runs(name: str, runs: Iterable[GroupRun]) -> bytes:
    """The content of the piece `name`."""
    table = _Table()
    for run in runs:
        table.add(run)
    bodies = [msgspec.msgpack.encode(table.names())]
    bodies += [msgspec.msgpack.encode(table.rows(least_s)) for least_s in RESOLUTIONS_S]
    parts = [seal(f"{name}:{at}", body) for at, body in enumerate(bodies)]
    return b"".join((_HEAD.pack(_MAGIC, *map(len, parts)), *parts))


def decode_runs(
    name: str, read: Read, resolution: int, tenant: TenantId | None
) -> list[GroupRun] | None:
    """The runs of the piece `name` in the resolution of that index: all, or those of a tenant.
    None: it is gone.

    Raises:
        CorruptStateError: the file is damaged.
    """
    head = read(0, HEAD_BYTES)
    if head is None:
        return None
    if len(head) != HEAD_BYTES or not head.startswith(_MAGIC):
        raise CorruptStateError(f"the file {name} of the archive is damaged: delete it")
    _, *sizes = _HEAD.unpack(head)
    bodies = []
    for at in (0, 1 + resolution):
        start = HEAD_BYTES + sum(sizes[:at])
        part = read(start, start + sizes[at])
        if part is None:
            return None
        bodies.append(unseal(f"{name}:{at}", part))
    names = msgspec.msgpack.decode(bodies[0], type=_Names)
    return _runs(names, msgspec.msgpack.decode(bodies[1], type=_Rows), tenant)


def resolution_of(pixel_s: float) -> int:
    """Index of the coarsest resolution that is enough for pixels of so many seconds."""
    return next(at for at, least_s in enumerate(RESOLUTIONS_S) if least_s <= pixel_s)


class _Table:
    """The runs of one file, by group and tenant."""

    def __init__(self) -> None:
        self._jobs: dict[RunJob | None, int] = {}
        self._tenants: dict[TenantId, int] = {}
        self._groups: dict[GroupId, RunGroup] = {}
        self._runs: dict[GroupId, dict[TenantId, list[Run]]] = {}

    def add(self, run: GroupRun) -> None:
        assert run.job is not None, "a run of the history has one job"
        self._groups[run.group.group] = run.group
        by_tenant = self._runs.setdefault(run.group.group, {})
        by_tenant.setdefault(run.job.tenant, []).append((run.begin, run.end, run.job, run.kind))
        self._number(run.job)
        self._tenants.setdefault(run.job.tenant, len(self._tenants))

    def names(self) -> _Names:
        jobs = [(job.job, job.name, job.tenant) for job in self._jobs if job is not None]
        groups = [(each.group, each.gpus, each.node_type) for each in self._groups.values()]
        return _Names(jobs, groups, list(self._tenants))

    def rows(self, least_s: float) -> _Rows:
        rows, last_ms = _Rows(), 0
        for index, by_tenant in enumerate(self._runs.values()):
            numbered = [(self._tenants[name], runs) for name, runs in by_tenant.items()]
            lists = [(number, runs) for number, runs in numbered]
            if least_s and len(numbered) > 1:
                together = [run for _, runs in numbered for run in runs]
                lists = [(_OF_ALL - 1 - number, runs) for number, runs in numbered]
                lists.append((_OF_ALL, together))
            for owner, runs in lists:
                for span in self._spans(runs, least_s):
                    last_ms = rows.add(last_ms, index, span, owner)
        return rows

    def _spans(self, runs: Sequence[Run], least_s: float) -> list[Span]:
        in_order = sorted(runs, key=lambda run: run[:2])
        spans: list[Span] = []
        merge(in_order, least_s, self._number, spans)
        return spans

    def _number(self, job: RunJob | None) -> int:
        return self._jobs.setdefault(job, len(self._jobs))


def _runs(names: _Names, rows: _Rows, tenant: TenantId | None) -> list[GroupRun]:
    jobs = [RunJob(*each) for each in names.jobs]
    groups = [RunGroup(*each) for each in names.groups]
    number = names.tenants.index(tenant) if tenant in names.tenants else None
    if tenant is not None and number is None:
        return []
    found: list[GroupRun] = []
    begin_ms = 0
    columns = (rows.groups, rows.begins, rows.lengths, rows.jobs, rows.kinds, rows.owners)
    for group, after_ms, length_ms, job, kind, owner in zip(*columns, strict=True):
        begin_ms += after_ms
        if owner < _OF_ALL if number is None else owner not in (number, _OF_ALL - 1 - number):
            continue
        known = None if job == SEVERAL_JOBS else jobs[job]
        end = (begin_ms + length_ms) / 1000
        found.append(GroupRun(begin_ms / 1000, end, known, kind, groups[group]))
    return found
