"""The timeline of a session as a trace of Perfetto (ui.perfetto.dev). Pure.

The first track says for each moment of the session what it was spent on: what computes hides what
waits, and `client` is the time in which the client had asked for nothing. Below it, each deployment
has its operations, with their phases.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plexrl.router.tinker.messages.codec import message_classes
from plexrl.wire.messages.views import LoggedOperationView
from plexrl.wire.operations import ended_at, phases

PHASES = ("compute", "transfer", "move", "switch", "queue", "unfinished", "control", "client")
"""What a moment is spent on: the first of these that any operation is in. `control` is the control
plane's own time in an operation, and `unfinished` an operation that has not ended."""
BEGIN, END = 1, 2
"""Kinds of events."""
NS = 1_000_000_000

MESSAGES = {
    "Annotation": "text:6:string name:10:string",
    "Event": "annotations:4:Annotation* kind:9:int32 track:11:uint64 name:23:string",
    "Process": "pid:1:int32 name:6:string",
    "Track": "uuid:1:uint64 name:2:string process:3:Process parent:5:uint64",
    "Packet": "timestamp:8:uint64 sequence:10:uint32 event:11:Event track:60:Track",
    "Trace": "packets:1:Packet*",
}
"""The parts of Perfetto's `trace.proto` that are used, as `codec.MESSAGES`."""

_CLASSES = message_classes("plexrl.perfetto", MESSAGES)
Slice = tuple[float, float, str]
"""Start, end, and what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What is known of a session. Times are seconds since the epoch."""

    session: str
    began_at: float
    ended_at: float
    """Its end, or now."""
    rows: Sequence[LoggedOperationView]
    """Its operations that have ended."""
    unfinished: Mapping[str, float] = field(default_factory=dict)
    """When each of those that have not ended was asked for."""


def encode_trace(timeline: Timeline) -> bytes:
    """The trace, as the bytes of a `.pftrace` file."""
    trace = _Trace(timeline.session)
    track = trace.add_track("time")
    for slice in spent(timeline):
        trace.add(track, [slice], {})
    rows = sorted(timeline.rows, key=lambda row: (row["submitted_at"], row["operation"]))
    lanes: dict[tuple[str, int], tuple[int, float]] = {}
    for row in rows:
        lane = 0
        while lanes.get((row["deployment"], lane), (0, 0.0))[1] > row["submitted_at"]:
            lane += 1
        key = (str(row["deployment"]), lane)
        number = lanes[key][0] if key in lanes else trace.add_track(_lane_name(*key))
        lanes[key] = (number, ended_at(row))
        whole = (row["submitted_at"], ended_at(row), row["kind"])
        parts = [(start, end, name) for name, (start, end) in phases(row)]
        trace.add(number, [whole, *parts], _annotations(row))
    return trace.encode()


def spent(timeline: Timeline) -> list[Slice]:
    """What each moment from the session's beginning to its end was spent on, in order; the slices
    are next to each other."""
    changes: list[tuple[float, int, str]] = []
    for start, end, name in _activities(timeline):
        start, end = max(start, timeline.began_at), min(end, timeline.ended_at)
        if end > start:
            changes += [(start, 1, name), (end, -1, name)]
    found: list[Slice] = []
    running = dict.fromkeys(PHASES, 0)
    running["client"] = 1
    at = timeline.began_at
    for time, change, name in [*sorted(changes), (timeline.ended_at, 0, "client")]:
        now = next(each for each in PHASES if running[each])
        if found and found[-1][2] == now:
            found[-1] = (found[-1][0], time, now)
        elif time > at:
            found.append((at, time, now))
        at, running[name] = time, running[name] + change
    return found


def _activities(timeline: Timeline) -> Iterator[Slice]:
    for row in timeline.rows:
        yield (row["submitted_at"], ended_at(row), "control")
        for name, (start, end) in phases(row):
            yield (start, end, name)
    for asked_at in timeline.unfinished.values():
        yield (asked_at, timeline.ended_at, "unfinished")


def _lane_name(deployment: str, lane: int) -> str:
    name = deployment.partition("/")[2]
    return f"{name} ({lane + 1})" if lane else name


def _annotations(row: LoggedOperationView) -> dict[str, str]:
    found = {"operation": str(row["operation"]), "state": row["state"]}
    if row["error"] is not None:
        found["error"] = str(row["error"]["code"])
    return found


class _Trace:
    """A trace that is being written: one process, whose tracks have slices."""

    def __init__(self, session: str) -> None:
        self._trace: Any = _CLASSES["Trace"]()
        self._tracks = 0
        self._events: list[tuple[int, int, int, Slice, Mapping[str, str]]] = []
        self.add_track("")
        process = self._trace.packets[0].track.process
        process.pid, process.name = 1, session

    def add_track(self, name: str) -> int:
        """A new track, and its number."""
        self._tracks += 1
        packet = self._packet()
        packet.track.uuid, packet.track.name = self._tracks, name
        if self._tracks > 1:
            packet.track.parent = 1
        return self._tracks

    def add(self, track: int, slices: Iterable[Slice], annotations: Mapping[str, str]) -> None:
        """Slices of a track, each within the one before it that has not ended."""
        open_slices: list[Slice] = []
        for slice in slices:
            while open_slices and open_slices[-1][1] <= slice[0]:
                self._event(track, END, open_slices.pop()[1])
            self._event(track, BEGIN, slice[0], slice[2], annotations)
            annotations = {}
            open_slices.append(slice)
        while open_slices:
            self._event(track, END, open_slices.pop()[1])

    def encode(self) -> bytes:
        """The file's bytes."""
        found: bytes = self._trace.SerializeToString()
        return found

    def _packet(self) -> Any:
        packet = self._trace.packets.add()
        packet.sequence = 1
        return packet

    def _event(
        self,
        track: int,
        kind: int,
        at: float,
        name: str = "",
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        packet = self._packet()
        packet.timestamp = round(NS * at)
        packet.event.kind, packet.event.track, packet.event.name = kind, track, name
        for label, text in (annotations or {}).items():
            packet.event.annotations.add(name=label, text=text)
