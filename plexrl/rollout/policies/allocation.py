"""GPUs for generation and for training (StreamRL Alg. 1).

Both stages run at the same time on the samples of neighbouring steps, so a step takes as long as
the slower one. A stage gets whole units: instances, or replicas of the trainer. What a stage would
take with so many units is an argument: a function of measured or simulated costs.

The paper gives the algorithm for one datacenter, and for two with a budget each. It compares H20
and H800 (Table 1, Fig. 12) by the throughput per cost, but names no way to choose the kinds.
`cheapest` tries all; without a limit of the time of a step it tends to few GPUs, because more of
them are used less well.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Generation or training, on one kind of GPU."""

    seconds: Callable[[int], float]
    """Time of one step with so many units, 1 or more; `inf` if they cannot run it."""
    unit_gpus: int = 1
    """GPUs of an instance, or of a replica of the trainer."""

    def __post_init__(self) -> None:
        if self.unit_gpus < 1:
            raise InvalidRequestError(f"unit_gpus is {self.unit_gpus}: set it to 1 or more")

    def times(self, gpus: int) -> list[float]:
        """Seconds of a step with 1, 2, … units, as many as so many GPUs hold.

        Raises:
            InvalidRequestError: the GPUs hold no unit, or a time is negative or no number.
        """
        if gpus < self.unit_gpus:
            raise InvalidRequestError(
                f"{gpus} GPUs hold no unit of {self.unit_gpus}: give more GPUs, or lower "
                "tensor_parallel or the other degrees of the unit"
            )
        found = [self.seconds(units) for units in range(1, gpus // self.unit_gpus + 1)]
        for units, each in enumerate(found, 1):
            if not each >= 0:
                raise InvalidRequestError(f"the time with {units} units is {each}: give 0 or more")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAllocation:
    """Units of both stages, and what a step takes with them."""

    instances: int
    trainers: int
    gpus: int
    """GPUs of both stages."""
    generation_s: float
    training_s: float

    @property
    def iteration_s(self) -> float:
        """Seconds of a step: those of the slower stage."""
        return max(self.generation_s, self.training_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """GPUs of one kind that can be had."""

    gpus: int
    price: float
    """Price of one GPU; only the ratio of prices matters."""

    def __post_init__(self) -> None:
        if self.gpus < 1 or not (isfinite(self.price) and self.price > 0):
            raise InvalidRequestError(
                f"gpus is {self.gpus} and price {self.price}: give 1 GPU or more, at a price above "
                "0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedAllocation:
    """An allocation on two kinds of GPU, which may be the same."""

    generation: str
    """Kind of the instances' GPUs."""
    training: str
    """Kind of the trainer's GPUs."""
    allocation: GpuAllocation
    price: float
    """Price of all GPUs, as long as they are held."""

    @property
    def cost(self) -> float:
        """Cost of a step: the price for its time. Its inverse is the throughput per cost."""
        return self.price * self.allocation.iteration_s


def split(generation: Stage, training: Stage, gpus: int) -> GpuAllocation:
    """The fastest division of `gpus` GPUs of one datacenter.

    Of equally fast divisions, the one with the fewest GPUs, then with the fewest instances.

    Raises:
        InvalidRequestError: the GPUs do not hold one unit of each stage, or no division can run.
    """
    found = _divisions(generation, training, gpus)
    if not found:
        raise InvalidRequestError(
            f"{gpus} GPUs hold no instance of {generation.unit_gpus} and trainer of "
            f"{training.unit_gpus}: give more GPUs"
        )
    return _runnable(
        min(
            found,
            key=lambda allocation: (allocation.iteration_s, allocation.gpus, allocation.instances),
        )
    )


def shrink(
    generation: Stage, training: Stage, *, generation_gpus: int, training_gpus: int
) -> GpuAllocation:
    """The allocation in two datacenters, one for each stage: the slower stage has all of its
    budget, and the faster one as many units as bring its time nearest to that.

    As in the paper, that may be slightly above the time of the slower stage. Of equally near
    numbers of units, the least.

    Raises:
        InvalidRequestError: a budget holds no unit of its stage, or a stage cannot run on it.
    """
    generating = generation.times(generation_gpus)
    training_times = training.times(training_gpus)
    slowest = max(generating[-1], training_times[-1])
    if generating[-1] < training_times[-1]:
        instances, trainers = _nearest(generating, slowest), len(training_times)
    else:
        instances, trainers = len(generating), _nearest(training_times, slowest)
    return _runnable(
        _allocation(generation, training, generating, training_times, instances, trainers)
    )


def cheapest(
    kinds: Mapping[str, GpuKind],
    generation: Mapping[str, Stage],
    training: Mapping[str, Stage],
    *,
    iteration_s_max: float = inf,
) -> PricedAllocation:
    """The kinds and numbers of GPUs with the highest throughput per cost.

    `generation` and `training` are the stages by the kind of GPU, only of kinds on which they may
    run. Both on one kind share its GPUs. `iteration_s_max` is the longest time of a step. Of
    equally cheap ones, the fastest, then the one with the fewest GPUs; then by name.

    Raises:
        InvalidRequestError: no kinds and numbers keep the limit.
    """
    found = [
        each
        for each in _price(kinds, generation, training)
        if each.allocation.iteration_s <= iteration_s_max and isfinite(each.cost)
    ]
    if not found:
        raise InvalidRequestError(
            f"no GPUs of these kinds run a step in {iteration_s_max:g} s: give more of them, or "
            "allow more time"
        )
    return min(
        found,
        key=lambda each: (
            *(each.cost, each.allocation.iteration_s, each.allocation.gpus),
            *(each.generation, each.training),
        ),
    )


def _price(
    kinds: Mapping[str, GpuKind], generation: Mapping[str, Stage], training: Mapping[str, Stage]
) -> Iterator[PricedAllocation]:
    for name, stage in generation.items():
        for other, trainer in training.items():
            if name == other:
                found = _divisions(stage, trainer, kinds[name].gpus)
            else:
                found = _pairs(stage, trainer, kinds[name].gpus, kinds[other].gpus)
            for allocation in found:
                price = (
                    allocation.instances * stage.unit_gpus * kinds[name].price
                    + allocation.trainers * trainer.unit_gpus * kinds[other].price
                )
                yield PricedAllocation(
                    generation=name, training=other, allocation=allocation, price=price
                )


def _divisions(generation: Stage, training: Stage, gpus: int) -> list[GpuAllocation]:
    """All numbers of units within one budget."""
    found = _pairs(generation, training, gpus - training.unit_gpus, gpus)
    return [allocation for allocation in found if allocation.gpus <= gpus]


def _pairs(
    generation: Stage, training: Stage, generation_gpus: int, training_gpus: int
) -> list[GpuAllocation]:
    """All numbers of units within two budgets."""
    if generation_gpus < generation.unit_gpus or training_gpus < training.unit_gpus:
        return []
    generating, times = generation.times(generation_gpus), training.times(training_gpus)
    return [
        _allocation(generation, training, generating, times, instances, trainers)
        for instances in range(1, len(generating) + 1)
        for trainers in range(1, len(times) + 1)
    ]


def _allocation(
    generation: Stage,
    training: Stage,
    generating: Sequence[float],
    times: Sequence[float],
    instances: int,
    trainers: int,
) -> GpuAllocation:
    return GpuAllocation(
        instances=instances,
        trainers=trainers,
        gpus=instances * generation.unit_gpus + trainers * training.unit_gpus,
        generation_s=generating[instances - 1],
        training_s=times[trainers - 1],
    )


def _nearest(times: Sequence[float], target: float) -> int:
    return min(range(1, len(times) + 1), key=lambda units: abs(times[units - 1] - target))


def _runnable(found: GpuAllocation) -> GpuAllocation:
    if not isfinite(found.iteration_s):
        raise InvalidRequestError(
            "the GPUs cannot run a step of both stages: give more of them, or units of more GPUs"
        )
    return found
