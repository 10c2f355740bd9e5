"""Which known layout a header that fits none is nearest to, so that a user is told what to mend."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

Columns = Sequence[tuple[str, ...]]
"""That a layout needs, each by the names that it may have."""

ALIKE = 0.8
"""Of two names, so that one is taken for the other misspelt (`difflib`'s ratio)."""
ENOUGH = 0.3
"""Part of its columns that a layout has to have there to be named."""
SUGGESTED_MAX = 2


def nearest(
    names: Iterable[str], layouts: Mapping[str, Columns], enough: float = ENOUGH
) -> list[tuple[str, tuple[str, ...]]]:
    """The likeliest layouts, best first, each with the columns that it needs and are not there."""
    there = {name.lower(): name for name in names}
    scored: list[tuple[float, str, tuple[str, ...]]] = []
    for layout, columns in layouts.items():
        alike = sum(any(_is_alike(each, there) for each in column) for column in columns)
        part = alike / len(columns)
        if part >= enough:
            missing = tuple("/".join(c) for c in columns if not set(c) & set(there.values()))
            scored.append((part, layout, missing))
    scored.sort(key=lambda each: -each[0])
    return [(layout, missing) for _, layout, missing in scored[:SUGGESTED_MAX]]


def _is_alike(name: str, there: Mapping[str, str]) -> bool:
    return bool(get_close_matches(name.lower(), there, n=1, cutoff=ALIKE))
