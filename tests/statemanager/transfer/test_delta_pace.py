"""A delta is made where it was the quicker way."""

import pytest

from plexrl.statemanager.transfer.delta.pace import TRIALS, TRIED_AGAIN_AFTER, DeltaPace


def tried(*, full_s: float, delta_s: float) -> DeltaPace:
    """After the trials of both modes."""
    pace = DeltaPace()
    # A target that holds no version pulls all bytes.
    pace.took(1000, 2 * full_s, is_delta=False)
    modes = []
    for _ in range(2 * TRIALS - 1):
        modes.append(pace.prefers_delta())
        pace.took(1000, delta_s if modes[-1] else full_s, is_delta=modes[-1])
    assert modes.count(True) == TRIALS
    return pace


def test_a_slow_first_pull_does_not_decide() -> None:
    assert not tried(full_s=0.1, delta_s=0.15).prefers_delta()


@pytest.mark.parametrize("is_delta", [False, True])
def test_what_was_slower_is_passed_over_and_tried_again_later(is_delta: bool) -> None:
    pace = tried(full_s=1.0, delta_s=0.1) if is_delta else tried(full_s=0.1, delta_s=1.0)
    answers = [pace.prefers_delta() for _ in range(2 * TRIED_AGAIN_AFTER)]
    assert [number for number, answer in enumerate(answers, 1) if answer != is_delta] == [
        TRIED_AGAIN_AFTER,
        2 * TRIED_AGAIN_AFTER,
    ]
    # The speed of the network has changed meanwhile.
    for _ in range(TRIALS):
        pace.took(1000, 10.0, is_delta=is_delta)
    assert pace.prefers_delta() != is_delta
