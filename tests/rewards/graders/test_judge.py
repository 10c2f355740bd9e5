"""Judges: many threads share the batches of one model."""

import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import ConnectionLostError, ExecutionError, InvalidRequestError
from plexrl.rewards.graders.judge import Judge, last_number
from plexrl.rewards.scheduler import Graded
from tests.examples import examples


def as_prompt(prompt: list[int], sample: int) -> list[int]:
    return [*prompt, sample]


class Model:
    """A model whose score is the prompt's last token; no batch ends before `gate` opens."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()

    def __call__(self, prompts: list[list[int]]) -> Sequence[float | Exception]:
        self.batches.append([each[-1] for each in prompts])
        assert self.gate.wait(60.0)
        return [float(each[-1]) for each in prompts]


def wait_until(what: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not what():
        pause.wait(0.01)


def graded(judge: Judge[int], count: int, at_once: int = 64) -> list[float]:
    """The scores of samples 0 to `count`; NaN for those that were not graded."""
    found = Graded[int](judge.score, on_failure="drop", at_once=at_once).grade(
        [[7]], [list(range(count))]
    )
    return list(found.rewards[0])


@pytest.mark.parametrize("batches_max", [1, 3])
def test_prompts_that_come_meanwhile_are_the_next_batch(batches_max: int) -> None:
    model = Model()
    judge = Judge[int](model, prompt=as_prompt, batches_max=batches_max)
    scores: dict[int, float] = {}
    threads = []
    for number in range(40):
        threads.append(
            threading.Thread(target=lambda n=number: scores.update({n: judge.score([7], n)}))
        )
        threads[-1].start()
        # A thread begins a batch of its own as long as fewer than `batches_max` run.
        begun = min(number + 1, batches_max)
        wait_until(lambda: len(model.batches) + len(judge._waiting) == len(threads))
        assert len(model.batches) == begun
    model.gate.set()
    for thread in threads:
        thread.join(60.0)
    assert scores == {number: number for number in range(40)}
    assert list(map(len, model.batches)) == [1] * batches_max + [40 - batches_max]


@settings(max_examples=examples(40), deadline=None)
@given(
    count=st.integers(1, 30),
    rows_max=st.integers(1, 12),
    batches_max=st.integers(1, 3),
    refused=st.sets(st.integers(0, 29)),
    at_once=st.integers(1, 16),
)
def test_each_sample_gets_its_own_score_and_only_refused_ones_fail(
    count: int, rows_max: int, batches_max: int, refused: set[int], at_once: int
) -> None:
    def ask(prompts: list[list[int]]) -> Sequence[float | Exception]:
        assert 0 < len(prompts) <= rows_max
        if any(each[-1] in refused for each in prompts):
            raise InvalidRequestError("refused")
        return [float(each[-1]) for each in prompts]

    judge = Judge[int](ask, prompt=as_prompt, rows_max=rows_max, batches_max=batches_max)
    for number, score in enumerate(graded(judge, count, at_once)):
        assert score == number or (number in refused and score != score)


def test_fault_of_the_model_fails_its_batch_and_no_later_one() -> None:
    calls = []

    def ask(prompts: list[list[int]]) -> list[float]:
        calls.append(len(prompts))
        if len(calls) == 1:
            raise ConnectionLostError("no router answers")
        return [1.0] * len(prompts)

    judge = Judge[int](ask, prompt=as_prompt)
    with pytest.raises(ExecutionError, match="gave no score: no router answers") as caught:
        judge.score([1], 2)
    assert isinstance(caught.value.__cause__, ConnectionLostError)
    assert judge.score([1], 2) == 1.0


def test_retries_and_failure_policy_are_those_of_the_controller() -> None:
    def ask(prompts: list[list[int]]) -> list[float | Exception]:
        return [ValueError("no number") if each[-1] == 1 else 0.5 for each in prompts]

    judge = Judge[int](ask, prompt=as_prompt)
    zero = Graded(judge.score, on_failure="zero", retries=2).grade([[7]], [[0, 1]])
    assert zero.rewards.tolist() == [[0.5, 0.0]]
    assert [(each.attempts, each.failure) for each in zero.failures] == [
        (3, "ValueError: no number")
    ]
    drop = Graded(judge.score, on_failure="drop").grade([[7], [8]], [[0, 1], [0, 2]])
    assert drop.kept.tolist() == [False, True]
    with pytest.raises(ValueError, match="no number"):
        Graded(judge.score, on_failure="raise").grade([[7]], [[0, 1]])


def test_hanging_model_holds_up_the_loop_for_its_timeout_only() -> None:
    model = Model()
    judge = Judge[int](model, prompt=as_prompt)
    late = Graded[int](judge.score, on_failure="drop", at_once=4, timeout_s=0.2)
    found = late.grade([[7]], [[0, 1, 2, 3]])
    assert not found.kept.any()
    model.gate.set()
    assert graded(judge, 3) == [0.0, 1.0, 2.0]


def test_missing_scores_are_a_failure() -> None:
    judge = Judge[int](lambda prompts: [1.0] * (len(prompts) + 1), prompt=as_prompt)
    with pytest.raises(ExecutionError, match="2 scores for 1 prompts"):
        judge.score([1], 2)


def test_error_of_the_prompt_is_the_samples_own() -> None:
    def broken(_: list[int], sample: int) -> list[int]:
        raise KeyError(sample)

    with pytest.raises(KeyError):
        Judge[int](Model(), prompt=broken).score([1], 2)


@pytest.mark.parametrize("name", ["rows_max", "batches_max"])
def test_numbers_without_meaning_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is 0"):
        Judge[int](Model(), prompt=as_prompt, **{name: 0})


def test_last_number_is_the_score() -> None:
    assert last_number("2 faults. Score: 7", lowest=0, highest=10) == 7.0
    assert last_number("-0.5", lowest=-1, highest=1) == -0.5
    for text in ("none", "", "Score: 11", "Score: 7/100"):
        with pytest.raises(ValueError, match="the judge's"):
            last_number(text, lowest=0, highest=10)
