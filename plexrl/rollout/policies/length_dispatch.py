"""Which instances generate what, by expected lengths (StreamRL §5.3, Alg. 2).

A decode step takes longer the more samples it has, so samples that are expected to be long may run
in small batches on instances of their own, and the others in large batches on the rest. Whether
that is sooner depends on the ranks: a long sample that they miss runs in a large batch, and ends
last. So three ways are compared by the time that generation is expected to take:

- all instances serve all samples, the longest first;
- the division of StreamRL Alg. 2: the least sum of both sides' times, with the P90 and the P50 of
  past lengths;
- the division whose slower side ends first, with the means of the longest fifth and of the others:
  with two modes, as in the lengths of DeepSeek R1, the median is far from the mean.

The expected time is that of whole batches, each instance with its samples in order. Their lengths
are what is expected, times what past responses of about the same expected length were of it. So the
ranker's own misses decide how much a division risks. A division is chosen only if it gains
`GAIN_MIN` on average over several draws of the misses, and loses in none of them.

The paper marks a part of the samples as long; here prompts are counted, each with its samples.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.trajectories.lengths import RankedLength

LONG_PART = 0.2
"""Part of the samples that count as long (alpha)."""
GAIN_MIN = 1.03
"""Least expected gain of a division over none: the simulated time is not the true one."""
DRAWS = 4
"""Draws of the misses."""
SAMPLES_MAX = 2048
"""Most samples that are simulated; in a larger batch one stands for several."""
SAMPLES_KEPT = 8
"""So many samples of a prompt, or all, are simulated before prompts are left out."""
RANKED_MIN = 32
"""Past responses with an expected length, from which on misses are known."""
NEAR_PART = 0.05
"""Part of the past responses that are of about the same expected length."""
SPREAD = (5**0.5 - 1) / 2
"""The fractional parts of its multiples are spread evenly, however many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSpread:
    """Lengths that stand for the two sides, in tokens."""

    long: float
    regular: float

    @classmethod
    def means(cls, lengths: Sequence[int]) -> "LengthSpread":
        """Mean of the longest `LONG_PART` of one length or more, and mean of the others."""
        ordered = sorted(lengths, reverse=True)
        count = max(1, int(LONG_PART * len(ordered)))
        return cls(long=fmean(ordered[:count]), regular=fmean(ordered[count:] or ordered))

    @classmethod
    def quantiles(cls, lengths: Sequence[int]) -> "LengthSpread":
        """P90 and P50 of one length or more, as in the paper."""
        ordered = sorted(lengths)
        return cls(
            long=float(ordered[int(0.9 * len(ordered))]),
            regular=float(ordered[int(0.5 * len(ordered))]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedBatch:
    """What is to be generated, and where."""

    expected: Sequence[int]
    """Expected tokens of a response to each prompt, descending; 0: it is not known."""
    samples: int
    """Samples of each prompt."""
    prompt_tokens: float
    """Mean length of a prompt."""
    instances: int
    kv_budget: float
    """KV cache of the smallest instance, in the unit of `CostModel.k5`."""

    @property
    def long(self) -> int:
        """Number of long prompts, the first ones."""
        return int(LONG_PART * sum(tokens > 0 for tokens in self.expected))


def choose_division(model: CostModel, batch: DispatchedBatch, past: Sequence[RankedLength]) -> int:
    """Number of instances that serve only long prompts; 0: all instances serve all prompts.

    `past`: responses with what was expected of them, in any order. Without enough of them nothing
    is divided. It takes about 2 µs for each simulated sample (`SAMPLES_MAX`), draw and way.
    """
    if batch.instances < 2 or not batch.long or len(past) < RANKED_MIN:
        return 0
    lengths = [sample.tokens for sample in past]
    ways = {
        _division(model, batch, LengthSpread.quantiles(lengths), sum),
        _division(model, batch, LengthSpread.means(lengths), max),
    }
    batch, model = thin(batch, model)
    draws = [_draw(batch, sorted(past), draw) for draw in range(DRAWS)]
    undivided = [generation_s(model, batch, lengths, 0) for lengths in draws]
    best, least_s = 0, fmean(undivided) / GAIN_MIN
    for long in sorted(ways):
        times = [generation_s(model, batch, lengths, long) for lengths in draws]
        loses = any(time > other for time, other in zip(times, undivided, strict=True))
        if not loses and fmean(times) < least_s:
            best, least_s = long, fmean(times)
    return best


def latency_s(
    model: CostModel, samples: int, prompt_tokens: float, length: float, kv_budget: float
) -> float:
    """Expected seconds in which one instance generates so many samples of one length (Eq. 2).

    `PTL(BS) · L · ⌈M / BS⌉`, with the largest `BS` of which all fit into the KV cache when they
    end. The per-token latency is that of a step in the middle of the responses.
    """
    if not samples:
        return 0.0
    fitting = int(kv_budget / (model.k5 * (prompt_tokens + length)))
    batch = max(1, min(samples, fitting))
    kv_cache = model.k5 * batch * (prompt_tokens + length / 2)
    return model.step_s(kv_cache, batch) * length * -(-samples // batch)


def generation_s(
    model: CostModel, batch: DispatchedBatch, lengths: Sequence[Sequence[int]], long: int
) -> float:
    """Seconds until all instances have generated responses of these lengths, by prompt, if `long`
    of them serve long prompts only."""
    first = [tokens for prompt in lengths[: batch.long] for tokens in prompt]
    others = [tokens for prompt in lengths[batch.long :] for tokens in prompt]
    shares: list[list[int]] = []
    if long:
        shares += [first[at::long] for at in range(long)]
    else:
        others = first + others
    rest = batch.instances - long
    shares += [others[at::rest] for at in range(rest)]
    return max(_drain_s(model, share, batch.prompt_tokens, batch.kv_budget) for share in shares)


def thin(batch: DispatchedBatch, model: CostModel) -> tuple[DispatchedBatch, CostModel]:
    """At most `SAMPLES_MAX` samples for the batch, and a model in which each of them loads its
    instance as all those for which it stands."""
    prompts = len(batch.expected)
    if prompts * batch.samples <= SAMPLES_MAX:
        return batch, model
    samples = min(batch.samples, max(SAMPLES_KEPT, SAMPLES_MAX // prompts))
    kept = min(prompts, SAMPLES_MAX // samples)
    weight = prompts * batch.samples / (kept * samples)
    thinned = replace(
        batch,
        # The longest one of equal parts: the longest of all may run alone for long.
        expected=[batch.expected[at * prompts // kept] for at in range(kept)],
        samples=samples,
        kv_budget=batch.kv_budget / weight,
    )
    return thinned, replace(model, k1=model.k1 * weight, k3=model.k3 * weight)


def _division(
    model: CostModel,
    batch: DispatchedBatch,
    spread: LengthSpread,
    objective: Callable[[tuple[float, float]], float],
) -> int:
    """The number of instances for long prompts with the least objective of both sides' times; of
    equals the one with the least sum, then the smallest."""
    long = batch.samples * batch.long
    regular = batch.samples * len(batch.expected) - long
    prompt, kv = batch.prompt_tokens, batch.kv_budget
    found = []
    for count in range(1, batch.instances):
        rest = batch.instances - count
        sides = (
            latency_s(model, -(-long // count), prompt, spread.long, kv),
            latency_s(model, -(-regular // rest), prompt, spread.regular, kv),
        )
        found.append((objective(sides), sum(sides), count))
    return min(found)[2]


def _draw(batch: DispatchedBatch, past: Sequence[RankedLength], draw: int) -> list[list[int]]:
    """Lengths of the responses to each prompt; `past` ascends by what was expected."""
    known = [sample.expected for sample in past]
    longest = max(sample.tokens for sample in past)
    near = max(batch.samples, int(NEAR_PART * len(past)))
    found = []
    for index, expected in enumerate(batch.expected):
        part = (0.5 + (draw * len(batch.expected) + index) * SPREAD) % 1.0
        if not expected:
            first = int(part * len(past))
        else:
            equal = bisect_left(known, expected), bisect_right(known, expected)
            first = sum(equal) // 2 + int((part - 0.5) * max(near, equal[1] - equal[0]))
        # Members of a group were expected to be equally long, and lie next to each other.
        first = min(max(0, first), max(0, len(past) - batch.samples))
        lengths = []
        for each in range(batch.samples):
            miss = past[(first + each) % len(past)]
            tokens = miss.tokens * expected / miss.expected if expected else miss.tokens
            lengths.append(min(longest, max(1, round(tokens))))
        found.append(lengths)
    return found


def _drain_s(
    model: CostModel, lengths: Sequence[int], prompt_tokens: float, kv_budget: float
) -> float:
    """Seconds in which one instance generates responses in this order, each as soon as it fits with
    its whole length."""
    waiting, ends = deque(lengths), list[tuple[int, int]]()
    seconds, kv, held, done = 0.0, 0.0, 0.0, 0
    while waiting or ends:
        while waiting:
            whole = model.k5 * (prompt_tokens + waiting[0])
            if ends and held + whole > kv_budget:
                break
            tokens = waiting.popleft()
            held += whole
            kv += model.k5 * prompt_tokens
            heapq.heappush(ends, (done + tokens, tokens))
        count, steps = len(ends), ends[0][0] - done
        grown = model.k1 * model.k5 * count * (steps * (steps - 1) / 2)
        seconds += steps * model.step_s(kv, count) + grown
        kv += model.k5 * count * steps
        done += steps
        while ends and ends[0][0] == done:
            whole = model.k5 * (prompt_tokens + heapq.heappop(ends)[1])
            kv -= whole
            held -= whole
    return seconds
