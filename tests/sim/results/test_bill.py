"""The cost of a run, compared with an oracle that sums every second."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.sim.engine.simulate import simulate
from plexrl.sim.metrics.held_nodes import HeldNodes
from plexrl.sim.results.bill import Bill, bill, break_even, with_reserved
from plexrl.sim.search.what_if import apply_change, change, reprice
from plexrl.sim.workload.prices import DAY_S, Prices
from plexrl.sim.workload.scenario import NodeType, Pool, Scenario
from tests.sim.metrics.test_collector import NoJobs
from tests.sim.search.test_sweep import BASE

NODES, GPUS, HOUR_S = 5, 4, 3600.0
NAMES = [f"n{index}" for index in range(NODES)]

Stretch = tuple[int, int, frozenset[str]]
"""When a group had its nodes, from and to, and which."""

PRICE = st.integers(0, 8).map(lambda quarters: quarters / 4)
STRETCHES = st.lists(
    st.tuples(
        st.integers(0, 40), st.integers(0, 30), st.frozensets(st.sampled_from(NAMES), min_size=1)
    ).map(lambda each: (each[0], each[0] + each[1], each[2])),
    max_size=12,
)


def cluster(prices: Prices, price: float = 2.0) -> Scenario:
    kind = NodeType(gpus=GPUS, price=price)
    return Scenario(source=NoJobs(), pools=(Pool(nodes=NODES, node_type=kind),), prices=prices)


def told(stretches: Sequence[Stretch]) -> tuple[tuple[int, float], ...]:
    """The hours by nodes held, of deployments that come and go in the order of time."""
    held = HeldNodes()
    ends = [(end, 0, index) for index, (_, end, _) in enumerate(stretches)]
    starts = [(start, -1, index) for index, (start, _, _) in enumerate(stretches)]
    for now, turn, index in sorted([*ends, *starts]):
        if turn:
            held.take(f"g{index}", sorted(stretches[index][2]), float(now))
        else:
            held.take(f"g{index}", (), float(now))
    return held.hours()


def nodes_at(stretches: Sequence[Stretch], second: int) -> int:
    return len({node for start, end, nodes in stretches if start <= second < end for node in nodes})


def slow_cost(stretches: Sequence[Stretch], scenario: Scenario, drain_s: int, nodes: int) -> float:
    """Second by second, node by node: training nodes of which `nodes` are reserved."""
    prices = scenario.prices
    reserved = scenario.pools[0].node_type.price if prices.reserved is None else prices.reserved
    on_demand = prices.on_demand or 0.0
    cost = 0.0
    for second in range(int(max(drain_s, prices.horizon_s or 0.0))):
        cost += nodes * GPUS * reserved / HOUR_S
        for number in range(nodes_at(stretches, second)):
            if number >= nodes:
                cost += GPUS * on_demand / HOUR_S
    return cost


@example(
    stretches=[(0, 6, frozenset(NAMES[:1]))],
    reserved=1.5,
    on_demand=1.75,
    horizon_s=7,
    rollout_cost=0.0,
)
@given(
    stretches=STRETCHES,
    reserved=st.none() | PRICE,
    on_demand=PRICE,
    horizon_s=st.none() | st.integers(1, 120),
    rollout_cost=PRICE,
)
def test_the_bill_is_that_of_every_second_and_its_split_the_cheapest(
    stretches: list[Stretch],
    reserved: float | None,
    on_demand: float,
    horizon_s: int | None,
    rollout_cost: float,
) -> None:
    drain_s = max((end for _, end, _ in stretches), default=0)
    held = told(stretches)
    scenario = cluster(Prices(reserved=reserved, on_demand=on_demand, horizon_s=horizon_s))

    def of(scenario: Scenario) -> Bill:
        return bill(scenario, drain_s=drain_s, nodes_held=held, rollout_cost=rollout_cost)

    costs = [slow_cost(stretches, scenario, drain_s, nodes) for nodes in range(NODES + 1)]
    for nodes, cost in enumerate(costs):
        prices = replace(scenario.prices, reserved_nodes=nodes)
        found = of(replace(scenario, prices=prices))
        assert found.cost == pytest.approx(cost + rollout_cost)
        assert found.reserved_nodes == nodes
    best = of(scenario)
    assert best.cost == pytest.approx(min(costs) + rollout_cost)
    cheapest = [nodes for nodes, cost in enumerate(costs) if cost == pytest.approx(min(costs))]
    assert best.reserved_nodes == cheapest[0]
    assert best.paid_s == max(drain_s, horizon_s or 0)
    all_reserved = of(replace(scenario, prices=replace(scenario.prices, on_demand=None)))
    assert all_reserved.reserved_nodes == NODES
    assert all_reserved.cost == pytest.approx(costs[NODES] + rollout_cost)


@given(stretches=STRETCHES)
def test_nodes_are_held_while_any_group_has_them(stretches: list[Stretch]) -> None:
    hours = dict(told(stretches))
    end = max((end for _, end, _ in stretches), default=0)
    for nodes in range(1, NODES + 1):
        seconds = sum(nodes_at(stretches, second) == nodes for second in range(end))
        assert hours.get(nodes, 0.0) * HOUR_S == pytest.approx(seconds)
    assert list(hours) == sorted(hours)
    assert 0 not in hours


def test_a_deployment_that_is_told_again_or_elsewhere_is_counted_once() -> None:
    held = HeldNodes()
    held.take("g", ("a", "b"), 0.0)
    held.take("g", ("a", "b"), 1800.0)
    held.take("g", ("c",), 3600.0)
    held.take("other", (), 3600.0)
    held.take("g", (), 7200.0)
    held.take("g", (), 9000.0)
    assert held.hours() == ((1, 1.0), (2, 1.0))


def test_prices_of_its_own_change_a_run_s_cost_and_nothing_else() -> None:
    plain = simulate(BASE)
    assert sum(nodes * hours for nodes, hours in plain.nodes_held) * 8 == pytest.approx(
        plain.training_gpu_hours
    ), "every job of this trace takes whole nodes"
    prices = Prices(reserved=1.0, on_demand=3.0, rollout=0.5, horizon_s=4 * plain.drain_s)
    ran = simulate(replace(BASE, prices=prices))
    assert ran.rollout_cost == pytest.approx(0.5 * plain.rollout_gpu_hours)
    assert ran.paid_s == pytest.approx(4 * plain.drain_s)
    # A node is held for a quarter of the horizon at most, which costs less on demand.
    assert ran.reserved_nodes == 0
    assert ran.on_demand_cost == pytest.approx(3.0 * plain.training_gpu_hours)
    assert ran.cost == pytest.approx(ran.on_demand_cost + ran.rollout_cost)
    money = ("cost", "rollout_cost", "on_demand_cost", "reserved_nodes", "paid_s", "speed")
    assert replace(ran, **{name: getattr(plain, name) for name in money}) == plain
    priced = reprice(BASE, plain, replace(BASE, prices=prices))
    assert priced is not None
    assert replace(priced, speed=ran.speed) == ran


@pytest.mark.parametrize(
    "given",
    ["price-reserved=1", "price-on-demand=9", "price-rollout=0", "horizon-days=3", "price=3"],
)
def test_a_what_if_of_prices_is_worked_out_as_a_run_would_have_it(given: str) -> None:
    base = replace(BASE, prices=Prices(on_demand=4.0, reserved_nodes=1))
    other = apply_change(base, change(given))
    priced, ran = reprice(base, simulate(base), other), simulate(other)
    assert priced is not None
    assert priced.cost == pytest.approx(ran.cost)
    assert (priced.reserved_nodes, priced.paid_s) == (ran.reserved_nodes, ran.paid_s)
    assert apply_change(base, change("reserved-nodes=2")).prices.reserved_nodes == 2


def test_several_pools_keep_their_own_prices_for_a_longer_horizon() -> None:
    pools = (BASE.pools[0], Pool(nodes=1, node_type=NodeType(name="cheap", price=1.0)))
    base = replace(BASE, pools=pools)
    before = simulate(base)
    priced = reprice(base, before, apply_change(base, change("horizon-days=2")))
    assert priced is not None
    training = (2 * 8 * 2.5 + 8 * 1.0) * 48.0
    assert priced.cost == pytest.approx(training + before.rollout_cost)


def test_a_node_is_worth_reserving_from_the_ratio_of_the_prices_on() -> None:
    assert break_even(cluster(Prices())) is None
    assert break_even(cluster(Prices(on_demand=0.0))) is None
    assert break_even(cluster(Prices(on_demand=4.0))) == pytest.approx(0.5)
    assert break_even(cluster(Prices(reserved=3.0, on_demand=4.0))) == pytest.approx(0.75)
    # One node is held for 30 of 40 hours, a second one for 10.
    scenario = cluster(Prices(reserved=1.0, on_demand=2.0))
    found = bill(scenario, drain_s=40 * HOUR_S, nodes_held=((1, 20.0), (2, 10.0)), rollout_cost=0.0)
    assert found.reserved_nodes == 1
    assert found.reserved_cost == pytest.approx(GPUS * 40.0)
    assert found.on_demand_cost == pytest.approx(GPUS * 2.0 * 10.0)


def test_reserved_nodes_are_paid_though_the_cluster_is_smaller() -> None:
    result = simulate(replace(BASE, prices=Prices(on_demand=4.0)))
    found = with_reserved(replace(BASE, prices=Prices(on_demand=4.0)), result, 10)
    assert found.on_demand_cost == 0.0
    assert found.reserved_cost == pytest.approx(10 * 8 * 2.5 * result.drain_s / HOUR_S)


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        ({"reserved": -1.0}, "the reserved price of a GPU-hour is a number of 0 to 1,000,000"),
        ({"on_demand": float("nan")}, "the on-demand price .* not nan"),
        ({"rollout": float("inf")}, "the rollout price .* not inf"),
        ({"reserved_nodes": -1, "on_demand": 1.0}, "at least 0, not -1"),
        ({"horizon_s": 0.0}, "above 0 and at most 36,500 days, not 0"),
        ({"horizon_s": float("nan")}, "not nan"),
        ({"horizon_s": 40_000 * DAY_S}, "not 40000"),
        ({"reserved_nodes": 1}, "1 reserved node without a price of the others"),
    ],
)
def test_prices_that_cannot_be_are_refused(prices: dict[str, float], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        replace(BASE, prices=Prices(**prices))  # type: ignore[arg-type]


def test_nodes_on_demand_need_a_cluster_of_one_pool() -> None:
    two = (*BASE.pools, Pool(nodes=1, node_type=NodeType(name="other")))
    with pytest.raises(
        InvalidRequestError, match="needs a cluster of one pool, and this one has 2"
    ):
        replace(BASE, pools=two, prices=Prices(on_demand=1.0))
