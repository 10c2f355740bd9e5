"""The staleness protocol against a search through all arrangements, and by hand."""

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from plexrl.errors import ConflictError, InvalidRequestError
from plexrl.rollout.staleness.buffers import BufferState
from plexrl.rollout.staleness.manager import StalenessManager, StalenessSettings
from plexrl.rollout.trajectories.record import SampleGroupId, TrajectoryId
from tests.examples import examples
from tests.rollout.protocol import Protocol, run_protocol

NUMBERS = st.integers(0, (1 << 16) - 1)


class ProtocolMachine(RuleBasedStateMachine):
    """Groups are started with any versions that exist, completed, dropped and consumed."""

    @initialize(
        staleness=st.integers(0, 3),
        size=st.integers(1, 3),
        group_size=st.integers(1, 2),
        extra_groups=st.integers(0, 1),
        extra_samples=st.integers(0, 1),
    )
    def begin(
        self, staleness: int, size: int, group_size: int, extra_groups: int, extra_samples: int
    ) -> None:
        self.protocol = Protocol(
            StalenessSettings(
                staleness=staleness,
                batch_groups=size,
                group_size=group_size,
                extra_groups=extra_groups,
                extra_samples=extra_samples,
            )
        )

    @rule(number=NUMBERS)
    def start(self, number: int) -> None:
        self.protocol.start(number)

    @rule(number=NUMBERS)
    def complete(self, number: int) -> None:
        self.protocol.complete(number)

    @rule(number=NUMBERS)
    def drop(self, number: int) -> None:
        self.protocol.drop(number)

    @rule(number=NUMBERS)
    def try_out(self, number: int) -> None:
        self.protocol.try_out(number)

    @rule()
    def consume(self) -> None:
        self.protocol.consume(0)

    @invariant()
    def buffers_are_ready_as_early_as_possible(self) -> None:
        self.protocol.check()


TestProtocol = ProtocolMachine.TestCase
TestProtocol.settings = hypothesis_settings(max_examples=examples(25), stateful_step_count=30)


def test_random_histories_are_as_ready_as_the_best_arrangement() -> None:
    for seed in range(100):
        run_protocol(seed, actions=40)


def manager(staleness: int, batch: int, **more: int) -> StalenessManager:
    return StalenessManager(StalenessSettings(staleness=staleness, batch_groups=batch, **more))


def shown(found: StalenessManager) -> dict[int, tuple[list[int], list[int]]]:
    """Reserved and occupied groups of each buffer."""
    return {
        version: (sorted(buffer.reserved), sorted(buffer.occupied))
        for version, buffer in found.buffers.entries()
    }


def reserve(found: StalenessManager, group: int, version: int) -> None:
    found.reserve(SampleGroupId(group), TrajectoryId(group), version)


def complete(found: StalenessManager, group: int) -> None:
    found.complete(SampleGroupId(group), TrajectoryId(group))


def test_reservations_are_late_and_complete_entries_early() -> None:
    """As in StaleFlow Fig. 7 (left): η = 1 and three entries a buffer."""
    found = manager(1, 3)
    for group in range(5):
        reserve(found, group, 0)
    assert shown(found) == {0: ([3, 4], []), 1: ([0, 1, 2], [])}
    complete(found, 0)
    # Group 3 moves back into the place of group 0, whose entry is now the earliest one.
    assert shown(found) == {0: ([4], [0]), 1: ([1, 2, 3], [])}
    assert found.buffers.state(0) is BufferState.WAITING
    assert found.buffers.state(1) is BufferState.STUCK
    reserve(found, 5, 0)
    assert found.buffers.state(0) is BufferState.STUCK
    assert not found.buffers.admits(SampleGroupId(6), 0)
    # Both buffers are full, so no version up to 0 can start until a batch is consumed.
    complete(found, 4)
    complete(found, 1)
    assert shown(found) == {0: ([], [0, 1, 4]), 1: ([2, 3, 5], [])}
    assert found.buffers.state(0) is BufferState.READY
    assert list(found.consume()) == [0, 1, 4]
    assert not found.buffers.admits(SampleGroupId(6), 0)
    assert found.buffers.admits(SampleGroupId(6), 1)


def test_a_freed_place_is_filled_through_several_buffers() -> None:
    """StaleFlow Fig. 7 (right): B takes the place of A, and C that of B."""
    found = manager(2, 1)
    reserve(found, 9, 0)
    complete(found, 9)
    found.consume()
    a, b, c = 0, 1, 2
    reserve(found, a, 1)
    reserve(found, b, 1)
    reserve(found, c, 0)
    assert shown(found) == {1: ([c], []), 2: ([b], []), 3: ([a], [])}
    complete(found, a)
    assert shown(found) == {1: ([], [a]), 2: ([c], []), 3: ([b], [])}


def test_a_filtered_group_is_replaced_by_a_later_complete_one() -> None:
    """StaleFlow Fig. 8 (c)."""
    found = manager(1, 2)
    for group in range(4):
        reserve(found, group, 0)
    for group in range(3):
        complete(found, group)
    assert shown(found) == {0: ([], [0, 1]), 1: ([3], [2])}
    found.drop(SampleGroupId(0))
    assert shown(found) == {0: ([], [1, 2]), 1: ([3], [])}
    assert found.is_ready()


