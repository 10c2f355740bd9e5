"""The Chrome trace shows each phase once, at its time, and who held the GPUs."""

from typing import Any, cast

from plexrl.client.display.chrome_trace import ChromeTrace, chrome_trace
from plexrl.wire.messages.views import LoggedOperationView
from plexrl.wire.operations import phases


def row(
    index: int, job: str, kind: str, times: tuple[float, ...], **fields: Any
) -> LoggedOperationView:
    """A row of the log; `times` are those of submission, start and end."""
    submitted, started, finished = times
    found = {
        "index": index,
        "operation": f"{job}:{index}",
        "job": job,
        "deployment": f"{job}/actor",
        "kind": kind,
        "state": "finished",
        "submitted_at": submitted,
        "started_at": started,
        "finished_at": finished,
        "switch_s": 0.0,
        "transfer_s": 0.0,
        "compute_s": 0.0,
        "tokens": 0,
        "payload_bytes": 0,
        "result_bytes": 0,
        "seq": 0,
        "group": "g0",
        **fields,
    }
    return cast("LoggedOperationView", found)


ROWS = [
    row(1, "a", "load", (100.0, 100.0, 102.0)),
    row(2, "a", "optim_step", (99.0, 102.0, 107.0), switch_s=2.0, transfer_s=1.0, compute_s=3.0),
    row(3, "a", "offload", (107.0, 107.0, 108.0)),
    row(4, "b", "load", (108.0, 108.0, 109.0)),
    row(5, "b", "barrier", (103.0, 109.0, 110.0), compute_s=1.0),
    row(6, "c", "barrier", (103.0, 109.0, 110.0), group="elsewhere"),
]


def slices(trace: ChromeTrace) -> dict[tuple[str, str], list[tuple[str, float, float]]]:
    """(process, thread) to its slices as (name, start, seconds)."""
    names = {
        (event["pid"], event["tid"]): str(event["args"]["name"])
        for event in trace["traceEvents"]
        if event["name"] in ("process_name", "thread_name")
    }
    found: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            where = names[event["pid"], 0], names[event["pid"], event["tid"]]
            piece = (event["name"], event["ts"] / 1e6, event["dur"] / 1e6)
            found.setdefault(where, []).append(piece)
    return found


def test_phases_are_disjoint_and_within_the_operation() -> None:
    assert phases(ROWS[1]) == [
        ("queue", (99.0, 100.0)),
        ("switch", (100.0, 102.0)),
        ("transfer", (102.0, 103.0)),
        ("compute", (103.0, 106.0)),
    ]
    longer: LoggedOperationView = {**ROWS[1], "transfer_s": 4.0, "compute_s": 9.0}
    assert phases(longer)[-1] == ("compute", (106.0, 107.0))
    never: LoggedOperationView = {**ROWS[1], "started_at": None}
    assert phases(never) == [("queue", (99.0, 107.0))]


def test_a_jobs_trace_shows_its_phases_and_all_holders_of_its_group() -> None:
    found = slices(chrome_trace(ROWS, "a"))
    assert found["job a", "actor compute"] == [("optim_step", 4.0, 3.0)]
    assert found["job a", "actor move"] == [("load", 1.0, 2.0), ("offload", 8.0, 1.0)]
    assert found["group g0", "held by"] == [("a/actor", 1.0, 8.0), ("b/actor", 9.0, 2.0)]
    assert [name for name, _, _ in found["group g0", "switches"]] == [
        *("load a/actor", "offload a/actor", "load b/actor"),
    ]
    assert {process for process, _ in found} == {"job a", "group g0"}


def test_a_trace_of_all_jobs_shows_every_job_and_group() -> None:
    found = slices(chrome_trace(ROWS))
    wanted = {"job a", "job b", "job c", "group g0", "group elsewhere"}
    assert {process for process, _ in found} == wanted


def test_overlapping_runs_get_separate_threads() -> None:
    rows = [row(n, "a", "generate", (0.0, float(n), n + 3.0), compute_s=3.0) for n in range(4)]
    found = slices(chrome_trace(rows, "a"))
    computing = {thread: pieces for (_, thread), pieces in found.items() if "compute" in thread}
    assert {thread: len(pieces) for thread, pieces in computing.items()} == {
        "actor compute": 2,
        "actor compute 2": 1,
        "actor compute 3": 1,
    }


def test_queue_threads_sort_below_compute_threads() -> None:
    rows = [row(n, "a", "barrier", (0.0, n + 1.0, n + 2.0), compute_s=1.0) for n in range(3)]
    events = chrome_trace(rows, "a")["traceEvents"]
    sorts = [e for e in events if e["name"] == "thread_sort_index"]
    places = {e["tid"]: int(str(e["args"]["sort_index"])) for e in sorts}
    queues = {e["tid"] for e in events if e["ph"] == "X" and e["cat"].startswith("queue")}
    computing = {e["tid"] for e in events if e["ph"] == "X" and e["cat"] == "compute"}
    assert len(queues) == 3
    assert max(places[tid] for tid in computing) < min(places[tid] for tid in queues)


def test_an_empty_log_is_an_empty_trace() -> None:
    assert chrome_trace([], "a")["traceEvents"] == []
