"""A reader of a stream is given every token once, however often its generation is begun anew."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.client.futures.generations import StreamState
from plexrl.errors import ExecutionError

ROWS = {0: list(range(100, 108)), 1: list(range(200, 205))}
"""What two samples of one prompt draw."""


def told(run: int, row: int, tokens: list[int]) -> str:
    """A line that brings tokens of a row, in the stream of a generation's run."""
    rows = [{"sample": row, "tokens": tokens, "logprobs": [-0.5] * len(tokens)}]
    return json.dumps({"cursor": f"run{run}.1", "rows": rows})


def given_by(reading: StreamState, lines: list[str]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {row: [] for row in ROWS}
    for line in lines:
        for chunk in reading.take(line):
            assert len(chunk.tokens) == len(chunk.logprobs)
            found[chunk.sample] += chunk.tokens
    return found


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5), st.integers(0, 2)), max_size=5))
def test_a_generation_begun_anew_again_and_again_repeats_nothing(
    runs: list[tuple[int, int, int]],
) -> None:
    """Of each run: how far either row gets, and how often the reader is told that it is new."""
    lines: list[str] = []
    for number, (*reached, repeated) in enumerate([*runs, (8, 5, 0)]):
        if number:
            # A connection that breaks behind it has it told again.
            lines += [json.dumps({"restart": True})] * (1 + repeated)
        lines += [told(number, row, ROWS[row][:count]) for row, count in enumerate(reached)]
    assert given_by(StreamState("op", 2), lines) == ROWS


def test_other_tokens_than_before_are_an_error() -> None:
    reading = StreamState("op", 2)
    restart: dict[str, Any] = {"restart": True}
    assert given_by(reading, [told(0, 0, [1, 2, 3]), json.dumps(restart)])[0] == [1, 2, 3]
    assert given_by(reading, [told(1, 0, [1]), json.dumps(restart)])[0] == []
    with pytest.raises(ExecutionError, match="draws other tokens of sample 0"):
        reading.take(told(2, 0, [1, 2, 4]))
