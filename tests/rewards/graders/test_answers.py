"""Short answers: the same text, the same number."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.rewards.grade import Outcome
from plexrl.rewards.graders.answers import exact, numeric


def test_space_around_an_exact_answer_does_not_count() -> None:
    assert exact(" yes\n", "yes").score == 1.0
    assert exact("yes sir", "yes").outcome is Outcome.WRONG
    assert exact("Yes", "yes").detail == "'Yes' is not 'yes'"


@pytest.mark.parametrize(
    "answer", ["1234.5", "1,234.5", "$1,234.50", "+1234.5", "1.2345e3", "2469/2", " 123450 % "]
)
def test_ways_to_write_one_number(answer: str) -> None:
    assert numeric(answer, "1234.5").outcome is Outcome.PASSED


@pytest.mark.parametrize(
    "answer",
    *[
        [
            *("", "nan", "inf", "1/0", "12,34.5", "1234.5 apples", "9" * 5000, "1e9999", "0x10"),
            *("1234.6", "-1234.5", "٣"),
        ]
    ],
)
def test_other_answers_are_wrong(answer: str) -> None:
    assert numeric(answer, "1234.5").outcome is Outcome.WRONG


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12), st.floats(0.0, 0.5), st.floats(0.0, 10.0))
def test_tolerance_is_relative_or_absolute(
    answer: float, expected: float, relative: float, absolute: float
) -> None:
    passed = numeric(repr(answer), expected, relative=relative, absolute=absolute).score == 1.0
    difference = abs(Fraction(repr(answer)) - Fraction(repr(expected)))
    allowed = max(Fraction(relative) * abs(Fraction(repr(expected))), Fraction(absolute))
    assert passed == (difference <= allowed)


def test_expected_value_must_be_a_number() -> None:
    with pytest.raises(InvalidRequestError, match="expected is 'many'"):
        numeric("1", "many")
