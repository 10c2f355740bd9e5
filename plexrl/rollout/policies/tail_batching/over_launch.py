"""How much a short round starts beyond what is trained: as much as makes batches soonest.

Flexes (§3) starts 1.25 times as many prompts, and samples of each, in every short round. That pays
while the longest samples run nearly alone. If instances are busy to the end of a round, what is
started beyond the need slows all samples down, and it is generated twice. So the cost model and the
lengths that were seen decide between the factors of the policy, each of them alone, and none: the
choice with the least expected seconds for a batch is taken. It must gain `GAIN_MIN`, since the
expected time is not the true one.

The prompts that a short round defers are trained in long rounds. With `e` extra prompts for a batch
of `P`, a long round follows on `P / e` short ones, so a batch takes `(short + e / P · long) / (1 +
e / P)` seconds. Both are those of simulated rounds: samples are dealt to all instances and decode
by the cost model, and a prompt whose samples are complete gives up its others.

Lengths are those of the latest prompts, of whole cycles of short rounds and a long one. Only when a
cycle has ended have they no preference for short ones; so the choice is made then, and holds until
the next long round. While no lengths are known, nothing is started beyond the need.

The choice is made between two events of a rollout, and all rollouts of a service wait for it. So it
has bounds: of a large batch fewer prompts are simulated, each of which stands for several.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plexrl.rollout.instances.cost_model import CostModel

GAIN_MIN = 1.02
"""Least expected gain over rounds that start no more than is trained."""
DRAWS = 2
"""Simulated short rounds of each choice, of different prompts."""
ENDS_PART = 16
"""A simulated step ends when one sample of so many has ended."""
SIMULATED_MAX = 4096
"""Samples of a simulated round, about."""
QUEUED_PART = 256
"""While samples wait for space, a simulated step ends no sooner than one of so many samples of the
round has ended."""
STEPS_MAX = 512
"""Simulated steps of a round. If it needs more, nearly all of its samples wait for space."""
SPREAD = (5**0.5 - 1) / 2
"""The fractional parts of its multiples are spread evenly, however many there are."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Extra(NamedTuple):
    """What a short round starts beyond what is trained."""

    groups: int
    samples: int
    """Of each group."""


class SeenPrompt(NamedTuple):
    """A trained prompt."""

    prompt_tokens: int
    lengths: tuple[int, ...]
    """Tokens of its responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSetting:
    """What the time of a round depends on, beside the lengths."""

    model: CostModel
    kv_budgets: Sequence[float]
    """KV cache of each instance that generates, in the unit of `CostModel.k5`."""
    batch_groups: int
    """Prompts that are trained."""
    group_size: int
    """Samples of each that are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenExtra:
    """A choice, and why."""

    extra: Extra = Extra(0, 0)
    gain: float = 1.0
    """Expected seconds for a batch without extra, by those with the best extra; 1: nothing is
    known."""


