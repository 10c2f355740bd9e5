"""Rows of a job's metrics, as JSON and as floats.

Training that diverges reports NaN, and that row is the most interesting. JSON has no such numbers,
so they are sent and stored as the texts `NaN`, `Infinity` and `-Infinity` (as in Protobuf).
"""

import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers
from plexrl.wire.messages.views import MetricsRow
from plexrl.wire.parameter_checks import short


def metrics_row(step: object, values: object) -> dict[str, Any]:
    """A row as JSON values.

    Raises:
        InvalidRequestError: the step is not a whole number, or a value is not a number.
    """
    check_numbers("metrics", {"step": step})
    assert isinstance(step, Integral), "checked above"
    if not isinstance(values, Mapping):
        raise InvalidRequestError(
            f"the metrics are {short(values)}: give a dict of numbers by name, such as "
            "job.log(step, {'reward/mean': 0.5})"
        )
    return {"step": int(step), "values": {_key(n): _number(n, v) for n, v in values.items()}}


def json_number(value: float) -> float | str:
    """The number itself, or the text for one that JSON does not have."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def read_rows(rows: Iterable[MetricsRow]) -> list[MetricsRow]:
    """Rows with every value as a float."""
    return [
        {**row, "values": {name: float(value) for name, value in row["values"].items()}}
        for row in rows
    ]


def _key(name: object) -> str:
    if isinstance(name, str):
        return name
    raise InvalidRequestError(f"a metric's name is {short(name)}: give a string")


def _number(name: object, value: Any) -> float | str:
    try:
        # A text is most likely a mistake; arrays of one number are accepted.
        number = None if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise InvalidRequestError(
            f"metric {name!r} is {short(value)}: give one number, such as its .mean()",
            metric=str(name),
        )
    return json_number(number)
