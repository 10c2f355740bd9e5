"""Converts scenarios and results to plain JSON values: equal results give equal bytes. Pure.

`Speed`, which differs between equal runs, is separate, so that documents can be compared.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from plexrl.sim.results.result import SimResult, Speed
from plexrl.sim.workload.scenario import Scenario

NO_SPEED = Speed(wall_s=0.0, events_per_s=0.0, peak_bytes=0)
"""Speed of a result that was read without one."""


def result_values(result: SimResult) -> dict[str, Any]:
    """All of a result except `Speed`; non-finite numbers become null."""
    values: dict[str, Any] = _finite(msgspec.to_builtins(result))
    values.pop("speed")
    return values


def speed_values(speed: Speed) -> dict[str, Any]:
    """The JSON values of a `Speed`."""
    values: dict[str, Any] = _finite(msgspec.to_builtins(speed))
    return values


def result_from(values: Mapping[str, Any], speed: Speed = NO_SPEED) -> SimResult:
    """The result that `result_values` described."""
    return msgspec.convert({**_numbers(values), "speed": msgspec.to_builtins(speed)}, SimResult)


def scenario_values(scenario: Scenario) -> dict[str, Any]:
    """The JSON values of a scenario."""
    values: dict[str, Any] = _finite(msgspec.to_builtins(scenario))
    return values


def dumps(values: Any) -> str:
    """Encode a document; equal values give equal text."""
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
    """Convert null back to NaN: no result field is otherwise optional."""
    if value is None:
        return math.nan
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(each) for each in value]
    return value
