"""Learning rates are those of torch's and transformers' schedules."""

from typing import Any

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.schedules import warm_up

torch = pytest.importorskip("torch")

PEAK, STEPS, WARM = 3e-4, 40, 8


def rates_of(make: Any) -> list[float]:
    """The rate of each step under a schedule of an optimizer."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    schedule = make(optimizer)
    found = []
    for _ in range(STEPS + 5):
        found.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
def test_the_decay_is_that_of_transformers(decay: Any) -> None:
    transformers = pytest.importorskip("transformers")
    make = {
        "none": lambda o: transformers.get_constant_schedule_with_warmup(o, WARM),
        "linear": lambda o: transformers.get_linear_schedule_with_warmup(o, WARM, STEPS),
        "cosine": lambda o: transformers.get_cosine_schedule_with_warmup(o, WARM, STEPS),
    }[decay]
    rate = warm_up(PEAK, steps=STEPS, warm_up_steps=WARM, decay=decay)
    wanted = rates_of(make)
    assert [rate(step) for step in range(WARM, STEPS)] == pytest.approx(wanted[WARM:STEPS])
    # Their step 0 has rate 0, so their warm-up is one step behind.
    assert [rate(step) for step in range(WARM)] == pytest.approx(wanted[1 : WARM + 1])
    assert [rate(step) for step in range(STEPS, STEPS + 5)] == [rate(STEPS)] * 5


def test_a_cosine_ends_at_its_floor_as_torchs() -> None:
    rate = warm_up(PEAK, steps=STEPS, decay="cosine", floor=0.1)
    wanted = rates_of(
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.1 * PEAK)
    )
    assert [rate(step) for step in range(STEPS + 1)] == pytest.approx(wanted[: STEPS + 1])


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"warm_up_steps": 40}, {"warm_up_steps": -1}, {"floor": 2}]
)
def test_a_schedule_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="give fewer steps of warm-up"):
        warm_up(PEAK, **{"steps": STEPS, **wrong})
