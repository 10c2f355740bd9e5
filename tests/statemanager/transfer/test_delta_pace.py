"""A delta is made where it was the quicker way."""

from plexrl.statemanager.transfer.delta.pace import TRIED_AGAIN_AFTER, DeltaPace


def test_both_ways_are_tried_before_one_is_preferred() -> None:
    pace = DeltaPace()
    assert pace.prefers_delta()
    pace.took(1000, 1.0, is_delta=False)
    assert pace.prefers_delta()
    pace.took(1000, 0.5, is_delta=True)
    assert pace.prefers_delta()


def test_what_was_slower_is_passed_over_and_tried_again_later() -> None:
    pace = DeltaPace()
    pace.took(1000, 0.1, is_delta=False)
    pace.took(1000, 1.0, is_delta=True)
    answers = [pace.prefers_delta() for _ in range(2 * TRIED_AGAIN_AFTER)]
    assert [number for number, answer in enumerate(answers, 1) if answer] == [
        TRIED_AGAIN_AFTER,
        2 * TRIED_AGAIN_AFTER,
    ]
    # The network has become slow meanwhile.
    for _ in range(8):
        pace.took(1000, 10.0, is_delta=False)
    assert pace.prefers_delta()
