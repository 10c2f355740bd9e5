"""Finds the known layouts nearest to an unknown header, for error messages."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

Columns = Sequence[tuple[str, ...]]
"""Required columns of a layout, each with its possible names."""

ALIKE = 0.8
"""Smallest similarity (`difflib` ratio) of a misspelt name."""
ENOUGH = 0.3
"""Smallest matching part of a layout's columns for it to be suggested."""
SUGGESTED_MAX = 2


def nearest(
    names: Iterable[str], layouts: Mapping[str, Columns], enough: float = ENOUGH
) -> list[tuple[str, tuple[str, ...]]]:
    """The likeliest layouts, best first, each with its missing columns."""
    present = {name.lower(): name for name in names}
    scored: list[tuple[float, str, tuple[str, ...]]] = []
    for layout, columns in layouts.items():
        alike = sum(any(_is_alike(each, present) for each in column) for column in columns)
        part = alike / len(columns)
        if part >= enough:
            missing = tuple("/".join(c) for c in columns if not set(c) & set(present.values()))
            scored.append((part, layout, missing))
    scored.sort(key=lambda each: -each[0])
    return [(layout, missing) for _, layout, missing in scored[:SUGGESTED_MAX]]


def _is_alike(name: str, present: Mapping[str, str]) -> bool:
    return bool(get_close_matches(name.lower(), present, n=1, cutoff=ALIKE))
