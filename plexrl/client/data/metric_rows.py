"""Rows of a job's metrics, as JSON and as floats, and samples of its steps.

Training that diverges reports NaN, and that row is the most interesting. JSON has no such numbers,
so they are sent and stored as the texts `NaN`, `Infinity` and `-Infinity` (as in Protobuf).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, SupportsFloat, TypedDict

from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers
from plexrl.wire.messages.run_views import CHARACTERS_MAX, SAMPLES_MAX
from plexrl.wire.messages.views import MetricsRow
from plexrl.wire.parameter_checks import short

if TYPE_CHECKING:
    from plexrl.client.data.results import Sample


class SentMetrics(TypedDict):
    """A row of metrics, as it is sent."""

    step: int
    values: dict[str, float | str]


def metrics_row(step: object, values: object) -> SentMetrics:
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


def samples_body(
    step: int,
    samples: "Sequence[Sample]",
    texts: Sequence[str],
    rewards: Sequence[SupportsFloat | None],
    prompts: Sequence[str],
) -> dict[str, object]:
    """The body of the request that keeps samples of a step.

    Raises:
        InvalidRequestError: the step is no whole number, or the sequences differ in length.
    """
    check_numbers("metrics", {"step": step})
    for name, values in (("texts", texts), ("rewards", rewards), ("prompts", prompts)):
        if len(values) != len(samples) and (name != "prompts" or values):
            raise InvalidRequestError(
                f"log_samples got {len(samples)} samples and {len(values)} {name}: give one of "
                f"{name} for each sample"
            )
    numbers = [math.nan if reward is None else float(reward) for reward in rewards]
    kept = [number if math.isfinite(number) else None for number in numbers]
    rows = [
        {
            "prompt": (prompts[i] if prompts else "")[:CHARACTERS_MAX],
            "text": texts[i][:CHARACTERS_MAX],
            "reward": kept[i],
            "length": len(samples[i].tokens),
            "ended_by": samples[i].finish_reason,
        }
        for i in range(min(len(samples), SAMPLES_MAX))
    ]
    failed = kept.count(None)
    return {"step": int(step), "total": len(samples), "failed": failed, "samples": rows}


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
