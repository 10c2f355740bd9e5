"""Changes a scenario's cluster or prices for a what-if comparison.

Prices affect no decision, so a run that differs in prices only is repriced instead of run again.
"""

from dataclasses import dataclass, replace
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.sim.results.bill import bill
from plexrl.sim.results.result import SimResult
from plexrl.sim.state.node_types import node_type, with_fields
from plexrl.sim.workload.prices import DAY_S, Prices
from plexrl.sim.workload.scenario import NodeType, Pool, Scenario

_SIZES = {"": 1, "GiB": 1 << 30, "TiB": 1 << 40, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a scenario."""

    text: str
    """The change as written."""
    field: str
    """`node-type`, `nodes`, or a field of the prices or of every node type."""
    value: NodeType | float


_PRICES = {
    "price-reserved": "reserved",
    "price-on-demand": "on_demand",
    "price-rollout": "rollout",
    "reserved-nodes": "reserved_nodes",
    "horizon-days": "horizon_s",
}
"""Field of the scenario's prices by name of the change."""
CHANGES = ("price", *_PRICES, "node-type", "host-memory", "nvme", "speed", "nodes")
"""Names of all changes."""
_WHOLE = ("nodes", "reserved-nodes")
_EXAMPLES = {
    "host-memory": "1TiB",
    "nvme": "14TiB",
    "nodes": "128",
    "reserved-nodes": "64",
    "horizon-days": "30",
}
_FIELDS = {"host-memory": "host_memory_bytes", "nvme": "nvme_bytes"}


def change(given: str) -> Change:
    """Parse a change `NAME=VALUE`: a price of a GPU-hour, days of a horizon, a node type by name or
    file, bytes of host memory or NVMe (`1TiB`), a speed, or a number of nodes.

    Raises:
        InvalidRequestError: the form or the value is invalid.
    """
    name, equals, text = given.partition("=")
    if not equals or name not in CHANGES:
        raise InvalidRequestError(
            f"what if {given!r}: write NAME=VALUE with one of {', '.join(CHANGES)}, as price=3.0"
        )
    if name == "node-type":
        return Change(text=given, field=name, value=node_type(text))
    field = _PRICES.get(name) or _FIELDS.get(name, name)
    value = _number(given, name, text)
    if name in _WHOLE and not isinstance(value, int):
        raise InvalidRequestError(f"what if {given!r}: {text!r} is not a whole number of nodes")
    if name == "horizon-days":
        value *= DAY_S
    if name in _PRICES:
        _with_price(Prices(), field, value, given)
    elif name != "nodes":
        with_fields(NodeType(), {field: value}, where=f"what if {given!r}")
    elif value < 1:
        raise InvalidRequestError(f"what if {given!r}: a cluster has at least 1 node")
    return Change(text=given, field=field, value=value)


def apply_change(scenario: Scenario, what: Change) -> Scenario:
    """The scenario with the change applied to all its pools.

    Raises:
        InvalidRequestError: the change is of the nodes of several pools, or the prices conflict.
    """
    if what.field in _PRICES.values():
        assert not isinstance(what.value, NodeType)
        prices = _with_price(scenario.prices, what.field, what.value, what.text)
        return replace(scenario, prices=prices)
    if what.field == "nodes" and len(scenario.pools) > 1:
        raise InvalidRequestError(
            f"what if {what.text!r}: the cluster has several pools; change one by --pool instead"
        )
    return replace(scenario, pools=tuple(_changed(pool, what) for pool in scenario.pools))


def reprice(scenario: Scenario, result: SimResult, other: Scenario) -> SimResult | None:
    """The result of `other` if it differs from the `scenario` of `result` in prices only; None: it
    has to be run. (It has to be if rollouts cost the price of their node type and several types
    have new prices: the result does not contain rollout hours by node type.)"""
    if _priceless(scenario) != _priceless(other):
        return None
    rollout_cost = _rollout_cost(scenario, result, other)
    if rollout_cost is None:
        return None
    found = bill(
        other,
        drain_s=result.drain_s,
        nodes_held=result.nodes_held,
        rollout_cost=rollout_cost,
    )
    return replace(
        result,
        cost=found.cost,
        rollout_cost=found.rollout_cost,
        on_demand_cost=found.on_demand_cost,
        reserved_nodes=found.reserved_nodes,
        paid_s=found.paid_s,
    )


def _rollout_cost(scenario: Scenario, result: SimResult, other: Scenario) -> float | None:
    price = other.prices.rollout
    if price is None and scenario.prices.rollout is None and _types(scenario) == _types(other):
        return result.rollout_cost
    if price is None and len(of_types := set(_types(other))) == 1:
        price = of_types.pop()
    return None if price is None else result.rollout_gpu_hours * price


def _with_price(prices: Prices, field: str, value: float, given: str) -> Prices:
    changes: dict[str, Any] = {field: value}
    try:
        return replace(prices, **changes)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"what if {given!r}: {error.message}") from error


def _types(scenario: Scenario) -> list[float]:
    return [pool.node_type.price for pool in scenario.pools]


def _changed(pool: Pool, what: Change) -> Pool:
    if isinstance(what.value, NodeType):
        return replace(pool, node_type=what.value)
    if what.field == "nodes":
        return replace(pool, nodes=int(what.value))
    values = {what.field: what.value}
    return replace(pool, node_type=with_fields(pool.node_type, values, where=what.text))


def _priceless(scenario: Scenario) -> Scenario:
    pools = tuple(_free(pool) for pool in scenario.pools)
    return replace(scenario, pools=pools, prices=Prices())


def _free(pool: Pool) -> Pool:
    return replace(pool, node_type=replace(pool.node_type, price=0.0))


def _number(given: str, name: str, text: str) -> float:
    for suffix in sorted(_SIZES, key=len, reverse=True) if name in _FIELDS else ("",):
        if text.endswith(suffix):
            try:
                value = float(text.removesuffix(suffix)) * _SIZES[suffix]
            except ValueError:
                break
            return int(value) if name in (*_FIELDS, *_WHOLE) and value.is_integer() else value
    example = _EXAMPLES.get(name, "3.0")
    raise InvalidRequestError(
        f"what if {given!r}: {text!r} is not a valid value; write {name}={example}"
    )
