"""The same trace on another cluster, or at another price: what would differ.

A price changes no decision, so a run that differs in prices only is priced anew, not run again.
"""

from dataclasses import dataclass, replace

from plexrl.errors import InvalidRequestError
from plexrl.sim.node_types import node_type, with_fields
from plexrl.sim.result import SimResult
from plexrl.sim.scenario import NodeType, Pool, Scenario

_SIZES = {"": 1, "GiB": 1 << 30, "TiB": 1 << 40, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is otherwise."""

    text: str
    """As it was written."""
    field: str
    """`node-type`, or a field of every node type."""
    value: NodeType | float


CHANGES = ("price", "node-type", "host-memory", "nvme", "speed", "nodes")
"""What can be asked."""
_FIELDS = {"host-memory": "host_memory_bytes", "nvme": "nvme_bytes"}


def change(given: str) -> Change:
    """The change that `NAME=VALUE` says: a price of a GPU-hour, a node type by name or file, bytes
    of host memory or NVMe (`1TiB`), a speed, a number of nodes.

    Raises:
        InvalidRequestError: it has no such form, or the value cannot be.
    """
    name, equals, text = given.partition("=")
    if not equals or name not in CHANGES:
        raise InvalidRequestError(
            f"what if {given!r}: write NAME=VALUE with one of {', '.join(CHANGES)}, as price=3.0"
        )
    if name == "node-type":
        return Change(text=given, field=name, value=node_type(text))
    field = _FIELDS.get(name, name)
    value = _number(given, name, text)
    if name != "nodes":
        with_fields(NodeType(), {field: value}, where=f"what if {given!r}")
    elif not isinstance(value, int):
        raise InvalidRequestError(f"what if {given!r}: {text!r} is no whole number of nodes")
    elif value < 1:
        raise InvalidRequestError(f"what if {given!r}: a cluster has at least 1 node")
    return Change(text=given, field=field, value=value)


def changed(scenario: Scenario, what: Change) -> Scenario:
    """The scenario with all its pools so.

    Raises:
        InvalidRequestError: the nodes of several pools are to change.
    """
    if what.field == "nodes" and len(scenario.pools) > 1:
        raise InvalidRequestError(
            f"what if {what.text!r}: the cluster has several pools; say which by --pool instead"
        )
    return replace(scenario, pools=tuple(_changed(pool, what) for pool in scenario.pools))


def repriced(scenario: Scenario, result: SimResult, other: Scenario) -> SimResult | None:
    """What `other` comes to, where it differs from the `scenario` of `result` in prices at most;
    None where it has to be run. (So it has where pools have prices of their own: the result does
    not tell which job's rollouts cost which.)"""
    prices = {pool.node_type.price for pool in other.pools}
    if _priceless(scenario) != _priceless(other) or len(prices) > 1:
        return None
    price = prices.pop()
    rollout_cost = result.rollout_gpu_hours * price
    training_cost = other.gpus * result.drain_s / 3600.0 * price
    return replace(result, rollout_cost=rollout_cost, cost=training_cost + rollout_cost)


def _changed(pool: Pool, what: Change) -> Pool:
    if isinstance(what.value, NodeType):
        return replace(pool, node_type=what.value)
    if what.field == "nodes":
        return replace(pool, nodes=int(what.value))
    values = {what.field: what.value}
    return replace(pool, node_type=with_fields(pool.node_type, values, where=what.text))


def _priceless(scenario: Scenario) -> Scenario:
    return replace(scenario, pools=tuple(_free(pool) for pool in scenario.pools))


def _free(pool: Pool) -> Pool:
    return replace(pool, node_type=replace(pool.node_type, price=0.0))


def _number(given: str, name: str, text: str) -> float:
    for suffix in sorted(_SIZES, key=len, reverse=True) if name in _FIELDS else ("",):
        if text.endswith(suffix):
            try:
                value = float(text.removesuffix(suffix)) * _SIZES[suffix]
            except ValueError:
                break
            return int(value) if name in (*_FIELDS, "nodes") and value.is_integer() else value
    example = {"host-memory": "1TiB", "nvme": "14TiB", "nodes": "128"}.get(name, "3.0")
    raise InvalidRequestError(f"what if {given!r}: {text!r} is no value; write {name}={example}")
