"""GPUs of generation and of training for a model, from simulated costs (StreamRL Alg. 1).

Generation of a batch is simulated, with equally many requests for each instance; training is the
cost model. Both
run at the same time, so a step takes as long as the slower one. The transfer of weights is left
out: it overlaps with both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from plexrl.errors import InvalidRequestError
from plexrl.latency.gpus import H20, H800, Gpu
from plexrl.latency.models import Model
from plexrl.rollout.policies.allocation import (
    GpuAllocation,
    GpuKind,
    PricedAllocation,
    Stage,
    cheapest,
    shrink,
    split,
)
from plexrl.sim.rollout.engine.instance import Instance
from plexrl.sim.rollout.setting import Setting
from plexrl.sim.rollout.workload import earlier_batch

PRICES = {H20.name.lower(): 1.0, H800.name.lower(): 2.85}
"""StreamRL Tab. 1: of a machine with 8 GPUs, and so of a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPool:
    """GPUs of one kind that can be had, in one place."""

    gpu: Gpu
    kind: GpuKind


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationChoice:
    """An allocation, and how it was found."""

    way: str
    """`one datacenter`, `two datacenters` or `least cost`."""
    found: PricedAllocation
    samples: int
    """Samples of a step."""

    @property
    def samples_per_cost(self) -> float:
        """Throughput normalised by the price of the GPUs (StreamRL Fig. 12)."""
        return self.samples / self.found.cost


def choices(
    setting: Setting,
    pools: Mapping[str, GpuPool],
    *,
    instance_gpus: int,
    trainer_gpus: int,
    step_s_max: float | None = None,
) -> list[AllocationChoice]:
    """The best allocation in each pool, and in each two with the instances in the first, then the
    one with the most samples by cost among all.

    `setting` has the model, the batch and the workload. An instance has `instance_gpus` GPUs, a
    replica of the trainer `trainer_gpus`. `step_s_max` limits the last one only; absent: it is not
    slower than the slowest of the others, since without a limit few GPUs are always cheapest.

    Raises:
        InvalidRequestError: `setting` has no model, the model does not fit, or no pool and no two
            of them can run it.
    """
    if setting.model is None:
        raise InvalidRequestError("an allocation needs a model: other GPUs give it other latencies")
    generation, training = {}, {}
    for name, pool in pools.items():
        one = _on(setting, setting.model, pool, instance_gpus)
        generation[name] = _generation(one, instance_gpus)
        training[name] = _training(one, trainer_gpus)
    kinds = {name: pool.kind for name, pool in pools.items()}
    found = list(_ways(kinds, generation, training))
    if step_s_max is None:
        step_s_max = max([each.allocation.iteration_s for _, each in found], default=inf)
    least = cheapest(kinds, generation, training, iteration_s_max=step_s_max)
    found.append(("least cost", least))
    samples = setting.batch_trajectories
    return [AllocationChoice(way=way, found=each, samples=samples) for way, each in found]


def batch_s(setting: Setting, instances: int) -> float:
    """Seconds in which so many instances generate a batch."""
    batch = earlier_batch(setting.workload, setting.batch_groups)
    ends_s = []
    for number in range(instances):
        instance = Instance(number, setting.costs)
        instance.route(batch[number::instances], 0.0)
        while (due := instance.next_event_s()) is not None:
            instance.advance(due)
        ends_s.append(instance.at_s)
    return max(ends_s)


def _ways(
    kinds: Mapping[str, GpuKind], generation: Mapping[str, Stage], training: Mapping[str, Stage]
) -> Sequence[tuple[str, PricedAllocation]]:
    found = []
    for name, kind in kinds.items():
        for other, others in kinds.items():
            stages = generation[name], training[other]
            needed = stages[0].unit_gpus, stages[1].unit_gpus
            if name == other and kind.gpus >= sum(needed):
                each = split(*stages, kind.gpus)
                found.append(("one datacenter", _price(name, other, each, stages, kinds)))
            elif name != other and kind.gpus >= needed[0] and others.gpus >= needed[1]:
                each = shrink(*stages, generation_gpus=kind.gpus, training_gpus=others.gpus)
                found.append(("two datacenters", _price(name, other, each, stages, kinds)))
    return found


def _price(
    name: str,
    other: str,
    found: GpuAllocation,
    stages: tuple[Stage, Stage],
    kinds: Mapping[str, GpuKind],
) -> PricedAllocation:
    price = (
        found.instances * stages[0].unit_gpus * kinds[name].price
        + found.trainers * stages[1].unit_gpus * kinds[other].price
    )
    return PricedAllocation(generation=name, training=other, allocation=found, price=price)


def _on(setting: Setting, model: Model, pool: GpuPool, instance_gpus: int) -> Setting:
    """The setting on the GPUs of a pool. Raises InvalidRequestError: the model does not fit."""
    here = replace(model, gpu=pool.gpu)
    return replace(setting, gpus=pool.kind.gpus, model=here, costs=here.costs(instance_gpus))


def _generation(setting: Setting, instance_gpus: int) -> Stage:
    @cache
    def seconds(units: int) -> float:
        return batch_s(setting, units)

    return Stage(seconds=seconds, unit_gpus=instance_gpus)


def _training(setting: Setting, trainer_gpus: int) -> Stage:
    tokens = sum(
        each.prompt_tokens + each.response_tokens
        for each in earlier_batch(setting.workload, setting.batch_groups)
    )
    return Stage(
        seconds=lambda units: setting.costs.train_s(tokens, units * trainer_gpus),
        unit_gpus=trainer_gpus,
    )
