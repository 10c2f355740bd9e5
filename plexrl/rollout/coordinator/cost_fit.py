"""Coefficients of the cost model from measured decode steps (StaleFlow App. B).

The fit is a function of the prior and of the latest measured steps alone, in three parts:

1. With fewer than `STEPS_MIN` steps, the prior holds.
2. The prior is scaled so that its median prediction is right. That is all that steps at one load
   can tell.
3. For a given bend `b = k2 / k3`, the number of trajectories from which the matrix products are
   limited by computation, a step is linear in `k1`, `k3` and `k4`:  `k1 kv + k3 max(b, n) + k4`.
   Least squares of the relative errors, for each possible bend, give the coefficients, none
   negative. A small penalty on their relative changes keeps those that the steps cannot tell.

Part 3 is repeated with Huber's weights, up to `ROUNDS_MAX` times: a step that is far from its
prediction, such as one during which the machine did something else, has the influence of one at the
edge of the usual errors.
"""

from collections import deque
from collections.abc import Iterable
from itertools import product

import numpy as np

from plexrl.errors import InvalidRequestError
from plexrl.rollout.coordinator.messages import StepMeasured
from plexrl.rollout.instances.cost_model import CostModel, Floats

STEPS_MIN = 8
ROUNDS_MAX = 30
CHANGE_MIN = 1e-3
"""Relative change of the predictions below which a round is the last one."""
BENDS_MAX = 64
"""Numbers of trajectories that are tried as bend."""
PENALTY = 1e-2
"""Weight of a relative change of 1 of a coefficient, beside a relative error of 1 of one step."""
PART_MIN = 1e-3
"""Least part of a median step for which a coefficient stands in the penalty, so that one that was 0
can grow; and least part that `k4` has, so that a step takes some time at any load."""
USUAL_ERRORS = 1.5
"""Errors up to so many standard deviations count in full."""
ERROR_MIN = 0.01
"""Relative error that counts in full in any case."""
MASKS = np.array(list(product((0.0, 1.0), repeat=3)))
"""[subset, coefficient]: 1 for the coefficients that are not 0."""


class CostFit:
    """The latest measured steps, and the model that fits them best."""

    def __init__(self, prior: CostModel, *, steps_max: int) -> None:
        self.model = prior
        self._prior = prior
        self._steps: deque[tuple[float, int, float]] = deque(maxlen=steps_max)

    def state(self) -> list[tuple[float, int, float]]:
        """KV cache, trajectories and seconds of each step that counts."""
        return list(self._steps)

    def restore(self, steps: list[tuple[float, int, float]]) -> None:
        """Goes on from a state."""
        self._steps.extend(steps)
        self._fit()

    def add(self, steps: Iterable[StepMeasured]) -> CostModel:
        """Takes measured steps and fits the model to the latest ones, in a few milliseconds.

        Raises InvalidRequestError: a step is without trajectories or takes no time.
        """
        steps = tuple(steps)
        for step in steps:
            is_finite = step.seconds < float("inf") and step.kv_cache < float("inf")
            if step.running < 1 or not step.seconds > 0 or not step.kv_cache >= 0 or not is_finite:
                raise InvalidRequestError(
                    f"a measured step has {step.running} trajectories, {step.kv_cache} of KV cache "
                    f"and takes {step.seconds} s: report steps that ran"
                )
        self._steps.extend((step.kv_cache, step.running, step.seconds) for step in steps)
        self._fit()
        return self.model

    def _fit(self) -> None:
        if len(self._steps) >= STEPS_MIN:
            self.model = fit_costs(self._prior, np.array(self._steps, dtype=np.float64))


def fit_costs(prior: CostModel, steps: Floats) -> CostModel:
    """The model that fits the steps, [step, 3] of KV cache, trajectories and seconds."""
    kv, n, seconds = steps[np.argsort(steps[:, 1], kind="stable")].T
    scale = float(np.median(seconds / _predicted(prior, kv, n)))
    model = CostModel(
        k1=scale * prior.k1,
        k2=scale * prior.k2,
        k3=scale * prior.k3,
        k4=scale * prior.k4,
        k5=prior.k5,
    )
    bends = np.unique(n)
    if len(bends) > BENDS_MAX:
        bends = np.unique(np.quantile(bends, np.linspace(0, 1, BENDS_MAX)))
    if prior.k3:
        bends = np.append(bends, prior.k2 / prior.k3)
    before = _predicted(model, kv, n)
    for _ in range(ROUNDS_MAX):
        model = _least_squares(model, bends, kv, n, seconds, _weights(before, seconds))
        after = _predicted(model, kv, n)
        if np.abs(after / before - 1).max() < CHANGE_MIN:
            break
        before = after
    return model


