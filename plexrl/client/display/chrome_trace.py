"""The operation log as a Chrome trace, for `chrome://tracing` and https://ui.perfetto.dev.

Each job is a process with a thread for each deployment and phase. Each node group is a process that
shows who held its GPUs and the moves of state on and off them. If runs of a deployment overlap, as
generations do, a phase has several threads. Threads of queues are below the others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, TypedDict

from plexrl.wire.messages.views import LoggedOperationView
from plexrl.wire.operations import MOVES, Span, ended_at, phases

if TYPE_CHECKING:
    from plexrl.client.blocking.cluster import Cluster

PAGE = 1000
QUEUES_FROM = 1_000_000


Arguments = Mapping[str, object]


class TraceEvent(TypedDict):
    """One event of the trace."""

    ph: str
    """`X`: a slice; `M`: a name or a place."""
    name: str
    pid: int
    tid: int
    args: Arguments
    cat: NotRequired[str]
    """Phase; of slices, as are the next fields."""
    ts: NotRequired[float]
    """Start, in microseconds after the first event."""
    dur: NotRequired[float]
    """Duration, in microseconds."""


class ChromeTrace(TypedDict):
    """A trace in the JSON format of Chrome."""

    traceEvents: list[TraceEvent]
    displayTimeUnit: str


@dataclass(frozen=True, slots=True)
class _Run:
    """An operation that ran."""

    row: LoggedOperationView
    started_at: float
    ended_at: float


@dataclass(slots=True)
class _Hold:
    """A deployment held the GPUs of a group; times on the scheduler's clock."""

    deployment: str
    job: str
    since: float
    until: float


def operation_rows(
    cluster: "Cluster", job: str | None = None, *, after: int = 0
) -> Iterator[LoggedOperationView]:
    """All rows of the operation log after index `after` that the key may see."""
    while rows := cluster.operations(job=job, after=after, limit=PAGE):
        yield from rows
        after = rows[-1]["index"]


def chrome_trace(rows: Iterable[LoggedOperationView], job: str | None = None) -> ChromeTrace:
    """The trace of one job, or of all, from the rows that the caller may see.

    The threads of the groups that the job used show all jobs in `rows`.
    """
    rows = list(rows)
    shown = [row for row in rows if job in (None, row["job"])]
    runs = [
        _Run(row, started, ended_at(row))
        for row in rows
        if (started := row["started_at"]) is not None
    ]
    groups = {run.row["group"] or "" for run in runs if job in (None, run.row["job"])}
    sharing = [run for run in runs if (run.row["group"] or "") in groups]
    submitted = (row["submitted_at"] for row in (*shown, *(run.row for run in sharing)))
    canvas = _Canvas(min(submitted, default=0.0))
    for row in sorted(shown, key=lambda row: (row["submitted_at"], row["index"])):
        _draw_phases(canvas, row)
    for group in sorted(groups):
        in_group = [run for run in sharing if (run.row["group"] or "") == group]
        _draw_group(canvas, group, sorted(in_group, key=lambda run: run.started_at))
    return {"traceEvents": canvas.events, "displayTimeUnit": "ms"}


class _Canvas:
    """Events, and the processes and threads of the trace."""

    def __init__(self, begin: float) -> None:
        self.events: list[TraceEvent] = []
        self._begin = begin
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[int, str], int] = {}
        self._lanes: dict[tuple[int, str], list[float]] = {}

    def draw(self, process: str, thread: str, name: str, span: Span, args: Arguments) -> None:
        """Add one slice, on the first thread of that name that is free then."""
        start, end = span
        pid = self._process(process)
        lanes = self._lanes.setdefault((pid, thread), [])
        lane = next((at for at, free in enumerate(lanes) if free <= start), len(lanes))
        lanes[lane : lane + 1] = [end]
        self.events.append(
            {
                "ph": "X",
                "name": name,
                "cat": thread.rpartition(" ")[2],
                "pid": pid,
                "tid": self._thread(pid, thread if lane == 0 else f"{thread} {lane + 1}"),
                "ts": 1e6 * (start - self._begin),
                "dur": 1e6 * (end - start),
                "args": args,
            }
        )

    def _process(self, name: str) -> int:
        if name not in self._processes:
            pid = self._processes[name] = len(self._processes) + 1
            self._describe("process_name", pid, 0, {"name": name})
        return self._processes[name]

    def _thread(self, pid: int, name: str) -> int:
        if (pid, name) not in self._threads:
            tid = self._threads[pid, name] = len(self._threads) + 1
            self._describe("thread_name", pid, tid, {"name": name})
            # A queue has a lane for each operation that waited at the same time. These lanes are
            # below all others, which would otherwise be hard to find.
            place = {"sort_index": tid + (QUEUES_FROM if " queue" in name else 0)}
            self._describe("thread_sort_index", pid, tid, place)
        return self._threads[pid, name]

    def _describe(self, kind: str, pid: int, tid: int, args: Arguments) -> None:
        self.events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})


def _draw_phases(canvas: _Canvas, row: LoggedOperationView) -> None:
    process = f"job {row['job']}"
    deployment = str(row["deployment"]).rpartition("/")[2]
    wanted = ("operation", "state", "group", "tokens", "payload_bytes", "result_bytes", "seq")
    args = {name: row.get(name) for name in wanted}
    for phase, span in phases(row):
        canvas.draw(process, f"{deployment} {phase}", row["kind"], span, args)


def _draw_group(canvas: _Canvas, group: str, runs: Sequence[_Run]) -> None:
    """Draw who held the GPUs: from the load of its state, or first run, to the end of its last."""
    process = f"group {group}"
    held: _Hold | None = None
    for run in runs:
        row = run.row
        if row["kind"] in MOVES:
            name, span = f"{row['kind']} {row['deployment']}", (run.started_at, run.ended_at)
            canvas.draw(process, "switches", name, span, {"job": row["job"]})
        if held is None or held.deployment != row["deployment"] or row["kind"] == "load":
            _draw_hold(canvas, process, held)
            held = _Hold(row["deployment"], row["job"], run.started_at, run.started_at)
        held.until = max(held.until, run.ended_at)
    _draw_hold(canvas, process, held)


def _draw_hold(canvas: _Canvas, process: str, held: _Hold | None) -> None:
    if held is not None:
        span = (held.since, held.until)
        canvas.draw(process, "held by", held.deployment, span, {"job": held.job})
