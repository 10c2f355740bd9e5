"""Graders of short answers: the same text, or the same number."""

import re
from fractions import Fraction

from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers
from plexrl.rewards.grade import PASSED, Grade, wrong

NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?(/\d+(\.\d*)?)?")
DIGITS_MAX = 1000
"""Longer answers are wrong: they cost time, and no expected number is as long."""


def exact(answer: str, expected: str) -> Grade:
    """Passed if the texts are equal, apart from space at both ends."""
    if answer.strip() == expected.strip():
        return PASSED
    return wrong(f"{_short(answer)} is not {_short(expected)}")


def numeric(
    answer: str, expected: str | float, *, relative: float = 1e-6, absolute: float = 1e-9
) -> Grade:
    """Passed if the numbers differ by no more than `max(relative x |expected|, absolute)`.

    Reads integers, decimals, exponents and fractions, with commas between thousands, `$` and `%`.

    Raises:
        InvalidRequestError: `expected` is no number, or a tolerance is out of bounds.
    """
    check_numbers("answers", {"relative": relative, "absolute": absolute})
    wanted = _number(str(expected))
    if wanted is None:
        raise InvalidRequestError(f"expected is {expected!r}: give a finite number")
    found = _number(answer)
    if found is None:
        return wrong(f"{_short(answer)} is no number")
    if abs(found - wanted) <= max(Fraction(relative) * abs(wanted), Fraction(absolute)):
        return PASSED
    return wrong(f"{_short(answer)} is not {expected}")


def _number(text: str) -> Fraction | None:
    """The number that the text is; None if it is none."""
    plain = text.strip().removeprefix("$").strip()
    percent = plain.endswith("%")
    plain = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", plain.removesuffix("%").strip())
    if len(plain) > DIGITS_MAX or NUMBER.fullmatch(plain) is None:
        return None
    above, _, below = plain.partition("/")
    divisor = Fraction(below or 1)
    if divisor == 0:
        return None
    return Fraction(above) / divisor / (100 if percent else 1)


def _short(text: str) -> str:
    plain = text.strip()
    return repr(plain if len(plain) <= 40 else f"{plain[:40]}…")