def _predicted(model: CostModel, kv: Floats, n: Floats) -> Floats:
    found: Floats = model.k1 * kv + np.maximum(model.k2, model.k3 * n) + model.k4
    return found


def _weights(predicted: Floats, measured: Floats) -> Floats:
    """Weight of the squared error of each step in s²: relative errors with Huber's weights.

    Errors are relative to the prediction, not to the measurement: else steps measured much too
    short would count far more than those measured much too long.
    """
    errors = np.abs(measured / predicted - 1)
    limit = max(USUAL_ERRORS * 1.4826 * float(np.median(errors)), ERROR_MIN)
    found: Floats = np.minimum(1.0, limit / np.maximum(errors, 1e-12)) / predicted**2
    return found


def _least_squares(
    earlier: CostModel, bends: Floats, kv: Floats, n: Floats, seconds: Floats, weights: Floats
) -> CostModel:
    """Coefficients and bend with the least weighted sum of squared errors and penalty.

    `bends` [bend]; `kv`, `n`, `seconds`, `weights` [step]. Tries every subset of coefficients as
    the positive ones, since there are three of them.
    """
    gram, target = _sums(bends, kv, n, seconds, weights)
    usual = np.array([np.median(kv), np.median(n), 1.0])
    least = PART_MIN * np.median(seconds) / np.maximum(usual, 1.0)
    anchor = np.empty((len(bends), 3))
    anchor[:, 0], anchor[:, 2] = earlier.k1, earlier.k4
    anchor[:, 1] = earlier.k3 or earlier.k2 / np.maximum(bends, 1.0)
    # Coefficients in units of the earlier ones: penalty and condition number do not depend on the
    # units of time and KV cache then.
    unit = np.maximum(anchor, least)
    gram = gram * unit[:, :, None] * unit[:, None, :] + PENALTY * np.eye(3)
    target = target * unit + PENALTY * anchor / unit
    masked = gram * MASKS[:, None, :, None] * MASKS[:, None, None, :]
    masked += np.eye(3) * (1 - MASKS)[:, None, None, :]
    masked_target = target * MASKS[:, None, :]
    found = np.linalg.solve(masked, masked_target[..., None])[..., 0]
    # For the solution k, `k G k - 2 t k` is `-t k`; what no coefficient changes is left out.
    error = PENALTY * ((anchor / unit) ** 2).sum(axis=1) - (masked_target * found).sum(axis=2)
    error[(found < 0).any(axis=2)] = np.inf
    subset, place = np.unravel_index(int(error.argmin()), error.shape)
    k1, k3, k4 = (found[subset, place] * unit[place]).tolist()
    bend = float(bends[place])
    return CostModel(k1=k1, k2=k3 * bend, k3=k3, k4=max(k4, float(least[2])), k5=earlier.k5)


def _sums(
    bends: Floats, kv: Floats, n: Floats, seconds: Floats, weights: Floats
) -> tuple[Floats, Floats]:
    """Weighted sums over the steps of `x x` and `x seconds`, x = (kv, max(n, bend), 1), for each
    bend: [bend, 3, 3] and [bend, 3]. `n` ascends."""
    terms = np.stack((np.ones_like(kv), kv, seconds, n, kv * n, seconds * n, n * n)) * weights
    below = np.concatenate((np.zeros((len(terms), 1)), np.cumsum(terms, axis=1)), axis=1)
    whole = below[:, -1:]
    below = below[:, np.searchsorted(n, bends)]
    above = whole - below
    (one, by_kv, by_s, *_), n_s = whole[:, 0], bends * below[2] + above[5]
    kv_n, n_one = bends * below[1] + above[4], bends * below[0] + above[3]
    n_n = bends**2 * below[0] + above[6]
    kv_kv, kv_s = float((weights * kv * kv).sum()), float((weights * kv * seconds).sum())
    ones = np.ones_like(bends)
    rows = (
        (kv_kv * ones, kv_n, by_kv * ones),
        (kv_n, n_n, n_one),
        (by_kv * ones, n_one, one * ones),
    )
    gram = np.stack([np.stack(row, axis=1) for row in rows], axis=1)
    return gram, np.stack((kv_s * ones, n_s, by_s * ones), axis=1)
