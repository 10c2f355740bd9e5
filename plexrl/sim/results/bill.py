"""Computes the cost of a run from its figures alone: prices affect no decision. Pure.

With N nodes of g GPUs, of which n(t) are held by groups at time t, R of them reserved, and a
horizon H of at least the drain time:

    cost = reserved + on demand + rollout
    reserved  = R * g * H * price_reserved
    on demand = g * price_on_demand * (integral of max(0, n(t) - R) over t)
    rollout   = GPU-hours of rollout GPUs * price_rollout

Without an on-demand price, R is N. With one, R is the scenario's, or else the R of the lowest cost:
reserving the k-th node pays if at least k nodes are held for longer than
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
    """The bill of one run."""

    reserved_nodes: int
    paid_s: float
    """Paid time of reserved nodes: the horizon, or the drain time if that is longer."""
    reserved_cost: float
    on_demand_cost: float
    rollout_cost: float

    @property
    def cost(self) -> float:
        """Total cost."""
        return self.reserved_cost + self.on_demand_cost + self.rollout_cost


def bill(
    scenario: Scenario,
    *,
    drain_s: float,
    nodes_held: Sequence[tuple[int, float]],
    rollout_cost: float,
) -> Bill:
    """The bill of a run; `nodes_held`: (number of held nodes, hours), as in `SimResult`."""
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
    """Check that no scenario reserves more nodes than the largest cluster has. (On smaller clusters
    all reserved nodes are paid too.)

    Raises:
        InvalidRequestError: a scenario reserves more.
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
    """The bill with `nodes` reserved nodes, for a scenario with an on-demand price."""
    return bill(
        replace(scenario, prices=replace(scenario.prices, reserved_nodes=nodes)),
        drain_s=result.drain_s,
        nodes_held=result.nodes_held,
        rollout_cost=result.rollout_cost,
    )


def break_even(scenario: Scenario) -> float | None:
    """Part of the paid time above which reserving a node pays; above 1: never. None if there is no
    on-demand price, or if it is 0."""
    on_demand = scenario.prices.on_demand
    return _price_reserved(scenario, scenario.pools[0]) / on_demand if on_demand else None


def _price_reserved(scenario: Scenario, pool: Pool) -> float:
    given = scenario.prices.reserved
    return pool.node_type.price if given is None else given


def _reserved(
    scenario: Scenario, nodes_held: Sequence[tuple[int, float]], paid_hours: float
) -> int:
    """The scenario's reserved nodes, or the fewest with the lowest cost."""
    prices = scenario.prices
    assert prices.on_demand is not None
    if prices.reserved_nodes is not None:
        return prices.reserved_nodes
    price = _price_reserved(scenario, scenario.pools[0])
    hours_held = 0.0
    for held, hours in sorted(nodes_held, reverse=True):
        hours_held += hours
        # Costs that differ by rounding alone are equal.
        if hours_held * prices.on_demand > paid_hours * price * (1 + 1e-9):
            return held
    return 0
