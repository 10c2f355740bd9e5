"""Which trajectories instances return, to be routed anew (StaleFlow §5.3, Alg. 5).

1. Of the trajectories in an engine's own queue, those beyond `waiting_max`, the last ones first.
2. If the highest throughput of an instance is more than `throughput_ratio_max` times the lowest,
   the trajectories of the instance with the highest one that others would take. The paper returns
   all of them, of which some come back to where they were.

The paper's second rule has no condition: an instance without work, which cannot get any or is about
to get some, would make the busiest instance return its work in each cycle. Here the throughputs are
those after the waiting trajectories have been routed, and the rule applies only if routing the
returned ones anew yields more tokens than it costs, by the cost model:

- The throughput must rise by more than `migration_gain_min`. What it rises by beyond that is gained
  until the returned trajectories would have ended where they were, by past lengths.
- Their KV cache is computed again, which stops decoding where they go. A prompt's token costs the
  matrix products of a decode step's, `k3`.
"""

from collections.abc import Callable, Iterable, Sequence

from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.coordinator.strategies.length_aware import Sides, make_router
from plexrl.rollout.coordinator.strategies.routing import Queue, RoutingCandidate, route
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.instances.snapshot import InstanceLoad
from plexrl.rollout.staleness.buffers import Buffers

Work = Callable[[InstanceLoad], tuple[list[RoutingCandidate], list[RoutingCandidate]]]
"""Running and waiting trajectories of an instance in the engine's order, without those that have
ended since the snapshot."""
TokensLeft = Callable[[Iterable[RoutingCandidate]], float]
"""Tokens that trajectories are expected to draw still, in all."""


def to_migrate(
    settings: CoordinatorSettings,
    model: CostModel,
    loads: Sequence[InstanceLoad],
    buffers: Buffers,
    queue: Iterable[RoutingCandidate],
    work: Work,
    tokens_left: TokensLeft,
    sides: Sides | None = None,
) -> list[tuple[InstanceLoad, list[RoutingCandidate]]]:
    """The trajectories that instances return. `queue`: what is waiting to be routed. Nothing
    changes."""
    if settings.migration == "none":
        return []
    excess = {
        load.index: work(load)[1][settings.waiting_max :]
        for load in loads
        if load.waiting > settings.waiting_max
    }
    moved = _to_redistribute(settings, model, loads, buffers, queue, work, tokens_left, sides)
    if moved is not None:
        busiest, leaving = moved
        gone = {each.trajectory for each in leaving}
        kept = (each for each in excess.get(busiest.index, ()) if each.trajectory not in gone)
        excess[busiest.index] = [*leaving, *kept]
    return [(load, excess[load.index]) for load in loads if load.index in excess]


def _to_redistribute(
    settings: CoordinatorSettings,
    model: CostModel,
    loads: Sequence[InstanceLoad],
    buffers: Buffers,
    queue: Iterable[RoutingCandidate],
    work: Work,
    tokens_left: TokensLeft,
    sides: Sides | None,
) -> tuple[InstanceLoad, list[RoutingCandidate]] | None:
    """The instance with the highest throughput, and which of its work goes to others."""
    if _busiest(settings, model, loads) is None:
        return None
    before = [load.copy() for load in loads]
    tried = buffers.copy()
    route(make_router(settings, model, before, tried, sides), tried, queue)
    busiest = _busiest(settings, model, before)
    if busiest is None:
        return None
    after = [load.copy() for load in before]
    running, waiting = work(busiest)
    emptied = next(load for load in after if load.index == busiest.index)
    tokens = sum(trajectory.length for trajectory in running)
    emptied.kv_cache = max(0.0, emptied.kv_cache - model.k5 * tokens)
    emptied.running = max(0, emptied.running - len(running))
    emptied.waiting = 0
    router = make_router(settings, model, after, tried, sides)
    routed = route(router, tried, Queue(running + waiting))
    rate = model.throughput(busiest.kv_cache, busiest.running)
    gained = _throughput(model, after) - _throughput(model, before)
    gained -= settings.migration_gain_min * rate
    leaving = [(each, load) for each, load in routed if load is not emptied]
    if not running or not leaving or gained <= 0:
        return None
    lasting_s = tokens_left(running) / rate
    if gained * lasting_s <= _tokens_lost(model, leaving, running):
        return None
    return busiest, [each for each, _ in leaving]


def _throughput(model: CostModel, loads: Sequence[InstanceLoad]) -> float:
    """Tokens per second of all instances."""
    return sum(model.throughput(load.kv_cache, load.running) for load in loads)


def _tokens_lost(
    model: CostModel,
    routed: Iterable[tuple[RoutingCandidate, InstanceLoad]],
    running: Iterable[RoutingCandidate],
) -> float:
    """Tokens that are not drawn while the KV cache of what was running is computed again."""
    computed = {each.trajectory for each in running}
    return sum(
        model.k3 * candidate.length * model.throughput(load.kv_cache, load.running)
        for candidate, load in routed
        if candidate.trajectory in computed
    )


def _busiest(
    settings: CoordinatorSettings, model: CostModel, loads: Sequence[InstanceLoad]
) -> InstanceLoad | None:
    """The instance with the highest throughput, if the lowest one is far below it."""
    rates = [model.throughput(load.kv_cache, load.running) for load in loads]
    if max(rates) <= settings.throughput_ratio_max * min(rates):
        return None
    return loads[rates.index(max(rates))]
