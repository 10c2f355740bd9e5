"""Random histories of a fleet keep every invariant and lose no trajectory."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.examples import examples
from tests.rollout.history import ACTIONS, History, run_histories, run_history


def test_histories_with_interrupts_migrations_aborts_and_lost_instances(
    pytestconfig: pytest.Config,
) -> None:
    """The number of histories is `--rollout-histories`; one that fails names its seed."""
    assert run_histories(0, int(pytestconfig.getoption("--rollout-histories"))) > 0


@hypothesis_settings(max_examples=examples(30))
@given(seed=st.integers(0, (1 << 63) - 1), actions=st.integers(0, 120))
def test_histories_of_any_length_end_with_trained_batches(seed: int, actions: int) -> None:
    assert run_history(seed, actions) > 0


class HistoryMachine(RuleBasedStateMachine):
    """The same actions in an order that hypothesis chooses, and shortens when it fails."""

    @initialize(seed=st.integers(0, (1 << 32) - 1))
    def begin(self, seed: int) -> None:
        self.history = History(Random(seed))

    @rule(name=st.sampled_from(sorted(ACTIONS)), number=st.integers(0, 255))
    def act(self, name: str, number: int) -> None:
        self.history.random.seed(number)
        self.history.run(name)

    @invariant()
    def invariants_hold(self) -> None:
        self.history.look()

    def teardown(self) -> None:
        if hasattr(self, "history"):
            self.history.finish()


TestHistory = HistoryMachine.TestCase
TestHistory.settings = hypothesis_settings(max_examples=examples(50), stateful_step_count=50)
