"""Grades: the results of graders."""

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """The finding about an answer. The failure of a grader is an error, never an outcome."""

    PASSED = "passed"
    WRONG = "wrong"
    """The answer differs, or the program ended with an error."""
    TIMED_OUT = "timed_out"
    """The program ran for too long, or the answer is too hard to compare."""
    KILLED = "killed"
    """The program reached a limit of the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The score of an answer, and why."""

    score: float
    outcome: Outcome
    """For a program, the outcome of the first test case that it did not pass."""
    detail: str = ""
    """For a reader; empty if there is nothing to say."""


PASSED = Grade(score=1.0, outcome=Outcome.PASSED)


def wrong(detail: str) -> Grade:
    """The grade of a wrong answer."""
    return Grade(score=0.0, outcome=Outcome.WRONG, detail=detail)
