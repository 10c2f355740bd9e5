"""Coefficients of the cost model from measured decode steps (StaleFlow App. B).

For a given bend `b = k2 / k3`, the number of trajectories from which the matrix products are
limited by computation, a step is linear in `k1`, `k3` and `k4`:  `k1 kv + k3 max(b, n) + k4`. For
each possible bend the least squares of the relative errors are computed, and the best bend is kept.
Measurements that cannot tell two coefficients apart leave the earlier ones nearly as they were: a
small penalty on relative changes makes every fit well determined.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from plexrl.errors import InvalidRequestError
from plexrl.rollout.coordinator.cost_model import CostModel
from plexrl.rollout.coordinator.messages import StepMeasured

PENALTY = 1e-6
"""Weight of relative changes of coefficients, beside relative errors of steps of weight 1 each."""
BENDS_MAX = 64
"""Numbers of trajectories that are tried as bend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSteps:
    """The measured steps of a fit, and the model."""

    model: CostModel
    steps: list[tuple[float, int, float]]
    """KV cache, trajectories and seconds of each."""


class CostFit:
    """The latest measured steps, and the model that fits them best."""

    def __init__(self, model: CostModel, *, steps_max: int) -> None:
        self.model = model
        self._steps: deque[tuple[float, int, float]] = deque(maxlen=steps_max)

    def state(self) -> FittedSteps:
        """The measured steps and the model."""
        return FittedSteps(model=self.model, steps=list(self._steps))

    def restore(self, state: FittedSteps) -> None:
        """Goes on from a state."""
        self.model = state.model
        self._steps.extend(state.steps)

    def add(self, steps: Iterable[StepMeasured]) -> CostModel:
        """Takes measured steps and fits the model to the latest ones.

        Raises InvalidRequestError: a step is without trajectories or takes no time.
        """
        steps = tuple(steps)
        for each in steps:
            is_finite = each.seconds < float("inf") and each.kv_cache < float("inf")
            if each.running < 1 or each.seconds <= 0 or each.kv_cache < 0 or not is_finite:
                raise InvalidRequestError(
                    f"a measured step has {each.running} trajectories, {each.kv_cache} of KV cache "
                    f"and takes {each.seconds} s: report steps that ran"
                )
        self._steps.extend((each.kv_cache, each.running, each.seconds) for each in steps)
        if self._steps:
            self.model = fitted(self.model, np.array(self._steps, dtype=np.float64))
        return self.model


def fitted(prior: CostModel, steps: NDArray[np.float64]) -> CostModel:
    """The model that fits the steps, [step, 3] of KV cache, trajectories and seconds."""
    kv, n, seconds = steps.T
    bends = np.unique(n)
    if len(bends) > BENDS_MAX:
        bends = np.unique(np.quantile(bends, np.linspace(0, 1, BENDS_MAX)))
    prior_bend = prior.k2 / prior.k3 if prior.k3 else float(n.max())
    best, best_error = prior, float("inf")
    for bend in sorted({*bends.tolist(), prior_bend}):
        rows = np.stack((kv, np.maximum(n, bend), np.ones_like(kv)), axis=1) / seconds[:, None]
        earlier = np.array((prior.k1, prior.k3 or prior.k2 / max(bend, 1.0), prior.k4))
        k, error = _least_squares(rows, earlier)
        if error < best_error:
            k1, k3, k4 = k.tolist()
            best_error = error
            best = CostModel(k1=k1, k2=k3 * bend, k3=k3, k4=k4, k5=prior.k5)
    return best


def _least_squares(
    rows: NDArray[np.float64], earlier: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """Coefficients, none negative, for which `rows @ k` is nearest to 1, and the error.

    Tries every subset of coefficients as the positive ones, since there are three of them.
    """
    # Coefficients in units of the earlier ones, so that the penalty and the condition number do not
    # depend on the units of time and KV cache.
    unit = np.where(earlier > 0, earlier, 1 / np.maximum(np.abs(rows).max(axis=0), 1e-300))
    scaled = rows * unit
    weight = PENALTY * len(rows)
    gram = scaled.T @ scaled + weight * np.eye(3)
    target = scaled.sum(axis=0) + weight * (earlier / unit)
    best, best_error = earlier, float("inf")
    for count in (3, 2, 1):
        for chosen in combinations(range(3), count):
            part = np.ix_(chosen, chosen)
            solved = np.linalg.solve(gram[part], target[list(chosen)])
            if (solved < 0).any():
                continue
            k = np.zeros(3)
            k[list(chosen)] = solved
            change = k - earlier / unit
            error = float(((scaled @ k - 1) ** 2).sum() + weight * (change**2).sum())
            if error < best_error:
                best, best_error = k * unit, error
    return best, best_error