def test_a_group_has_the_version_of_its_oldest_member() -> None:
    """StaleFlow Fig. 8 (a)."""
    found = manager(1, 1, group_size=2)
    first, second = SampleGroupId(0), SampleGroupId(1)
    found.reserve(first, TrajectoryId(0), 0)
    found.reserve(first, TrajectoryId(1), 0)
    assert found.complete(first, TrajectoryId(0)) is None
    assert found.complete(first, TrajectoryId(1)) == ()
    found.consume()
    found.reserve(second, TrajectoryId(2), 1)
    assert shown(found) == {2: ([1], [])}
    found.reserve(second, TrajectoryId(3), 0)
    assert shown(found) == {1: ([1], [])}
    assert found.buffers.version(second) == 0
    # Version 0 is allowed in buffer 1 only, where another group is.
    third = SampleGroupId(2)
    found.reserve(third, TrajectoryId(4), 1)
    assert not found.buffers.admits(third, 0)
    with pytest.raises(ConflictError, match="assign a newer version"):
        found.reserve(third, TrajectoryId(5), 0)
    assert found.buffers.version(third) == 1


def test_an_older_member_may_change_places_with_another_group() -> None:
    found = manager(2, 1, group_size=2)
    first = SampleGroupId(9)
    for member in range(2):
        found.reserve(first, TrajectoryId(member), 0)
        found.complete(first, TrajectoryId(member))
    found.consume()
    for group in range(3):
        found.reserve(SampleGroupId(group), TrajectoryId(10 + group), 1)
    assert shown(found) == {1: ([2], []), 2: ([1], []), 3: ([0], [])}
    found.reserve(SampleGroupId(0), TrajectoryId(20), 0)
    assert shown(found) == {1: ([0], []), 2: ([1], []), 3: ([2], [])}


def test_surplus_groups_of_a_full_buffer_are_dropped() -> None:
    """StaleFlow Fig. 8 (b): a batch of 2 groups of which 3 are started."""
    found = manager(0, 2, extra_groups=1)
    for group in range(3):
        reserve(found, group, 0)
    assert not found.buffers.admits(SampleGroupId(3), 0)
    complete(found, 2)
    assert found.complete(SampleGroupId(0), TrajectoryId(0)) == (1,)
    assert shown(found) == {0: ([], [0, 2])}


def test_what_a_drop_makes_surplus_is_dropped_too() -> None:
    """A complete group moves forward into the batch of one that group 3 shared with group 2."""
    found = manager(1, 1, extra_groups=1)
    reserve(found, 0, 0)
    complete(found, 0)
    found.consume()
    for group, version in ((1, 1), (2, 0), (3, 0), (4, 1)):
        reserve(found, group, version)
    complete(found, 4)
    assert not found.is_ready()
    assert found.drop(SampleGroupId(3)) == (2,)
    assert found.is_ready()
    found.check_invariants()


def test_a_group_is_complete_without_its_surplus_members() -> None:
    found = manager(0, 1, group_size=2, extra_samples=1)
    group = SampleGroupId(0)
    for member in range(3):
        found.reserve(group, TrajectoryId(member), 0)
    found.complete(group, TrajectoryId(2))
    found.complete(group, TrajectoryId(0))
    assert found.consume() == {0: (0, 2)}


def test_without_staleness_nothing_starts_until_the_batch_is_consumed() -> None:
    found = manager(0, 1)
    reserve(found, 0, 0)
    complete(found, 0)
    assert not found.buffers.admits(SampleGroupId(1), 0)
    found.consume()
    assert not found.buffers.admits(SampleGroupId(1), 0)
    reserve(found, 1, 1)


def test_a_version_that_no_model_has_is_refused() -> None:
    found = manager(1, 1)
    with pytest.raises(ConflictError, match="version 1"):
        reserve(found, 0, 1)
    assert len(found.buffers) == 0


def test_a_member_is_completed_once() -> None:
    found = manager(1, 1, group_size=2)
    group = SampleGroupId(0)
    found.reserve(group, TrajectoryId(0), 0)
    found.complete(group, TrajectoryId(0))
    with pytest.raises(ConflictError, match="complete already"):
        found.complete(group, TrajectoryId(0))
    with pytest.raises(ConflictError, match="not reserved"):
        found.complete(group, TrajectoryId(1))


def test_a_buffer_that_is_not_ready_is_not_consumed() -> None:
    found = manager(1, 1)
    reserve(found, 0, 0)
    with pytest.raises(ConflictError, match="staleness buffer 0 is waiting"):
        found.consume()


@pytest.mark.parametrize("field", ["staleness", "batch_groups", "group_size", "extra_samples"])
def test_settings_out_of_range_are_refused(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        manager(**({"staleness": 1, "batch": 1} | {field.replace("batch_groups", "batch"): -1}))
