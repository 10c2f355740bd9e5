"""Scenarios and results as plain JSON values, in one fixed form: equal results, equal bytes. Pure.

What differs from run to run (`Speed`) stands apart, so that documents can be compared.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from plexrl.sim.results.result import SimResult, Speed
from plexrl.sim.workload.scenario import Scenario

NO_SPEED = Speed(wall_s=0.0, events_per_s=0.0, peak_bytes=0)
"""Of a result that was read without one."""


def result_values(result: SimResult) -> dict[str, Any]:
    """All of a result that follows from its scenario; what is no finite number is null."""
    values: dict[str, Any] = _finite(msgspec.to_builtins(result))
    values.pop("speed")
    return values


def speed_values(speed: Speed) -> dict[str, Any]:
    """The rest of it."""
    values: dict[str, Any] = _finite(msgspec.to_builtins(speed))
    return values


def result_from(values: Mapping[str, Any], speed: Speed = NO_SPEED) -> SimResult:
    """The result that `result_values` described."""
    return msgspec.convert({**_numbers(values), "speed": msgspec.to_builtins(speed)}, SimResult)


def scenario_values(scenario: Scenario) -> dict[str, Any]:
    """What a scenario says, its source by its fields."""
    values: dict[str, Any] = _finite(msgspec.to_builtins(scenario))
    return values


def dumps(values: Any) -> str:
    """One document, the same for the same values."""
    return json.dumps(values, indent=1, allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _numbers(value: Any) -> Any:
    """Null back to NaN: no field of a result is absent otherwise."""
    if value is None:
        return math.nan
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(each) for each in value]
    return value
