"""When a rollout gives up half of its GPUs before its round is complete (Flexes Alg. 1).

A round is looked at when 20 % of its samples are generated, and again after each further 5 %, up to
50 %. If both criteria of Flexes §4.4 hold, instances are freed, once in a round:

1. Half of the GPUs, rounded down, can be freed by freeing whole instances. An instance is one or
   more tensor-parallel groups, so none is split.
2. The projected peak KV cache of the samples that are left fits into the other instances.

The projection takes the final length of a sample that has `n` tokens as the mean of the past
lengths beyond `n`, or as `response_tokens_max` if no past response was longer. All samples go on by
one token at a time, also those that wait. The paper does not say how it projects.

Of several halves, the one with the most GPUs that the job's own trainer also has is freed: only
there does the trainer gain from it. Of these the one whose instances have the least KV cache, then
the one with the fewest tokens to be computed again; ties go by the order of instance ids.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate

from plexrl.errors import InvalidRequestError
from plexrl.rollout.trajectories.record import InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDownSettings:
    """When a round is looked at. The defaults are those of the paper."""

    response_tokens_max: int
    """Longest response."""
    first_percent: int = 20
    """Percentage of the samples that are generated at the first look."""
    last_percent: int = 50
    """Percentage beyond which there is no look."""
    step_percent: int = 5
    """Percentage that is generated from one look to the next."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if (value := getattr(self, each.name)) < 1:
                raise InvalidRequestError(f"{each.name} is {value}: set it to 1 or more")
        if not self.first_percent <= self.last_percent <= 100:
            raise InvalidRequestError(
                f"first_percent is {self.first_percent} and last_percent {self.last_percent}: set "
                "them in ascending order, up to 100"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInstance:
    """An instance that takes part in the round."""

    instance: InstanceId
    gpus: int
    """GPUs of all its tensor-parallel groups."""
    kv_tokens: float
    """Tokens for which it has KV cache."""
    is_with_trainer: bool = False
    """The job's trainer has its GPUs, too, in turns with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedSample:
    """A sample that is not generated."""

    instance: InstanceId | None
    """None: it waits for an instance."""
    prompt_tokens: int
    response_tokens: int
    """Generated so far."""


@dataclass(slots=True, kw_only=True)
class HeldScaleDown:
    """The state between two looks."""

    looked_at: int = 0
    """Samples of the round that were generated at the latest look."""
    is_scaled_down: bool = False
    """In this round instances were freed."""
    freed: list[InstanceId] = field(default_factory=list)
    """Instances that are still free."""


class ScaleDown:
    """The decision, at most once in a round."""

    def __init__(self, settings: ScaleDownSettings, held: HeldScaleDown | None = None) -> None:
        """`held` is the state of an earlier one, of which this becomes the owner."""
        self._settings = settings
        self.held = HeldScaleDown() if held is None else held

    def begin_round(self) -> None:
        """Begin a round: all instances take part, and no sample is generated yet."""
        self.held.looked_at = 0
        self.held.is_scaled_down = False
        self.held.freed = []

    def is_due(self, generated: int, samples: int) -> bool:
        """Whether `decide` would look, when so many of all samples of the round are generated."""
        held, settings = self.held, self._settings
        percent = 100 * generated
        return (
            not held.is_scaled_down
            and settings.first_percent * samples <= percent <= settings.last_percent * samples
            and 100 * (generated - held.looked_at) >= settings.step_percent * samples
        )

    def decide(
        self,
        generated: int,
        samples: int,
        instances: Sequence[RoundInstance],
        unfinished: Sequence[UnfinishedSample],
        past: Sequence[int],
    ) -> tuple[InstanceId, ...]:
        """The instances to free now, by id; they take part in no later look of the round.

        `generated` of all `samples` of the round are complete, `unfinished` are those that still
        have to be generated. `past` are the lengths of past responses, in tokens.
        """
        if not self.is_due(generated, samples):
            return ()
        self.held.looked_at = generated
        freed = half_of(instances, unfinished)
        kept = sum(instance.kv_tokens for instance in instances if instance.instance not in freed)
        if not freed or self.projected_peak(unfinished, past) > kept:
            return ()
        self.held.is_scaled_down = True
        self.held.freed = list(freed)
        return freed

    def projected_peak(self, unfinished: Iterable[UnfinishedSample], past: Iterable[int]) -> int:
        """The most tokens of KV cache that the `unfinished` samples are expected to have at one
        time; `past` as for `decide`."""
        left = self._tokens_left(unfinished, sorted(past))
        # Just before a sample ends, all that end with it or later have grown by what it lacked.
        left.sort(reverse=True)
        held = accumulate(tokens for _, tokens in left)
        return max(
            (
                total + count * steps
                for count, (total, (steps, _)) in enumerate(zip(held, left, strict=True), 1)
            ),
            default=0,
        )

    def _tokens_left(
        self, unfinished: Iterable[UnfinishedSample], past: Sequence[int]
    ) -> list[tuple[int, int]]:
        """For each sample the tokens that are still to be generated, and those that it has. `past`
        ascends."""
        limit = self._settings.response_tokens_max
        # Sums of the lengths from each position to the end.
        sums = [*accumulate(reversed(past))]
        found = []
        for each in unfinished:
            longer = len(past) - bisect_right(past, each.response_tokens)
            final = -(-sums[longer - 1] // longer) if longer else limit
            steps = max(0, min(final, limit) - each.response_tokens)
            found.append((steps, each.prompt_tokens + each.response_tokens))
        return found


def half_of(
    instances: Sequence[RoundInstance], unfinished: Iterable[UnfinishedSample]
) -> tuple[InstanceId, ...]:
    """The instances that have half of all GPUs, rounded down, by id; see the module for which. None
    of them: there is no such half."""
    half = sum(instance.gpus for instance in instances) // 2
    tokens: dict[InstanceId | None, int] = {}
    for sample in unfinished:
        lost = sample.prompt_tokens + sample.response_tokens
        tokens[sample.instance] = tokens.get(sample.instance, 0) + lost
    ordered = sorted(instances, key=lambda snapshot: snapshot.instance)
    # For each number of GPUs the best instances: GPUs of the trainer (negative), KV cache, tokens,
    # and their indices as bits.
    best: dict[int, tuple[int, float, int, int]] = {0: (0, 0.0, 0, 0)}
    for index, each in enumerate(ordered):
        for gpus, (trainer, kv, lost, chosen) in sorted(best.items(), reverse=True):
            total = gpus + each.gpus
            with_it = (
                trainer - each.gpus * each.is_with_trainer,
                kv + each.kv_tokens,
                lost + tokens.get(each.instance, 0),
                chosen | 1 << index,
            )
            if total <= half and (total not in best or with_it < best[total]):
                best[total] = with_it
    *_, chosen = best.get(half, (0, 0.0, 0, 0))
    return tuple(each.instance for index, each in enumerate(ordered) if chosen >> index & 1)
