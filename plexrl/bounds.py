"""The bounds of a number, and the message of one that is out of them."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower and upper bound of a finite number."""

    least: float
    most: float
    is_open: bool = False
    """The upper bound is exclusive."""
    is_whole: bool = False
    may_be_absent: bool = False
    may_be_zero: bool = False
    """0 has a meaning of its own, and `least` is that of the other numbers."""
    hint: str = ""
    """Further words of the message."""

    def check(self, name: str, value: object) -> None:
        """Raises `InvalidRequestError` for a value out of bounds, naming the value and the
        bounds."""
        if not self.holds(value):
            raise InvalidRequestError(
                f"{name} is {_short(value)}; it must be {self}{self.hint}", parameter=name
            )

    def holds(self, value: object) -> bool:
        """Whether `value` is a number within the bounds, or absent if it may be."""
        if value is None:
            return self.may_be_absent
        kind = Integral if self.is_whole else Real
        if not isinstance(value, kind) or isinstance(value, bool):
            return False
        try:
            number = int(value) if isinstance(value, Integral) else float(value)
        except OverflowError:
            return False
        if not math.isfinite(number):
            return False
        if self.may_be_zero and number == 0:
            return True
        return self.least <= number <= self.most and not (self.is_open and number == self.most)

    def __str__(self) -> str:
        noun = "a whole number" if self.is_whole else "a number"
        zero = "0, or " if self.may_be_zero else ""
        most = f"below {self.most_text}" if self.is_open else f"at most {self.most_text}"
        return f"{zero}{noun}, at least {self.least_text} and {most}"

    @property
    def least_text(self) -> str:
        """The lower bound as text."""
        return _text(self.least)

    @property
    def most_text(self) -> str:
        """The upper bound as text."""
        return _text(self.most)


def _text(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.12g}"


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"
