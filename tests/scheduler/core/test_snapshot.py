"""A scheduler restored from a snapshot goes on, command by command, as the one that wrote it."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.scheduler.snapshot_histories import history


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((1, 3, 10)))
def test_a_restored_scheduler_goes_on_as_the_one_that_wrote_the_snapshot(
    seed: int, each: int
) -> None:
    history(Random(seed), 40, each)
