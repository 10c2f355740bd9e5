"""Random histories of a fleet keep every invariant and lose no trajectory."""

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.rollout.history import run_history

ACTIONS = 40


def test_histories_with_interrupts_migrations_aborts_and_lost_instances(
    pytestconfig: pytest.Config,
) -> None:
    """The number of histories is `--rollout-histories`; a failure names the seed."""
    batches = 0
    for seed in range(int(pytestconfig.getoption("--rollout-histories"))):
        try:
            batches += run_history(seed, ACTIONS)
        except Exception as error:
            error.add_note(f"run_history({seed}, {ACTIONS})")
            raise
    assert batches > 0


@hypothesis_settings(max_examples=30)
@given(seed=st.integers(0, (1 << 63) - 1), actions=st.integers(0, 120))
def test_histories_of_any_length_end_with_trained_batches(seed: int, actions: int) -> None:
    assert run_history(seed, actions) > 0
