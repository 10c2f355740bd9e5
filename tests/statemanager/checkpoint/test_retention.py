"""Which checkpoints a policy lets go."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.checkpoint.format.retention import (
    CheckpointAge,
    RetentionPolicy,
    deletable,
)

AGES = st.lists(
    st.builds(
        CheckpointAge,
        step=st.integers(0, 30),
        written_ns=st.integers(0, 5),
        name=st.text("abc", min_size=1, max_size=4),
        is_pinned=st.booleans(),
    ),
    unique_by=lambda age: age.name,
    max_size=12,
)
POLICIES = st.builds(
    RetentionPolicy,
    keep_last=st.none() | st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 10),
)


def named(*steps: int) -> list[CheckpointAge]:
    return [CheckpointAge(step=step, written_ns=0, name=f"c{step}") for step in steps]


def test_the_oldest_beyond_the_bytes_go_and_the_newest_stays() -> None:
    ages = [replace(age, nbytes=10) for age in named(1, 2, 3, 4)]
    assert [age.name for age in deletable(ages, RetentionPolicy(bytes_max=25))] == ["c1", "c2"]
    policy = RetentionPolicy(keep_last=3, bytes_max=1)
    assert [age.name for age in deletable(ages, policy)] == ["c1", "c2", "c3"]
    pinned = [replace(ages[0], is_pinned=True), *ages[1:]]
    assert [age.name for age in deletable(pinned, RetentionPolicy(bytes_max=25))] == ["c2", "c3"]
    assert deletable(ages, RetentionPolicy(bytes_max=40)) == ()


def test_the_newest_and_every_so_many_steps_are_kept() -> None:
    gone = deletable(named(10, 20, 30, 40, 50), RetentionPolicy(keep_last=2, keep_every=20))
    assert [age.name for age in gone] == ["c10", "c30"]


def test_without_a_policy_everything_is_kept() -> None:
    assert deletable(named(1, 2, 3), RetentionPolicy()) == ()


def test_every_so_many_alone_keeps_the_newest_too() -> None:
    gone = deletable(named(10, 15, 17), RetentionPolicy(keep_every=10))
    assert [age.name for age in gone] == ["c15"]


def test_keeping_nothing_is_no_policy() -> None:
    with pytest.raises(InvalidRequestError, match="keep_last"):
        RetentionPolicy(keep_last=0)


def test_a_policy_of_some_names_keeps_all_others() -> None:
    others = [CheckpointAge(step=0, written_ns=0, name=name) for name in ("by-hand", "c-best", "c")]
    gone = deletable([*named(1, 2, 3), *others], RetentionPolicy(keep_last=1, prefix="c"))
    assert [age.name for age in gone] == ["c1", "c2"]


def test_of_a_series_those_that_were_written_last_are_kept() -> None:
    """The training went back to an earlier step, whose numbers are lower than those of before."""
    ages = [
        CheckpointAge(step=step, written_ns=written, name=f"c{step}")
        for step, written in ((350, 1), (400, 2), (250, 3), (300, 4))
    ]
    gone = deletable(ages, RetentionPolicy(keep_last=2, prefix="c"))
    assert [age.name for age in gone] == ["c350", "c400"]


@given(ages=AGES, policy=POLICIES)
def test_whatever_some_field_keeps_stays(
    ages: list[CheckpointAge], policy: RetentionPolicy
) -> None:
    gone = set(deletable(ages, policy))
    left = [age for age in ages if age not in gone]
    assert all(not age.is_pinned for age in gone)
    if ages:
        assert max(ages) in left
    newer = {age: sum(other > age for other in ages) for age in ages}
    for age in ages:
        is_kept = (
            age.is_pinned
            or newer[age] < (policy.keep_last or 1)
            or (policy.keep_every is not None and age.step % policy.keep_every == 0)
            or (policy.keep_last is None and policy.keep_every is None)
        )
        assert (age in left) == is_kept


@given(ages=AGES, policy=POLICIES)
def test_what_is_left_is_left_again(ages: list[CheckpointAge], policy: RetentionPolicy) -> None:
    gone = set(deletable(ages, policy))
    assert deletable([age for age in ages if age not in gone], policy) == ()
