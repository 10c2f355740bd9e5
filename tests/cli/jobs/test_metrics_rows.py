"""Metrics with non-finite values are shown and encoded as JSON."""

import json
import math

import pytest

from plexrl.cli.jobs.metrics import write_rows
from plexrl.cli.jobs.metrics_plot import trend


def test_a_trend_passes_over_what_is_not_finite() -> None:
    assert trend([0.0, math.nan, 1.0, math.inf], 4) == trend([0.0, 1.0], 4)
    assert trend([math.nan], 4) == ""


def test_numbers_that_are_not_finite_are_texts_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"loss": math.nan, "norm": -math.inf, "reward": 0.5}
    write_rows([{"index": 1, "step": 2, "time": 3.0, "values": values}])

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    (row,) = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert row["values"] == {"loss": "NaN", "norm": "-Infinity", "reward": 0.5}
    assert (row["index"], row["step"], row["time"]) == (1, 2, 3.0)
