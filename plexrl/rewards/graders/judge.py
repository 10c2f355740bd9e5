"""Grades samples by a model's opinion of them (LLM-as-a-judge; Flexes §4.3).

A model answers many prompts at once almost as fast as one. So the prompts of all threads that grade
at the same time are put to it together: while it works on a batch, those that come meanwhile wait,
and are the next batch. There is no timer, and a prompt that comes alone is not held up.
"""

import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from plexrl.errors import ExecutionError, InvalidRequestError, PlexRLError
from plexrl.limits import check_numbers

SampleT = TypeVar("SampleT")
Ask = Callable[[list[list[int]]], Sequence[float | Exception]]
"""Maps judging prompts, lists of token ids, to a score or an error for each. Raises
`InvalidRequestError` if one of them is refused; any other error means all of them."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(slots=True, eq=False)
class _Asked:
    """A prompt of one thread."""

    prompt: list[int]
    is_taken: bool = False
    """In a batch, or answered."""
    answer: float | Exception | None = None


class Judge(Generic[SampleT]):
    """Scores samples with a model, in batches. Several threads may use it: those of `Graded`."""

    def __init__(
        self,
        ask: Ask,
        *,
        prompt: Callable[[list[int], SampleT], list[int]],
        rows_max: int = 256,
        batches_max: int = 1,
    ) -> None:
        """Args:
            ask: puts prompts to the model, and waits for its answers for a bounded time.
            prompt: maps a prompt and a sample to what the model is asked, in its own token ids.
            rows_max: most prompts of a batch.
            batches_max: most batches at the same time.

        Raises:
            InvalidRequestError: a number is below 1.
        """
        check_numbers("grading", {"rows_max": rows_max, "batches_max": batches_max})
        self._ask = ask
        self._prompt = prompt
        self._rows_max = rows_max
        self._batches_max = batches_max
        self._waiting: deque[_Asked] = deque()
        self._batches = 0
        self._changed = threading.Condition()

    def score(self, prompt: list[int], sample: SampleT) -> float:
        """The model's score of a sample; a reward function for `Graded`.

        Raises:
            ExecutionError: the model gave no score, for this or for all samples of a batch.
            InvalidRequestError: the judging prompt is refused, for example because it is too long.
            Exception: what `prompt`, or the function that reads the model's reply, raised.
        """
        asked = _Asked(self._prompt(prompt, sample))
        with self._changed:
            self._waiting.append(asked)
        while (batch := self._next_batch(asked)) is not None:
            try:
                answers = self._answers(batch)
            except BaseException as error:
                # Only this thread's program is to end, not that of the others in the batch.
                answers = [ExecutionError(f"the judge was left: {error!r}")] * len(batch)
                raise
            finally:
                with self._changed:
                    for each, answer in zip(batch, answers, strict=True):
                        each.answer = answer
                    self._batches -= 1
                    self._changed.notify_all()
        if isinstance(asked.answer, Exception):
            raise asked.answer
        assert asked.answer is not None, "there is no further batch for a thread with its answer"
        return asked.answer

    def _next_batch(self, asked: _Asked) -> list[_Asked] | None:
        """The batch that this thread puts to the model; None: its own prompt is answered."""
        with self._changed:
            while asked.answer is None and (asked.is_taken or self._batches >= self._batches_max):
                self._changed.wait()
            if asked.answer is not None:
                return None
            # The oldest come first, so this thread's own prompt may be left for the next batch.
            batch = [
                self._waiting.popleft() for _ in range(min(self._rows_max, len(self._waiting)))
            ]
            for question in batch:
                question.is_taken = True
            self._batches += 1
            return batch

    def _answers(self, batch: list[_Asked]) -> list[float | Exception]:
        """An answer for each of the batch."""
        try:
            found = list(self._ask([question.prompt for question in batch]))
            if len(found) != len(batch):
                raise ExecutionError(f"{len(found)} scores for {len(batch)} prompts")
        except InvalidRequestError as error:
            if len(batch) == 1:
                return [error]
            # One prompt is refused. The halves find it, and the others get their scores.
            middle = len(batch) // 2
            return [*self._answers(batch[:middle]), *self._answers(batch[middle:])]
        except Exception as error:
            return [_failure(error) for _ in batch]
        return found


def last_number(text: str, *, lowest: float, highest: float) -> float:
    """The last number in a judge's reply, such as 7 in `Good, but long. Score: 7`.

    Raises:
        ValueError: there is none, or it is below `lowest` or above `highest`.
        InvalidRequestError: `lowest` or `highest` is no finite number.
    """
    check_numbers("answers", {"lowest": lowest, "highest": highest})
    found = NUMBER.findall(text)
    if not found:
        raise ValueError(f"the judge's reply has no number: {text[:200]!r}")
    number = float(found[-1])
    if not lowest <= number <= highest:
        raise ValueError(f"the judge's score is {number:g}, not within {lowest:g} to {highest:g}")
    return number


def _failure(error: Exception) -> Exception:
    """An error of a thread's own: an exception that several threads raise collects the frames of
    all of them."""
    kind = "" if isinstance(error, PlexRLError) else f"{type(error).__name__}: "
    found = ExecutionError(f"the judge gave no score: {kind}{error}")
    found.__cause__ = error
    return found
