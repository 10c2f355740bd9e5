"""What a run costs. Prices change no decision, so a bill follows from a run's figures alone. Pure.

With N nodes of g GPUs, of which n(t) are held by groups at time t, R of them reserved, and a
horizon H of at least the drain time:

    cost = reserved + on demand + rollout
    reserved  = R * g * H * price_reserved
    on demand = g * price_on_demand * (integral of max(0, n(t) - R) over t)
    rollout   = GPU-hours of rollout GPUs * price_rollout

Without an on-demand price R is N. With one, R is as the scenario says, or the R of the smallest
cost: the k-th node is worth reserving if k nodes or more are held for longer than
H * price_reserved / price_on_demand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plexrl.errors import InvalidRequestError
from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.scenario import Pool, Scenario

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Of one run."""

    reserved_nodes: int
    paid_s: float
    """How long they are paid: the horizon, or the drain time where that is longer."""
    reserved_cost: float
    on_demand_cost: float
    rollout_cost: float

    @property
    def cost(self) -> float:
        """All of it."""
        return self.reserved_cost + self.on_demand_cost + self.rollout_cost


def bill(
    scenario: Scenario,
    *,
    drain_s: float,
    nodes_held: Sequence[tuple[int, float]],
    rollout_cost: float,
) -> Bill:
    """The bill of a run; `nodes_held` are (nodes held at once, hours), as of `SimResult`."""
    prices = scenario.prices
    paid_s = max(drain_s, prices.horizon_s or 0.0)
    if prices.on_demand is None:
        hourly = sum(
            pool.nodes * pool.node_type.gpus * _price_reserved(scenario, pool)
            for pool in scenario.pools
        )
        return Bill(
            reserved_nodes=sum(pool.nodes for pool in scenario.pools),
            paid_s=paid_s,
            reserved_cost=hourly * paid_s / HOUR_S,
            on_demand_cost=0.0,
            rollout_cost=rollout_cost,
        )
    (pool,) = scenario.pools
    reserved = _reserved(scenario, nodes_held, paid_s / HOUR_S)
    beyond = sum(hours * max(0, held - reserved) for held, hours in nodes_held)
    hourly = reserved * pool.node_type.gpus * _price_reserved(scenario, pool)
    return Bill(
        reserved_nodes=reserved,
        paid_s=paid_s,
        reserved_cost=hourly * paid_s / HOUR_S,
        on_demand_cost=beyond * pool.node_type.gpus * prices.on_demand,
        rollout_cost=rollout_cost,
    )


def check_reserved(scenarios: Sequence[Scenario], nodes_max: int) -> None:
    """That no more nodes are reserved than the largest cluster of the question has. (They are paid
    on smaller ones all the same.)

    Raises:
        InvalidRequestError: more are.
    """
    for scenario in scenarios:
        reserved = scenario.prices.reserved_nodes or 0
        if reserved > nodes_max:
            raise InvalidRequestError(
                f"{reserved:,} nodes are reserved, and the largest cluster has {nodes_max:,}: "
                "lower the reserved nodes, or enlarge the cluster by --nodes (with --slo by "
                "--max-nodes)"
            )


def with_reserved(scenario: Scenario, result: SimResult, nodes: int) -> Bill:
    """The bill with so many nodes reserved, of a scenario with an on-demand price."""
    return bill(
        replace(scenario, prices=replace(scenario.prices, reserved_nodes=nodes)),
        drain_s=result.drain_s,
        nodes_held=result.nodes_held,
        rollout_cost=result.rollout_cost,
    )


def break_even(scenario: Scenario) -> float | None:
    """Part of the paid time for which a node has to be held to be worth reserving; above 1: none
    is. None where nothing is on demand, or where on-demand nodes are free."""
    on_demand = scenario.prices.on_demand
    return _price_reserved(scenario, scenario.pools[0]) / on_demand if on_demand else None


def _price_reserved(scenario: Scenario, pool: Pool) -> float:
    given = scenario.prices.reserved
    return pool.node_type.price if given is None else given


def _reserved(
    scenario: Scenario, nodes_held: Sequence[tuple[int, float]], paid_hours: float
) -> int:
    """As said, or the fewest of the smallest cost."""
    prices = scenario.prices
    assert prices.on_demand is not None
    if prices.reserved_nodes is not None:
        return prices.reserved_nodes
    price = _price_reserved(scenario, scenario.pools[0])
    hours_held = 0.0
    for held, hours in sorted(nodes_held, reverse=True):
        hours_held += hours
        if hours_held * prices.on_demand > paid_hours * price:
            return held
    return 0
