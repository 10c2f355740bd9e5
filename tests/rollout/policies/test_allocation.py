"""The allocation of GPUs to generation and training, against a search of all allocations."""

from collections.abc import Callable
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.rollout.policies.allocation import GpuKind, Stage, cheapest, shrink, split

GPUS_MAX = 12
TIMES = st.lists(
    st.sampled_from([inf, 0.5, 1.0, 1.5, 2.5, 4.0, 7.0]), min_size=GPUS_MAX, max_size=GPUS_MAX
)
STAGES = st.builds(
    lambda times, unit: Stage(seconds=lambda units: times[units - 1], unit_gpus=unit),
    TIMES,
    st.integers(1, 3),
)


@given(STAGES, STAGES, st.integers(1, GPUS_MAX))
def test_no_division_of_one_datacenter_is_faster(
    generation: Stage, training: Stage, gpus: int
) -> None:
    allowed = [
        (x, y)
        for x in range(1, gpus + 1)
        for y in range(1, gpus + 1)
        if x * generation.unit_gpus + y * training.unit_gpus <= gpus
    ]
    times = [max(generation.seconds(x), training.seconds(y)) for x, y in allowed]
    if min(times, default=inf) == inf:
        with pytest.raises(InvalidRequestError):
            split(generation, training, gpus)
        return
    found = split(generation, training, gpus)
    assert (found.instances, found.trainers) in allowed
    assert found.iteration_s == min(times)
    used = [
        x * generation.unit_gpus + y * training.unit_gpus
        for (x, y), time in zip(allowed, times, strict=True)
        if time == min(times)
    ]
    assert found.gpus == min(used)


@given(STAGES, STAGES, st.integers(3, GPUS_MAX), st.integers(3, GPUS_MAX))
def test_in_two_datacenters_the_faster_stage_shrinks_to_the_time_of_the_slower_one(
    generation: Stage, training: Stage, m: int, n: int
) -> None:
    x_max, y_max = m // generation.unit_gpus, n // training.unit_gpus
    full = generation.seconds(x_max), training.seconds(y_max)
    assume(max(full) < inf)
    found = shrink(generation, training, generation_gpus=m, training_gpus=n)
    assert (
        found.gpus == found.instances * generation.unit_gpus + found.trainers * training.unit_gpus
    )
    if full[0] < full[1]:
        assert found.trainers == y_max
        gaps = [abs(generation.seconds(k) - full[1]) for k in range(1, x_max + 1)]
        assert abs(found.generation_s - full[1]) == min(gaps)
        assert found.instances == gaps.index(min(gaps)) + 1
    else:
        assert found.instances == x_max
        gaps = [abs(training.seconds(k) - full[0]) for k in range(1, y_max + 1)]
        assert abs(found.training_s - full[0]) == min(gaps)
        assert found.trainers == gaps.index(min(gaps)) + 1


@given(
    st.lists(STAGES, min_size=4, max_size=4),
    st.lists(st.integers(1, 8), min_size=2, max_size=2),
    st.lists(st.sampled_from([0.5, 1.0, 2.85]), min_size=2, max_size=2),
    st.sampled_from([1.0, 3.0, inf]),
)
def test_no_kinds_and_numbers_of_gpus_cost_less(
    stages: list[Stage], budgets: list[int], prices: list[float], limit: float
) -> None:
    names = ("a", "b")
    generation = dict(zip(names, stages[:2], strict=True))
    training = dict(zip(names, stages[2:], strict=True))
    kinds = {
        name: GpuKind(gpus=gpus, price=price)
        for name, gpus, price in zip(names, budgets, prices, strict=True)
    }
    costs = []
    for g in names:
        for t in names:
            for x in range(1, 9):
                for y in range(1, 9):
                    used = dict.fromkeys(names, 0)
                    used[g] += x * generation[g].unit_gpus
                    used[t] += y * training[t].unit_gpus
                    if any(used[each] > kinds[each].gpus for each in names):
                        continue
                    time = max(generation[g].seconds(x), training[t].seconds(y))
                    if time <= limit and time < inf:
                        price = (
                            x * generation[g].unit_gpus * kinds[g].price
                            + y * training[t].unit_gpus * kinds[t].price
                        )
                        costs.append(time * price)
    if not costs:
        with pytest.raises(InvalidRequestError):
            cheapest(kinds, generation, training, iteration_s_max=limit)
        return
    found = cheapest(kinds, generation, training, iteration_s_max=limit)
    assert found.cost == min(costs)
    assert found.allocation.iteration_s <= limit


def _roofline(per_gpu_s: float, fixed_s: float) -> Callable[[int], float]:
    return lambda gpus: per_gpu_s / gpus + fixed_s


def test_h20_generates_and_h800_trains_at_the_prices_of_the_paper() -> None:
    """StreamRL Table 1: generation goes by memory bandwidth, training by matrix products."""
    bandwidth, flops = {"H20": 4.0, "H800": 3.35}, {"H20": 148.0, "H800": 989.5}
    found = cheapest(
        {"H20": GpuKind(gpus=32, price=1.0), "H800": GpuKind(gpus=32, price=2.85)},
        {name: Stage(seconds=_roofline(3000 / each, 2)) for name, each in bandwidth.items()},
        {name: Stage(seconds=_roofline(500_000 / each, 2)) for name, each in flops.items()},
        iteration_s_max=60,
    )
    assert (found.generation, found.training) == ("H20", "H800")


def test_a_budget_below_one_unit_of_each_stage_is_refused() -> None:
    stage = Stage(seconds=lambda units: 1 / units, unit_gpus=4)
    with pytest.raises(InvalidRequestError, match="7 GPUs hold no instance of 4 and trainer of 4"):
        split(stage, stage, 7)
    with pytest.raises(InvalidRequestError, match="3 GPUs hold no unit of 4"):
        shrink(stage, stage, generation_gpus=8, training_gpus=3)


def test_a_time_that_is_no_number_is_refused() -> None:
    broken = Stage(seconds=lambda _: float("nan"))
    with pytest.raises(InvalidRequestError, match="the time with 1 units is nan"):
        split(broken, broken, 2)
