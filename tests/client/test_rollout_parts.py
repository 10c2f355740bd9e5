"""The size of the parts of a batch: enough tokens, and more while the trainer is busy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.client.blocking.bounded_rollout import (
    BoundedRollout,
    PartSize,
    RolloutBatch,
    _Row,
    _TrainedRow,
)
from plexrl.client.data.results import Sample
from plexrl.errors import InvalidRequestError

if TYPE_CHECKING:
    from plexrl.client.blocking.bounded_rollout import _Feeder

SAMPLES = 2
PROMPT = [3, 4]


class Barrier:
    def __init__(self) -> None:
        self.is_done = False

    def done(self) -> bool:
        return self.is_done


class Scripted(BoundedRollout):
    """A rollout whose samples are complete by a script: `[answers][rows]`, a row is the number of
    its prompt and its tokens. It is its own trainer, which is done with a part when told."""

    def __init__(self, script: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._script = [list(each) for each in script]
        rows = sum(map(len, script))
        self._order = {"samples": SAMPLES, "prompts": rows // SAMPLES}
        self._source: Any = self
        self.barriers: list[Barrier] = []
        self.made = 0

    def barrier(self) -> Barrier:
        self.barriers.append(Barrier())
        return self.barriers[-1]

    def _complete(self, *_: object) -> list[_TrainedRow]:
        found = []
        for group, tokens in self._script.pop(0):
            sample = Sample([5] * tokens, np.zeros(tokens, np.float32), "stop", ())
            found.append(_TrainedRow(_Row(self.made, group, PROMPT, sample), 1.0, 0))
            self.made += 1
        return found


def tokens_of(part: RolloutBatch) -> int:
    return sum(len(PROMPT) + len(each.tokens) for row in part.samples for each in row)


@st.composite
def scripts(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    prompts = draw(st.integers(1, 8))
    rows = draw(st.permutations([each for each in range(prompts) for _ in range(SAMPLES)]))
    script: list[list[tuple[int, int]]] = [[]]
    for each in rows:
        if draw(st.booleans()):
            script.append([])
        script[-1].append((each, draw(st.integers(1, 20))))
    return script


@given(scripts(), st.integers(0, 60), st.integers(1, 4), st.booleans())
def test_parts_are_the_batch_and_have_the_least_size(
    script: list[list[tuple[int, int]]], tokens_min: int, prompts_min: int, is_slow: bool
) -> None:
    rollout = Scripted(script)
    found = []
    for part in rollout._parts(0, 0, cast("_Feeder", None), PartSize(tokens_min, prompts_min)):
        found.append(part)
        for each in rollout.barriers if not is_slow else ():
            each.is_done = True
    numbers = [number for part in found for number in part.prompt_numbers]
    assert sorted(numbers) == sorted({group for rows in script for group, _ in rows})
    assert [part.is_last for part in found] == [False] * (len(found) - 1) + [True]
    assert all(len(row) == SAMPLES for part in found for row in part.samples)
    for part in found[:-1]:
        assert tokens_of(part) >= tokens_min
        assert len(part.prompts) >= prompts_min


def test_a_part_waits_while_the_trainer_has_two_and_takes_what_is_complete_by_then() -> None:
    script = [[(each, 5), (each, 5)] for each in range(6)]
    rollout = Scripted(script)
    parts = rollout._parts(0, 0, cast("_Feeder", None), PartSize(0, 1))
    assert [next(parts).prompt_numbers, next(parts).prompt_numbers] == [[0], [1]]
    # Nothing is done: all others are complete before the trainer can take a part.
    assert next(parts).prompt_numbers == [2, 3, 4, 5]
    rollout = Scripted(script)
    parts = rollout._parts(0, 0, cast("_Feeder", None), PartSize(0, 1))
    for number in range(6):
        assert next(parts).prompt_numbers == [number]
        for each in rollout.barriers:
            each.is_done = True


def test_a_wrong_size_is_refused() -> None:
    for size in ((-1, 1), (0, 0)):
        with pytest.raises(InvalidRequestError, match="at least"):
            PartSize(*size)
