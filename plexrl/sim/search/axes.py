"""Expands one scenario into a sweep along axes such as `nodes=64:256:64`. Pure.

The order is fixed: the first axis varies slowest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.sim.workload.policies import POLICY_NAMES, SIM_POLICIES, check_policy
from plexrl.sim.workload.scenario import (
    JITTER_MAX,
    LOAD_MAX,
    NODES_MAX,
    STALENESS_MAX,
    STARVATION_S_MAX,
    SWITCH_S_MAX,
    Scenario,
)

PAPER = ("isolated", "pack", "spread", "spread+backfill")
"""The policies of PlexRL §6.3."""
RUNS_MAX = 10_000
"""Most runs of one sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A setting that varies between runs, and its values as written."""

    name: str
    values: tuple[str, ...]


def policies_named(given: str) -> tuple[str, ...]:
    """Names of policies: `all` (of the scheduler), `paper`, or distinct names separated by commas.

    Raises:
        InvalidRequestError: a name is unknown or repeated.
    """
    if given == "all":
        return tuple(SIM_POLICIES)
    if given == "paper":
        return PAPER
    names = tuple(part.strip() for part in given.split(",") if part.strip())
    _check_once("policy", names)
    if not names:
        raise InvalidRequestError(
            f"name a policy: all, paper, or some of {', '.join(POLICY_NAMES)}"
        )
    for name in names:
        check_policy(name)
    return names


def axis(given: str) -> Axis:
    """Parse an axis, `NAME=A,B,…` or `NAME=FIRST:LAST:STEP`.

    Raises:
        InvalidRequestError: the form or the name is invalid.
    """
    name, equals, text = given.partition("=")
    if not equals or not text:
        raise InvalidRequestError(
            f"sweep {given!r}: write NAME=FIRST:LAST:STEP or NAME=A,B,…, as nodes=64:256:64"
        )
    if name == "policy":
        return Axis(name=name, values=policies_named(text))
    if name not in _SETTERS:
        raise InvalidRequestError(
            f"sweep {given!r}: only {', '.join(AXES)} can be swept, not {name!r}"
        )
    values = _range(given, text) if ":" in text else tuple(text.split(","))
    found = Axis(name=name, values=tuple(value.strip() for value in values))
    _check_once(f"sweep {given!r}", found.values)
    return found


def scenarios_along(base: Scenario, axes: Sequence[Axis]) -> tuple[Scenario, ...]:
    """`base` with every combination of the axes' values.

    Raises:
        InvalidRequestError: an axis is repeated, a value is invalid, or there are too many runs.
    """
    names = [each.name for each in axes]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"{name} is swept twice: give all its values in one --sweep")
    runs = 1
    for each in axes:
        runs *= len(each.values)
    if runs > RUNS_MAX:
        raise InvalidRequestError(
            f"this sweep has {runs} runs, more than {RUNS_MAX}: use fewer values"
        )
    found = []
    for values in product(*(each.values for each in axes)):
        scenario = base
        for name, value in zip(names, values, strict=True):
            scenario = _with(scenario, name, value)
        found.append(scenario)
    return tuple(found)


def with_nodes(scenario: Scenario, nodes: int) -> Scenario:
    """The scenario on a cluster of so many nodes.

    Raises:
        InvalidRequestError: the scenario has several pools.
    """
    if len(scenario.pools) != 1:
        raise InvalidRequestError(
            "the number of nodes can vary on a cluster of one pool only: use --nodes and "
            "--node-type instead of --pool"
        )
    return replace(scenario, pools=(replace(scenario.pools[0], nodes=nodes),))


def _with(scenario: Scenario, name: str, value: str) -> Scenario:
    if name == "policy":
        return replace(scenario, policy=check_policy(value))
    read, put, expected = _SETTERS[name]
    try:
        return put(scenario, read(value))
    except ValueError as error:
        raise InvalidRequestError(f"sweep {name}: {value!r} is invalid{expected}") from error


def _within(kind: Callable[[str], float], least: float, most: float) -> Callable[[str], Any]:
    """Reads a number of these bounds; raises `ValueError`."""

    def read(value: str) -> float:
        number = kind(value)
        if not least <= number <= most:
            raise ValueError(value)
        return number

    return read


def _behaviour(field: str) -> Callable[[Scenario, Any], Scenario]:
    return lambda scenario, value: replace(
        scenario, behaviour=replace(scenario.behaviour, **{field: value})
    )


_SETTERS: dict[str, tuple[Callable[[str], Any], Callable[[Scenario, Any], Scenario], str]] = {
    "nodes": (
        _within(int, 1, NODES_MAX),
        with_nodes,
        f": use a whole number from 1 to {NODES_MAX}",
    ),
    "seed": (int, lambda scenario, value: replace(scenario, seed=value), ""),
    "jitter": (
        _within(float, 0, JITTER_MAX),
        _behaviour("jitter"),
        f": use a number from 0 to {JITTER_MAX:g}, as 0.15 for 15 %",
    ),
    "staleness": (
        _within(int, 0, STALENESS_MAX),
        _behaviour("staleness"),
        f": use 0 to {STALENESS_MAX} steps",
    ),
    "load": (
        _within(float, 1e-3, LOAD_MAX),
        lambda scenario, value: replace(scenario, load_max=value),
        f": use a number above 0 and up to {LOAD_MAX:g}",
    ),
    "switch-s": (
        _within(float, 0, SWITCH_S_MAX),
        lambda scenario, value: replace(scenario, switch_s=value),
        f": use 0 to {SWITCH_S_MAX:g} s",
    ),
    "starvation-s": (
        _within(float, 0, STARVATION_S_MAX),
        lambda scenario, value: replace(scenario, starvation_bound_s=value),
        f": use 0 to {STARVATION_S_MAX:g} s",
    ),
}
"""By axis: how a value is read, how a scenario gets it, and the expected values for messages."""
AXES = ("policy", *_SETTERS)
"""Names of all axes."""


def _check_once(what: str, values: Sequence[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise InvalidRequestError(f"{what}: {value!r} is repeated; give each value once")


def _range(given: str, text: str) -> tuple[str, ...]:
    parts = text.split(":")
    try:
        first, last = float(parts[0]), float(parts[1])
        step = float(parts[2]) if len(parts) > 2 else 1.0
        count = int((last - first) / step + 1e-9) + 1 if step > 0 else 0
    except (ValueError, IndexError, OverflowError) as error:
        raise InvalidRequestError(f"sweep {given!r}: a range is FIRST:LAST:STEP") from error
    if len(parts) > 3 or not 0 < count <= RUNS_MAX:
        raise InvalidRequestError(
            f"sweep {given!r}: a range is FIRST:LAST:STEP, with LAST not below FIRST, STEP above "
            f"0 and at most {RUNS_MAX} values"
        )
    return tuple(f"{first + index * step:.12g}" for index in range(count))
