"""Explains the cost of runs in text and a table, for scenarios with prices of their own. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from plexrl.sim.report.tables import ReportTable
from plexrl.sim.report.units import duration, percent, short
from plexrl.sim.results.bill import break_even, with_reserved
from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.prices import Prices
from plexrl.sim.workload.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Billed:
    """A run and the scenario with its prices."""

    label: str
    scenario: Scenario
    result: SimResult

    @property
    def nodes(self) -> int:
        """Nodes of the cluster."""
        return sum(pool.nodes for pool in self.scenario.pools)

    @property
    def is_split(self) -> bool:
        """Whether nodes may be on demand."""
        return self.scenario.prices.on_demand is not None


def with_own_prices(billed: Sequence[Billed]) -> list[Billed]:
    """The runs with prices of their own; the others need no table."""
    return [each for each in billed if each.scenario.prices != Prices()]


def bill_table(billed: Sequence[Billed]) -> ReportTable:
    """One row per run: nodes, parts of the cost, and the cost with one kind of nodes only."""
    training: dict[str, list[str]] = {
        "reserved nodes": [f"{each.result.reserved_nodes:,}" for each in billed],
        "reserved": [short(reserved_cost(each.result)) for each in billed],
    }
    whole: dict[str, list[str]] = {"cost": [short(each.result.cost) for each in billed]}
    if any(each.is_split for each in billed):
        training["on demand"] = [short(each.result.on_demand_cost) for each in billed]
        for name, part in (("if all reserved", 1), ("if all on demand", 0)):
            whole[name] = [_cost_of_part(each, part) for each in billed]
    columns = {
        "run": [each.label for each in billed],
        "nodes": [f"{each.nodes:,}" for each in billed],
        "nodes held": [percent(_held(each)) for each in billed],
        **training,
        "rollouts": [short(each.result.rollout_cost) for each in billed],
        **whole,
    }
    return ReportTable(
        groups=(("", 1), ("cluster", 2), ("bill", len(columns) - 3)),
        columns=tuple(columns),
        rows=tuple(zip(*columns.values(), strict=True)),
    )


def price_lines(scenario: Scenario) -> list[tuple[str, str]]:
    """(name, value) of the scenario's own prices, and the break-even point of reserved nodes."""
    prices = scenario.prices
    lines = []
    if (prices.reserved, prices.on_demand, prices.rollout) != (None, None, None):
        own = " or ".join(dict.fromkeys(f"{pool.node_type.price:g}" for pool in scenario.pools))
        reserved, rollout = (
            own if price is None else f"{price:g}" for price in (prices.reserved, prices.rollout)
        )
        on_demand = "" if prices.on_demand is None else f"{prices.on_demand:g} of nodes on demand, "
        text = f"{reserved} of reserved nodes, {on_demand}{rollout} of rollouts"
        lines.append(("prices of a GPU-hour", text))
    if prices.horizon_s is not None:
        lines.append(("horizon", duration(prices.horizon_s)))
    even = break_even(scenario)
    if even is not None:
        pays = f"reserving a node pays if it is held for more than {percent(even)} of the paid time"
        never = "reserving never pays: on-demand nodes cost no more while they are held"
        lines.append(("break-even", pays if even < 1 else never))
    return lines


def horizon_warning(billed: Billed) -> str | None:
    """A warning if the trace drains after the horizon."""
    horizon_s = billed.scenario.prices.horizon_s
    if horizon_s is None or billed.result.paid_s <= horizon_s:
        return None
    return (
        f"{billed.label} on {billed.nodes:,} nodes drains after {duration(billed.result.drain_s)}, "
        f"later than the horizon of {duration(horizon_s)}: its reserved nodes are paid until then"
    )


def reserved_cost(result: SimResult) -> float:
    """The part of a run's cost that its reserved nodes have."""
    return result.cost - result.rollout_cost - result.on_demand_cost


def _cost_of_part(billed: Billed, part: int) -> str:
    if not billed.is_split:
        return ""
    return short(with_reserved(billed.scenario, billed.result, part * billed.nodes).cost)


def _held(billed: Billed) -> float | None:
    """Part of the paid node-hours in which groups held the nodes."""
    offered = billed.nodes * billed.result.paid_s / 3600.0
    held = sum(nodes * hours for nodes, hours in billed.result.nodes_held)
    return held / offered if offered else None
