"""Which trajectories instances return, to be routed anew (StaleFlow §5.3, Alg. 5).

1. Of the trajectories in an engine's own queue, those beyond `waiting_max`, the last ones first.
2. If the highest throughput of an instance is more than `throughput_ratio_max` times the lowest,
   all trajectories of the instance with the highest one.

The paper's second rule has no condition: an instance without work, which cannot get any, would make
the busiest instance return its work in each cycle. Here the rule applies only if routing those
trajectories anew raises the throughput by `migration_gain_min` or more, by the cost model.
"""

from collections.abc import Callable, Sequence
from copy import copy

from plexrl.rollout.coordinator.cost_model import CostModel
from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.coordinator.snapshot import InstanceLoad
from plexrl.rollout.coordinator.strategies.routing import Candidate, make_router, ordered, route
from plexrl.rollout.staleness.buffers import Buffers

Work = Callable[[InstanceLoad], tuple[list[Candidate], list[Candidate]]]
"""Running and waiting trajectories of an instance in the engine's order, without those that have
ended since the snapshot."""


def to_migrate(
    settings: CoordinatorSettings,
    model: CostModel,
    loads: Sequence[InstanceLoad],
    buffers: Buffers,
    work: Work,
) -> list[tuple[InstanceLoad, list[Candidate]]]:
    """The trajectories that instances return. Nothing changes."""
    if settings.migration == "none":
        return []
    excess = {
        load.index: work(load)[1][settings.waiting_max :]
        for load in loads
        if load.waiting > settings.waiting_max
    }
    busiest = _to_redistribute(settings, model, loads, buffers, work)
    if busiest is not None:
        running, waiting = work(busiest)
        excess[busiest.index] = running + waiting
    return [(load, excess[load.index]) for load in loads if load.index in excess]


def _to_redistribute(
    settings: CoordinatorSettings,
    model: CostModel,
    loads: Sequence[InstanceLoad],
    buffers: Buffers,
    work: Work,
) -> InstanceLoad | None:
    """The instance with the highest throughput, if its work is to be redistributed."""
    rates = [model.throughput(load.kv_cache, load.running) for load in loads]
    if len(rates) < 2 or max(rates) <= settings.throughput_ratio_max * min(rates):
        return None
    busiest = loads[rates.index(max(rates))]
    after = [copy(load) for load in loads]
    empty = after[rates.index(max(rates))]
    empty.kv_cache, empty.running, empty.waiting = 0.0, 0, 0
    running, waiting = work(busiest)
    queue = ordered(running + waiting, set())
    routed = route(make_router(settings, model, after, buffers), buffers, queue)
    if all(load is empty for _, load in routed):
        return None
    concerned = {busiest.index} | {load.index for _, load in routed}
    pairs = [(a, r) for a, r in zip(after, rates, strict=True) if a.index in concerned]
    gained = sum(model.throughput(load.kv_cache, load.running) for load, _ in pairs)
    if gained < (1 + settings.migration_gain_min) * sum(rate for _, rate in pairs):
        return None
    return busiest
