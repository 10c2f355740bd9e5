"""A stream yields the same events from the worker's log and from the result, at any cursor."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.model.parallelism import Parallelism
from plexrl.router.dispatch.generate_plan import plan_generate
from plexrl.router.http.streams import events as stream_events
from plexrl.router.http.streams.events import (
    Cursor,
    StreamPosition,
    read_cursor,
    result_events,
    server_sent,
    tokens_event,
)
from plexrl.wire.tensors import Arrays
from plexrl.worker.process.server.token_streams import RowLog, TokenLog

Rows = dict[int, list[int]]


def at(stream: str, offset: int) -> Cursor:
    return Cursor([StreamPosition(stream, offset)])


def drawn(order: list[int]) -> tuple[TokenLog, Arrays]:
    """Log and result of a generation whose rows drew in this order."""
    log = TokenLog()
    rows: Rows = {row: [] for row in range(5)}
    for place, row in enumerate(order):
        log.append(row, [1000 + place], [-float(place)])
        rows[row].append(1000 + place)
    tokens = [token for row in rows.values() for token in row]
    arrays: Arrays = {
        "tokens": np.array(tokens, dtype=np.int32),
        "logprobs": -(np.array(tokens, dtype=np.float32) - 1000),
        "lengths": np.array([len(row) for row in rows.values()], dtype=np.int32),
        "stream_order": log.order(),
    }
    return log, arrays


def read(events: Any) -> Rows:
    found: Rows = {}
    for event in events:
        for row in event["rows"]:
            found.setdefault(row["sample"], []).extend(row["tokens"])
            assert row["logprobs"] == [1000.0 - token for token in row["tokens"]]
    return {row: tokens for row, tokens in found.items() if tokens}


@given(st.lists(st.integers(0, 4), max_size=40), st.integers(0, 45))
def test_result_and_log_yield_the_same_events_after_every_cursor(
    order: list[int], after: int
) -> None:
    log, arrays = drawn(order)
    part = log.read(after)
    live = read([tokens_event(at(log.name, part["next"]), part["rows"])])
    again = read(result_events(at(log.name, after), {"stream": log.name}, arrays))
    assert live == again
    wanted: Rows = {}
    for place, row in enumerate(order[after:], start=after):
        wanted.setdefault(row, []).append(1000 + place)
    assert live == wanted


def test_a_long_stream_comes_in_several_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_events, "TOKENS_MAX", 4)
    log, arrays = drawn([0, 1, 1, 2, 0, 0, 3, 4, 0])
    events = list(result_events(Cursor(), {"stream": log.name}, arrays))
    assert [event["cursor"] for event in events] == [f"{log.name}.{end}" for end in (4, 8, 9)]
    assert read(events) == read(result_events(Cursor(), {"stream": log.name}, arrays))


def test_a_cursor_of_an_earlier_run_is_void() -> None:
    log, arrays = drawn([0, 1, 0])
    first, *rest = result_events(at("other", 2), {"stream": log.name}, arrays)
    assert first == {"restart": True}
    assert read(rest) == {0: [1000, 1002], 1: [1001]}


def ended(rows: list[int], first: int = 0) -> tuple[RowLog, Arrays]:
    """Log and result of a generation whose rows, numbered from `first`, ended in this order; row k
    has k tokens."""
    log = RowLog()
    for row in rows:
        tokens = [100 * row + at for at in range(row)]
        log.append(row, tokens, [-1.0] * row, row % 3, [[0, 7, 4]])
    tokens = [100 * row + at for row in sorted(rows) for at in range(row)]
    arrays: Arrays = {
        "tokens": np.array(tokens, dtype=np.int32),
        "logprobs": np.full(len(tokens), -1.0, dtype=np.float32),
        "lengths": np.array(sorted(rows), dtype=np.int32),
        "finish": np.array([row % 3 for row in sorted(rows)], dtype=np.uint8),
        "row_order": log.order(),
    }
    assert sorted(rows) == list(range(first, first + len(rows)))
    return log, arrays


RESULT = {"weights_seq": 7, "trainer_step": 4}


@given(st.permutations(range(7)), st.integers(0, 9))
def test_rows_come_from_log_and_result_alike_after_every_cursor(
    order: list[int], after: int
) -> None:
    log, arrays = ended(order)
    live = tokens_event(Cursor(), log.read(after)["rows"])["rows"]
    events = result_events(at(log.name, after), {**RESULT, "stream": log.name}, arrays)
    assert [row for event in events for row in event["rows"]] == live
    assert [row["sample"] for row in live] == order[after:]
    for row in live:
        assert len(row["tokens"]) == row["sample"]
        assert row["finish_reason"] == ("stop", "length", "abort")[row["sample"] % 3]
        assert row["weights"] == [[0, 7, 4]]


def test_a_cursor_has_a_position_in_the_stream_of_each_replica() -> None:
    (one, first), (two, second) = ended([1, 0, 2]), ended([4, 3], 3)
    plan = plan_generate(Parallelism(dp=3), 2, 1)
    assert [share.replica for share in plan.shares] == [1, 2]
    arrays = plan.join_arrays([first, second])
    result = plan.join_results([{**RESULT, "stream": one.name}, {**RESULT, "stream": two.name}])
    cursor = read_cursor(f"~{one.name}.2")
    events = list(result_events(cursor, result, arrays))
    assert [[row["sample"] for row in event["rows"]] for event in events] == [[2], [4, 3]]
    assert events[-1]["cursor"] == f"~{one.name}.3~{two.name}.2"
    again = list(result_events(read_cursor(f"~{one.name}.2~old.1"), result, arrays))
    assert again[0] == {"restart": True}
    assert [row["sample"] for event in again[1:] for row in event["rows"]] == [1, 0, 2, 4, 3]


def test_a_generation_without_stream_has_no_events() -> None:
    _, arrays = drawn([0])
    del arrays["stream_order"]
    with pytest.raises(InvalidRequestError, match="submitted without `stream`"):
        list(result_events(Cursor(), {}, arrays))


@pytest.mark.parametrize("text", ["7", "a.b", ".3", "a.-1", "a b.1", "a.1\n", "ä.1", "a.²"])
def test_a_malformed_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a cursor"):
        read_cursor(text)


def test_a_cursor_survives_a_round_trip() -> None:
    for text in ("", "a1.20", "~b.3", "a.1~~c.2"):
        assert str(read_cursor(text)) == text
    assert read_cursor("a1.20")[0] == StreamPosition("a1", 20)
    assert read_cursor("a1.20")[1] == read_cursor("~b.3")[0] == StreamPosition()
    assert read_cursor("a." + "9" * 5000)[0].offset > 10**17


def test_an_event_source_reads_name_id_and_one_line_of_data() -> None:
    event = tokens_event(at("a", 2), [[0, [5, 6], [-0.5, -1.0]]])
    lines = server_sent(event).decode().split("\n")
    assert lines[:2] == ["id: a.2", "event: tokens"]
    assert json.loads(lines[2].removeprefix("data: ")) == event
    assert lines[3:] == ["", ""]
    assert server_sent({"done": True}) == b'event: done\ndata: {"done": true}\n\n'
