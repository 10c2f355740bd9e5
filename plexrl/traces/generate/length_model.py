"""Models response lengths: distribution, and correlation within a prompt. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plexrl.errors import InvalidRequestError
from plexrl.traces.generate.distributions import STANDARD
from plexrl.traces.generate.fitting import Fit, fit
from plexrl.traces.schema import ResponseLength


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel:
    """The distribution of lengths and their correlation."""

    fit: Fit
    correlation: float | None
    """Correlation of the normal scores of responses to one prompt; None without groups."""


def fit_lengths(rows: Iterable[ResponseLength]) -> LengthModel:
    """Fit a table of response lengths. Keeps two numbers per row in memory.

    Raises:
        InvalidRequestError: the table is empty.
    """
    lengths: list[float] = []
    groups: list[int] = []
    names: dict[str, int] = {}
    for row in rows:
        lengths.append(float(row.output_tokens))
        groups.append(names.setdefault(row.group, len(names)) if row.group else -1)
    if not lengths:
        raise InvalidRequestError("fitting needs at least one length: this table is empty")
    seen = np.array(lengths)
    return LengthModel(fit=fit(seen), correlation=_correlation(seen, np.array(groups)))


def _correlation(lengths: NDArray[np.float64], groups: NDArray[np.int64]) -> float | None:
    """The intraclass correlation of normal scores, from mean squares between and within groups."""
    grouped = groups >= 0
    lengths, groups = lengths[grouped], groups[grouped]
    sizes = np.bincount(groups) if groups.size else np.zeros(0, dtype=np.int64)
    sizes = sizes[sizes > 0]
    if sizes.size < 2 or sizes.sum() == sizes.size:
        return None
    scores = _scores(lengths)
    _, index = np.unique(groups, return_inverse=True)
    means = np.bincount(index, weights=scores) / sizes
    between = float((sizes * (means - scores.mean()) ** 2).sum()) / (sizes.size - 1)
    within = float(((scores - means[index]) ** 2).sum()) / float(sizes.sum() - sizes.size)
    usual = float(sizes.sum() - (sizes**2).sum() / sizes.sum()) / (sizes.size - 1)
    total = between + (usual - 1.0) * within
    return min(1.0, max(0.0, (between - within) / total)) if total > 0 else None


def _scores(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Normal scores of the values; equal values have equal scores."""
    ordered = np.sort(values)
    below = np.searchsorted(ordered, values, side="left")
    upto = np.searchsorted(ordered, values, side="right")
    parts = (below + upto) / 2.0 / len(values)
    return np.array([STANDARD.inv_cdf(float(part)) for part in parts])