def choose_extra(setting: RoundSetting, most: Extra, seen: Sequence[SeenPrompt]) -> ChosenExtra:
    """The extra, at most `most`, with the least expected seconds for a batch. It simulates ten
    rounds of `SIMULATED_MAX` samples, each in about 60 numpy steps over its samples."""
    none = Extra(0, 0)
    if most == none or not seen or not setting.kv_budgets:
        return ChosenExtra()
    prompts = setting.batch_groups + most.groups
    samples = setting.group_size + most.samples
    simulated = _thinned(setting, -(-prompts * samples // SIMULATED_MAX))
    part = simulated.batch_groups / setting.batch_groups
    choices = {most, Extra(most.groups, 0), Extra(0, most.samples)} - {none}
    fewer = {
        extra: Extra(max(1, round(part * extra.groups)) if extra.groups else 0, extra.samples)
        for extra in sorted(choices)
    }
    if (simulated.batch_groups + fewer[most].groups) * samples > 2 * SIMULATED_MAX:
        # Even few prompts have too many samples.
        return ChosenExtra()
    plain_s = batch_s(simulated, none, seen)
    if not 0 < plain_s < np.inf:
        return ChosenExtra()
    times = {extra: batch_s(simulated, fewer[extra], seen) for extra in fewer}
    best = min(times, key=lambda extra: times[extra])
    gain = plain_s / times[best] if times[best] else 1.0
    return ChosenExtra(extra=best if gain >= GAIN_MIN else none, gain=gain)


def _thinned(setting: RoundSetting, times: int) -> RoundSetting:
    """A round of so many times fewer prompts, each of which takes as many times the space and the
    seconds, so that steps are as long."""
    if times == 1:
        return setting
    batch_groups = max(1, setting.batch_groups // times)
    factor, model = setting.batch_groups / batch_groups, setting.model
    return replace(
        setting,
        model=replace(model, k1=model.k1 * factor, k3=model.k3 * factor),
        kv_budgets=[budget / factor for budget in setting.kv_budgets],
        batch_groups=batch_groups,
    )


def batch_s(setting: RoundSetting, extra: Extra, seen: Sequence[SeenPrompt]) -> float:
    """Expected seconds of generation for one batch, on average over short and long rounds;
    infinite: a round needs more than `STEPS_MAX` simulated steps."""
    short_s, deferred = 0.0, list[SeenPrompt]()
    for draw in range(DRAWS):
        prompts = _draw(setting.batch_groups + extra.groups, seen, draw)
        seconds, late = _round_s(setting, prompts, extra.samples)
        short_s += seconds / DRAWS
        deferred += late
    if not extra.groups:
        return short_s
    long_s, _ = _round_s(setting, _draw(setting.batch_groups, deferred, 0), 0)
    part = extra.groups / setting.batch_groups
    return (short_s + part * long_s) / (1 + part)


def _draw(count: int, seen: Sequence[SeenPrompt], draw: int) -> list[SeenPrompt]:
    """Prompts as the seen ones, spread evenly over them in the order of their longest responses."""
    ordered = sorted(seen, key=lambda prompt: (max(prompt.lengths), prompt))
    parts = ((0.5 + (draw * count + index) * SPREAD) % 1.0 for index in range(count))
    return [ordered[int(part * len(ordered))] for part in parts]


def _round_s(
    setting: RoundSetting, prompts: Sequence[SeenPrompt], extra_samples: int
) -> tuple[float, list[SeenPrompt]]:
    """Seconds until a batch of the prompts is complete, and the prompts that then are not."""
    size = setting.group_size + extra_samples
    lengths = np.array(
        [[each.lengths[at % len(each.lengths)] for at in range(size)] for each in prompts]
    )
    tokens = np.repeat([float(each.prompt_tokens) for each in prompts], size)
    simulated = _SimulatedRound(setting, lengths.ravel().astype(float), tokens, size)
    steps = 0
    while simulated.complete.sum() < setting.batch_groups:
        if steps == STEPS_MAX:
            simulated.seconds = float("inf")
            break
        simulated.advance()
        steps += 1
    order = simulated.complete_s.argsort(kind="stable")
    return simulated.seconds, [prompts[index] for index in order[setting.batch_groups :]]


class _SimulatedRound:
    """Samples on instances, `[instance, place]`; places without a sample are done."""

    def __init__(self, setting: RoundSetting, lengths: Floats, prompts: Floats, size: int) -> None:
        """`lengths`, `prompts`: tokens of each sample and of its prompt; `size`: samples of it."""
        dealt = _deal(len(lengths), len(setting.kv_budgets))
        self._setting = setting
        self._groups = dealt // size
        self._left = lengths[dealt]
        self._kv = setting.model.k5 * prompts[dealt]
        self._budgets = np.array(setting.kv_budgets)[:, None]
        self._unfinished = dealt >= 0
        self._done = np.zeros(len(lengths) // size, dtype=np.int64)
        self.seconds = 0.0
        self.complete_s = np.full(len(self._done), np.inf)
        """When each prompt was complete."""

    @property
    def complete(self) -> NDArray[np.bool_]:
        """Prompts of which enough samples are done."""
        found: NDArray[np.bool_] = self._done >= self._setting.group_size
        return found

    def advance(self) -> None:
        """Decodes until some samples have ended. The first ones of each queue run, if they fit."""
        model = self._setting.model
        held = np.where(self._unfinished, self._kv, 0.0)
        fits = self._unfinished & (held.cumsum(axis=1) <= self._budgets)
        first = self._unfinished & (self._unfinished.cumsum(axis=1) == 1)
        running = fits | first
        count = running.sum(axis=1)
        kv = np.where(running, self._kv, 0.0).sum(axis=1)
        step_s = model.k1 * kv + np.maximum(model.k2, model.k3 * count) + model.k4
        ends_s = np.where(running, self._left * step_s[:, None], np.inf)
        total = int(count.sum())
        rank = total // ENDS_PART
        if total < self._unfinished.sum():
            rank = min(total - 1, max(rank, self._left.size // QUEUED_PART))
        lasting_s = float(np.partition(ends_s.ravel(), rank)[rank])
        steps = np.where(running, np.minimum(lasting_s / step_s[:, None], self._left), 0.0)
        self._left -= steps
        self._kv += model.k5 * steps
        self.seconds += lasting_s
        ended = running & (ends_s <= lasting_s)
        np.add.at(self._done, self._groups[ended], 1)
        self.complete_s[self.complete & np.isinf(self.complete_s)] = self.seconds
        self._unfinished &= ~ended & ~self.complete[self._groups]


def _deal(count: int, instances: int) -> Ints:
    """Indices that go in turn to each instance, `[instance, place]`; -1 for places without one."""
    places = -(-count // instances)
    dealt = np.full(places * instances, -1)
    dealt[:count] = np.arange(count)
    return dealt.reshape(places, instances).T
