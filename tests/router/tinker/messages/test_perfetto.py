"""Timelines of sessions, read with Perfetto's own schema."""

from collections import defaultdict
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.router.tinker.messages.perfetto import NS, Timeline, encode_trace, spent
from plexrl.wire.messages.views import LoggedOperationView


def row(name: str, submitted_at: float, **times: Any) -> LoggedOperationView:
    """An operation that waits 1 s, the half of it for a switch, and computes for 2 of its 2.5 s."""
    given: dict[str, Any] = {
        "operation": f"s:{name}",
        "deployment": "s/train-0",
        "kind": "optim_step",
        "state": "succeeded",
        "submitted_at": submitted_at,
        "started_at": submitted_at + 1.0,
        "finished_at": submitted_at + 3.5,
        "switch_s": 0.5,
        "transfer_s": 0.25,
        "compute_s": 2.0,
        "error": None,
    }
    return cast("LoggedOperationView", {**given, **times})


def timeline(*rows: LoggedOperationView, **fields: Any) -> Timeline:
    return Timeline(**{"session": "s", "began_at": 10.0, "ended_at": 20.0, "rows": rows, **fields})


def test_each_moment_is_spent_on_what_comes_first() -> None:
    found = spent(timeline(row("1", 12.0)))
    assert [(end - start, name) for start, end, name in found] == [
        (2.0, "client"),
        (0.5, "queue"),
        (0.5, "switch"),
        (0.25, "transfer"),
        (2.0, "compute"),
        (0.25, "control"),
        (4.5, "client"),
    ]


def test_what_computes_hides_what_waits() -> None:
    waiting = row("2", 13.0, started_at=None, finished_at=19.0)
    names = [name for _, _, name in spent(timeline(row("1", 12.0), waiting))]
    assert names == ["client", "queue", "switch", "transfer", "compute", "queue", "client"]
    asked = {"s:2": 15.0}
    assert spent(timeline(unfinished=asked))[-1] == (15.0, 20.0, "unfinished")


@given(starts=st.lists(st.floats(5.0, 25.0), max_size=8))
def test_the_whole_session_is_divided_without_gaps(starts: list[float]) -> None:
    found = spent(timeline(*(row(f"{at}", start) for at, start in enumerate(starts))))
    assert (found[0][0], found[-1][1]) == (10.0, 20.0)
    for (_, end, name), (start, _, other) in pairwise(found):
        assert (end, name != other) == (start, True)


def test_perfetto_reads_the_file() -> None:
    schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    overlapping = [row("1", 12.0), row("2", 12.5), row("3", 16.0, error={"code": "node_lost"})]
    read = schema.Trace.FromString(encode_trace(timeline(*overlapping)))
    names = {p.track_descriptor.uuid: p.track_descriptor.name for p in read.packet}
    assert read.packet[0].track_descriptor.process.process_name == "s"
    assert {"time", "train-0", "train-0 (2)"} <= set(names.values())
    slices = slices_of(schema, read)
    assert sum(end - start for start, end, _ in slices["time"]) == 10 * NS
    inner = ["queue", "switch", "transfer", "compute"]
    lanes = {lane: [name for *_, name in slices[lane]] for lane in ("train-0", "train-0 (2)")}
    assert lanes == {"train-0": ["optim_step", *inner] * 2, "train-0 (2)": ["optim_step", *inner]}
    notes = [note for p in read.packet for note in p.track_event.debug_annotations]
    assert ("error", "node_lost") in {(note.name, note.string_value) for note in notes}


def slices_of(schema: Any, read: Any) -> dict[str, list[tuple[int, int, str]]]:
    """Start, end and name of the slices of each track, in the order of their starts; each ends
    within the one that it is in."""
    names = {p.track_descriptor.uuid: p.track_descriptor.name for p in read.packet}
    found: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    open_slices: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for packet in read.packet:
        event = packet.track_event
        if event.type == schema.TrackEvent.TYPE_SLICE_BEGIN:
            open_slices[event.track_uuid].append((packet.timestamp, event.name))
        elif event.type == schema.TrackEvent.TYPE_SLICE_END:
            start, name = open_slices[event.track_uuid].pop()
            assert packet.timestamp >= start
            found[names[event.track_uuid]].append((start, packet.timestamp, name))
    assert not any(open_slices.values())
    for slices in found.values():
        slices.sort(key=lambda slice: (slice[0], -slice[1]))
    return found
