"""Learning rates by step, for `optim_step(learning_rate=schedule(step))`. Pure.

Step 0 is the first. A schedule is the same function of the step after a resume.
"""

import math
from collections.abc import Callable
from typing import Literal

from plexrl.errors import InvalidRequestError

Schedule = Callable[[int], float]


def warm_up(
    peak: float,
    *,
    steps: int,
    warm_up_steps: int = 0,
    decay: Literal["none", "linear", "cosine"] = "none",
    floor: float = 0.0,
) -> Schedule:
    """A rate that rises linearly to `peak` in `warm_up_steps` steps, and then falls until step
    `steps`, along a line or half a cosine, to `floor` times the peak; with `none` it stays.

    Step s of the warm-up has rate peak · (s + 1) / warm_up_steps, so no step has rate 0 and the
    last one has the peak. Later steps than `steps` have the last rate.

    Raises:
        InvalidRequestError: a number is out of range.
    """
    if not 0 <= warm_up_steps < steps or peak < 0 or not 0 <= floor <= 1:
        raise InvalidRequestError(
            f"a schedule of {steps} steps with {warm_up_steps} of warm-up, peak {peak} and floor "
            f"{floor}: give fewer steps of warm-up than steps, a peak of at least 0, and a floor "
            "from 0 to 1"
        )

    def rate(step: int) -> float:
        if step < warm_up_steps:
            return peak * (step + 1) / warm_up_steps
        done = min(1.0, (step - warm_up_steps) / (steps - warm_up_steps))
        match decay:
            case "none":
                left = 1.0
            case "linear":
                left = 1.0 - done
            case "cosine":
                left = 0.5 * (1.0 + math.cos(math.pi * done))
        return peak * (floor + (1.0 - floor) * left)

    return rate
