"""A stream yields the same events from the worker's log and from the result, at any cursor."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.router.streams import events as stream_events
from plexrl.router.streams.events import (
    Cursor,
    read_cursor,
    result_events,
    server_sent,
    tokens_event,
)
from plexrl.wire.tensors import Arrays
from plexrl.worker.rollout.token_streams import TokenLog

Rows = dict[int, list[int]]


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
    live = read([tokens_event(Cursor(log.name, part["next"]), part["rows"])])
    again = read(result_events(Cursor(log.name, after), log.name, arrays))
    assert live == again
    wanted: Rows = {}
    for place, row in enumerate(order[after:], start=after):
        wanted.setdefault(row, []).append(1000 + place)
    assert live == wanted


def test_a_long_stream_comes_in_several_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_events, "TOKENS_MAX", 4)
    log, arrays = drawn([0, 1, 1, 2, 0, 0, 3, 4, 0])
    events = list(result_events(Cursor(), log.name, arrays))
    assert [event["cursor"] for event in events] == [f"{log.name}.{end}" for end in (4, 8, 9)]
    assert read(events) == read(result_events(Cursor(), log.name, arrays))


def test_a_cursor_of_an_earlier_run_is_void() -> None:
    log, arrays = drawn([0, 1, 0])
    first, *rest = result_events(Cursor("other", 2), log.name, arrays)
    assert first == {"restart": True}
    assert read(rest) == {0: [1000, 1002], 1: [1001]}


def test_a_generation_without_stream_has_no_events() -> None:
    _, arrays = drawn([0])
    del arrays["stream_order"]
    with pytest.raises(InvalidRequestError, match="submitted without `stream`"):
        list(result_events(Cursor(), "", arrays))


@pytest.mark.parametrize("text", ["7", "a.b", ".3", "a.-1", "a b.1", "a.1\n", "ä.1", "a.²"])
def test_a_malformed_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a cursor"):
        read_cursor(text)


def test_a_cursor_survives_a_round_trip() -> None:
    assert read_cursor("") == Cursor()
    assert read_cursor(str(Cursor("a1", 20))) == Cursor("a1", 20)
    assert read_cursor("a." + "9" * 5000).position > 10**17


def test_an_event_source_reads_name_id_and_one_line_of_data() -> None:
    event = tokens_event(Cursor("a", 2), [[0, [5, 6], [-0.5, -1.0]]])
    lines = server_sent(event).decode().split("\n")
    assert lines[:2] == ["id: a.2", "event: tokens"]
    assert json.loads(lines[2].removeprefix("data: ")) == event
    assert lines[3:] == ["", ""]
    assert server_sent({"done": True}) == b'event: done\ndata: {"done": true}\n\n'
