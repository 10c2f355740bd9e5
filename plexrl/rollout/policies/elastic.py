"""How many instances generate, so that generation takes as long as training (StreamRL §4.2).

Generation gets slower faster than training as responses grow. The trainer's GPUs are tied together,
so only the number of instances changes. With the gap δ = generation - training of a step, and the
reduction δ' of the generation time by one more instance, an instance is added when δ ≥ δ': with it,
generation still takes at least as long as training.

The paper is silent on the following:

- *Removal.* An instance is removed when training takes longer than generation would without it, by
  `MARGIN`. It is the counterpart: training, not generation, is then the slower stage before and
  after it.
- *Noise.* Medians of the last steps count, `STEPS` of them with the same instances. Steps whose
  times differ from the true ones by 2 % at most never lead to a removal and an addition of the same
  instance. Noise may be larger: each change in the opposite direction of the one before doubles the
  steps that are needed, and each further change in the same direction halves them again.
- *Bias of the prediction.* δ' is the measured time, reduced in the ratio of the predictions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median

from plexrl.errors import InvalidRequestError
from plexrl.rollout.instances.cost_model import CostModel

STEPS = 3
"""Steps that decide together."""
STEPS_MAX = 48
"""Most of them, after many changes to and fro."""
MARGIN = 0.1
"""Part by which training has to take longer than generation would with one instance less."""


class InstanceChange(IntEnum):
    """The change of the number of instances."""

    REMOVE = -1
    NONE = 0
    ADD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Measured seconds of the two stages in one step, without the time for which they wait."""

    generation_s: float
    training_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceBounds:
    """Least and greatest number of instances."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise InvalidRequestError(
                f"from {self.least} to {self.most} instances: give at least 1, and not more than "
                "the most"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDecision:
    """A decision and what led to it."""

    change: InstanceChange
    generation_s: float
    """Median of the measured steps."""
    training_s: float
    predicted_s: float
    """Generation after the change; the present one if there is none."""


class StageBalance:
    """Decides after each step."""

    def __init__(self) -> None:
        self._times: list[StepTimes] = []
        """Times of the steps with the present instances."""
        self._needed = STEPS
        self._last = InstanceChange.NONE

    def restart(self) -> None:
        """The instances are others, or their number could not be changed: earlier steps tell
        nothing of those that follow."""
        self._times.clear()

    def refused(self) -> None:
        """An addition could not be had: the next one needs more steps."""
        self._last = InstanceChange.REMOVE
        self._times.clear()

    def decide(
        self,
        times: StepTimes,
        instances: int,
        bounds: InstanceBounds,
        predicted_s: Callable[[int], float],
    ) -> InstanceDecision | None:
        """The decision after a step with so many instances; None: too few steps were measured.

        `predicted_s` is the predicted generation time by the number of instances. After a change
        the caller tells when the instances are those that were asked for (`restart`).
        """
        self._times.append(times)
        del self._times[: -self._needed]
        if len(self._times) < self._needed:
            return None
        generation_s = median(time.generation_s for time in self._times)
        training_s = median(time.training_s for time in self._times)
        change, after_s = InstanceChange.NONE, generation_s

        def reached_s(count: int) -> float:
            return generation_s * predicted_s(count) / predicted_s(instances)

        if instances < bounds.least:
            change = InstanceChange.ADD
        elif instances > bounds.most:
            change = InstanceChange.REMOVE
        elif generation_s > training_s:
            # δ ≥ δ'
            if instances < bounds.most and reached_s(instances + 1) >= training_s:
                change = InstanceChange.ADD
        elif instances > bounds.least and reached_s(instances - 1) * (1 + MARGIN) <= training_s:
            change = InstanceChange.REMOVE
        if change is not InstanceChange.NONE:
            after_s = reached_s(instances + change)
            self._changed(change)
        return InstanceDecision(
            change=change, generation_s=generation_s, training_s=training_s, predicted_s=after_s
        )

    def _changed(self, change: InstanceChange) -> None:
        is_reversal = self._last == -change
        needed = 2 * self._needed if is_reversal else self._needed // 2
        self._needed = min(max(needed, STEPS), STEPS_MAX)
        self._last = change
        self._times.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    """The work that all instances together generate in a step."""

    samples: int
    prompt_tokens: float
    """Mean length of a prompt."""
    lengths: Sequence[int] = field(repr=False)
    """Lengths of recent responses, one or more, in tokens."""


def generation_s(
    model: CostModel, workload: StepWorkload, instances: int, kv_budget: float
) -> float:
    """Predicted seconds of the generation of a step by equal instances.

    An instance gets an equal part of the samples, whose lengths are quantiles of the recent ones.
    They run together, as many at a time as fit into its KV cache (`kv_budget`) when they end. Not
    less for fewer instances, while all of an instance's samples fit.
    """
    ordered = sorted(workload.lengths)
    count = -(-workload.samples // instances)
    mean = workload.prompt_tokens + sum(ordered) / len(ordered)
    fitting = max(1, int(kv_budget / (model.k5 * mean)))
    waves = -(-count // fitting)
    together = -(-count // waves)
    seconds, before = 0.0, 0.0
    for index in range(together):
        length = ordered[int((index + 0.5) / together * len(ordered))]
        running = together - index
        cached = running * (workload.prompt_tokens + (before + length) / 2)
        seconds += (length - before) * model.step_s(model.k5 * cached, running)
        before = length
    return waves * seconds


class StageClock:
    """Measures how long generation and training take in each step, without the time for which they
    wait. Times never decrease."""

    def __init__(self) -> None:
        self._at: float | None = None
        """None: no step has begun."""
        self._generates = False
        self._trains = True
        self._generation_s = 0.0
        self._training_s = 0.0

    def note(
        self, now: float, *, generates: bool | None = None, trains: bool | None = None
    ) -> None:
        """Note which stages work from now on; None: the same as before."""
        if self._at is not None:
            self._generation_s += (now - self._at) * self._generates
            self._training_s += (now - self._at) * self._trains
            self._at = now
        if generates is not None:
            self._generates = generates
        if trains is not None:
            self._trains = trains

    def begin_step(self, now: float) -> StepTimes | None:
        """A step begins; returns the times of the one before. None: it is the first one."""
        self.note(now)
        ended = None
        if self._at is not None:
            ended = StepTimes(generation_s=self._generation_s, training_s=self._training_s)
        self._at = now
        self._generation_s = self._training_s = 0.0
        return ended
