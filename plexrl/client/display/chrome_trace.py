"""The operation log as a Chrome trace, for `chrome://tracing` and https://ui.perfetto.dev.

Each job is a process with a thread for each deployment and phase. Each node group is a process that
shows who held its GPUs and the moves of state on and off them. If runs of a deployment overlap, as
generations do, a phase has several threads. Threads of queues are below the others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plexrl.wire.messages.views import LoggedOperationView
from plexrl.wire.operation_phases import MOVES, Span, phases

if TYPE_CHECKING:
    from plexrl.client.blocking.cluster import Cluster

Plain = dict[str, Any]
Row = Mapping[str, Any]

PAGE = 1000
QUEUES_FROM = 1_000_000


def operation_rows(
    cluster: "Cluster", job: str | None = None, *, after: int = 0
) -> Iterator[LoggedOperationView]:
    """All rows of the operation log after index `after` that the key may see."""
    while rows := cluster.operations(job=job, after=after, limit=PAGE):
        yield from rows
        after = rows[-1]["index"]


def chrome_trace(rows: Iterable[Row], job: str | None = None) -> Plain:
    """The trace of one job, or of all, from the rows that the caller may see.

    The threads of the groups that the job used show all jobs in `rows`.
    """
    rows = list(rows)
    shown = [row for row in rows if job in (None, row["job"])]
    groups = {row["group"] for row in shown if row["started_at"] is not None}
    sharing = [row for row in rows if row["started_at"] is not None and row["group"] in groups]
    begin = min((row["submitted_at"] for row in (*shown, *sharing)), default=0.0)
    canvas = _Canvas(begin)
    for row in sorted(shown, key=lambda row: (row["submitted_at"], row["index"])):
        _draw_phases(canvas, row)
    for group in sorted(groups):
        in_group = [row for row in sharing if row["group"] == group]
        _draw_group(canvas, group, sorted(in_group, key=lambda row: row["started_at"]))
    return {"traceEvents": canvas.events, "displayTimeUnit": "ms"}


class _Canvas:
    """Events, and the processes and threads of the trace."""

    def __init__(self, begin: float) -> None:
        self.events: list[Plain] = []
        self._begin = begin
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[int, str], int] = {}
        self._lanes: dict[tuple[int, str], list[float]] = {}

    def draw(self, process: str, thread: str, name: str, span: Span, args: Plain) -> None:
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
            self._name("process_name", name, pid, 0)
        return self._processes[name]

    def _thread(self, pid: int, name: str) -> int:
        if (pid, name) not in self._threads:
            tid = self._threads[pid, name] = len(self._threads) + 1
            self._name("thread_name", name, pid, tid)
            # A queue has a lane for each operation that waited at the same time. These lanes are
            # below all others, which would otherwise be hard to find.
            place = {"sort_index": tid + (QUEUES_FROM if " queue" in name else 0)}
            order = {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": place}
            self.events.append(order)
        return self._threads[pid, name]

    def _name(self, kind: str, name: str, pid: int, tid: int) -> None:
        named = {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
        self.events.append(named)


def _draw_phases(canvas: _Canvas, row: Row) -> None:
    process = f"job {row['job']}"
    deployment = str(row["deployment"]).rpartition("/")[2]
    wanted = ("operation", "state", "group", "tokens", "payload_bytes", "result_bytes", "seq")
    args = {name: row[name] for name in wanted}
    for phase, span in phases(row):
        canvas.draw(process, f"{deployment} {phase}", row["kind"], span, args)


def _draw_group(canvas: _Canvas, group: str, rows: Sequence[Row]) -> None:
    """Draw who held the GPUs: from the load of its state, or first run, to the end of its last."""
    process = f"group {group}"
    held: Plain = {}
    for row in rows:
        if row["kind"] in MOVES:
            name = f"{row['kind']} {row['deployment']}"
            span = (row["started_at"], row["finished_at"])
            canvas.draw(process, "switches", name, span, {"job": row["job"]})
        if held.get("deployment") != row["deployment"] or row["kind"] == "load":
            _draw_hold(canvas, process, held)
            held = {"deployment": row["deployment"], "job": row["job"], "from": row["started_at"]}
            held["until"] = row["started_at"]
        held["until"] = max(held["until"], row["finished_at"])
    _draw_hold(canvas, process, held)


def _draw_hold(canvas: _Canvas, process: str, held: Plain) -> None:
    if held:
        span = (held["from"], held["until"])
        canvas.draw(process, "held by", held["deployment"], span, {"job": held["job"]})
