"""Instances for long samples and for the others (StreamRL §5.3, Alg. 2).

A decode step takes longer the more samples it has, so samples that are expected to be long run in
small batches on instances of their own, and the others in large batches on the rest.

The paper adds the times of the two sides. They generate at the same time, so here the longer of the
two counts, and their sum only between divisions that are equal in that. The paper marks a part of
the prompts as long; here samples are counted, since the samples of a prompt need not be equally
many.

The paper takes the P50 and the P90 of recent lengths as the means of both sides. Here they are the
means: with two modes, as in the lengths of DeepSeek R1, the median is far from the mean of those
that are not long.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError
from plexrl.rollout.instances.cost_model import CostModel

LONG_PART = 0.2
"""Part of the samples that count as long (alpha)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSpread:
    """Response lengths of recent samples, in tokens."""

    long: float
    """Mean of the longest `LONG_PART`."""
    regular: float
    """Mean of the others."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "LengthSpread":
        """The spread of these lengths. Raises InvalidRequestError: there are none."""
        if not lengths:
            raise InvalidRequestError("there are no lengths: generate some samples first")
        ordered = sorted(lengths, reverse=True)
        count = max(1, int(LONG_PART * len(ordered)))
        long, regular = ordered[:count], ordered[count:] or ordered
        return cls(long=sum(long) / len(long), regular=sum(regular) / len(regular))


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How many instances generate what."""

    long: int
    """N_l: instances for long samples."""
    regular: int
    """N_r: instances for the others."""
    generation_s: float
    """Expected seconds until both sides have ended."""


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


def divide(
    model: CostModel,
    *,
    long: int,
    regular: int,
    prompt_tokens: float,
    spread: LengthSpread,
    instances: int,
    kv_budget: float,
) -> Division | None:
    """The division of the instances that ends first; None: all instances serve all samples.

    `long` and `regular` are numbers of samples; `kv_budget` is that of the smallest instance. Of
    equally good divisions, the one with the fewest instances for long samples.
    """
    if not long or not regular or instances < 2:
        return None
    best: tuple[float, float, int] | None = None
    for count in range(1, instances):
        sides = (
            latency_s(model, -(-long // count), prompt_tokens, spread.long, kv_budget),
            latency_s(
                model, -(-regular // (instances - count)), prompt_tokens, spread.regular, kv_budget
            ),
        )
        found = (max(sides), sum(sides), count)
        if best is None or found < best:
            best = found
    assert best is not None
    return Division(long=best[2], regular=instances - best[2], generation_s=best[0])
