"""A stream yields every token once, however often its generation restarts."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.client.futures.generations import SampleStream, TokenStream
from plexrl.errors import ExecutionError, InvalidRequestError

ROWS = {0: list(range(100, 108)), 1: list(range(200, 205))}
"""Tokens of two samples of one prompt."""


def event_line(run: int, row: int, tokens: list[int]) -> str:
    """A line with tokens of a row, from one run of a generation."""
    rows = [{"sample": row, "tokens": tokens, "logprobs": [-0.5] * len(tokens)}]
    return json.dumps({"cursor": f"run{run}.1", "rows": rows})


def given_by(reading: TokenStream, lines: list[str]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {row: [] for row in ROWS}
    for line in lines:
        for chunk in reading.take(line):
            assert len(chunk.tokens) == len(chunk.logprobs)
            found[chunk.sample] += chunk.tokens
    return found


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5), st.integers(0, 2)), max_size=5))
def test_a_stream_over_several_restarts_repeats_no_token(
    runs: list[tuple[int, int, int]],
) -> None:
    """Each run has the progress of both rows and the number of restart events."""
    lines: list[str] = []
    for number, (*reached, repeated) in enumerate([*runs, (8, 5, 0)]):
        if number:
            # After a broken connection the event is sent again.
            lines += [json.dumps({"restart": True})] * (1 + repeated)
        lines += [event_line(number, row, ROWS[row][:count]) for row, count in enumerate(reached)]
    assert given_by(TokenStream("op", 2), lines) == ROWS


def test_different_tokens_after_a_restart_are_an_error() -> None:
    reading = TokenStream("op", 2)
    restart: dict[str, Any] = {"restart": True}
    assert given_by(reading, [event_line(0, 0, [1, 2, 3]), json.dumps(restart)])[0] == [1, 2, 3]
    assert given_by(reading, [event_line(1, 0, [1]), json.dumps(restart)])[0] == []
    with pytest.raises(ExecutionError, match="draws other tokens of sample 0"):
        reading.take(event_line(2, 0, [1, 2, 4]))


def ended_line(run: int, *rows: int) -> str:
    """A line with samples that have ended; the last one without a token."""
    found = [
        {
            "sample": row,
            "tokens": ROWS.get(row, []),
            "logprobs": [-0.5] * len(ROWS.get(row, [])),
            "finish_reason": "stop" if row in ROWS else "abort",
            "weights": [[0, 3, 7]],
        }
        for row in rows
    ]
    return json.dumps({"cursor": f"run{run}.1", "rows": found})


def test_samples_come_once_when_they_have_ended_whatever_restarts() -> None:
    reading = SampleStream("op", 2)
    restart = json.dumps({"restart": True})
    lines = [ended_line(0, 1), restart, ended_line(1, 0, 1), restart, restart, ended_line(2, 1, 0)]
    found = [each for line in [*lines, ended_line(2, 2)] for each in reading.take(line)]
    assert [(prompt, which, sample.tokens) for prompt, which, sample in found] == [
        (0, 1, ROWS[1]),
        (0, 0, ROWS[0]),
        (1, 0, []),
    ]
    assert [sample.finish_reason for _, _, sample in found] == ["stop", "stop", "abort"]
    assert found[0][2].trainer_step == 7


def test_another_sample_after_a_restart_is_an_error() -> None:
    reading = SampleStream("op", 2)
    reading.take(ended_line(0, 0))
    other = json.loads(ended_line(1, 0))
    other["rows"][0]["tokens"] = [1]
    with pytest.raises(ExecutionError, match="draws other tokens of sample 0"):
        reading.take(json.dumps(other))


def test_samples_of_a_stream_of_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="stream='rows'"):
        SampleStream("op", 2).take(event_line(0, 0, [1, 2]))
