"""No history of delays, partitions and changes of the leader lets two holders of work act.

The model has one node and two schedulers, each with a clock of its own offset and speed, and real
leases on both sides. Messages are delayed or lost at will. The oracle sees true time.
"""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plexrl.ids import NodeId
from plexrl.scheduler.service.connections.node_leases import DRIFT, FENCING_S, NodeLeases
from plexrl.scheduler.service.service import excuse
from plexrl.worker.process.node_lease import NodeLease
from tests.examples import examples

NODE = NodeId("n")
LEASE_S = 15.0
LEAD_S = 10.0
FENCES_IN_S = FENCING_S / 2
"""Longest time from the end of the lease to the end of the workers in this model."""
steps = st.sampled_from([0.01, 0.5, 1.0, 2.5, 4.0, 7.5, 10.0, 15.0, 20.0])


class _Clock:
    """A machine's clock."""

    def __init__(self, offset_s: float, speed: float) -> None:
        self._offset_s, self._speed = offset_s, speed

    def at(self, true_s: float) -> float:
        return self._offset_s + self._speed * true_s


class _Scheduler:
    def __init__(self, clock: _Clock) -> None:
        self.clock = clock
        self.leases = NodeLeases(LEASE_S, LEAD_S)
        self.confirmed_at = float("-inf")
        """By its own clock."""


class Histories(RuleBasedStateMachine):
    """Any order of heartbeats, answers, losses and elections."""

    @initialize(
        offsets=st.tuples(*[st.sampled_from([-1e6, -3.0, 0.0, 12.5, 4e8])] * 3),
        speeds=st.tuples(*[st.sampled_from([1 - DRIFT / 3, 1.0, 1 + DRIFT / 3])] * 3),
    )
    def begin(self, offsets: tuple[float, ...], speeds: tuple[float, ...]) -> None:
        self.now = 0.0
        clocks = [_Clock(offset, speed) for offset, speed in zip(offsets, speeds, strict=True)]
        self.node_clock = clocks[0]
        self.schedulers = [_Scheduler(clock) for clock in clocks[1:]]
        self.leader = 0
        """Who leads by the journal; the other may not know that it does not."""
        self.schedulers[0].confirmed_at = clocks[1].at(0.0)
        self._folder = tempfile.TemporaryDirectory()
        self.lease = NodeLease(Path(self._folder.name) / "lease")
        self.asked: list[float] = []
        """Heartbeats on their way: when they were sent, by the node's clock."""
        self.answered: list[tuple[float, float]] = []
        """Answers on their way: sending time of the heartbeat, and lease."""
        self.works = False
        self.given_away = False
        """The node's work was given to another node."""

    def teardown(self) -> None:
        self._folder.cleanup()

    def _local(self) -> float:
        return self.node_clock.at(self.now)

    @rule(step_s=steps)
    def time_passes(self, step_s: float) -> None:
        end = self.now + step_s
        while self.now < end:
            self.now = min(end, self.now + FENCES_IN_S)
            if self.lease.left_s(self._local()) <= 0.0:
                self.works = False

    @rule()
    def node_sends_a_heartbeat(self) -> None:
        self.asked.append(self._local())

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), to=st.integers(0, 1))
    def a_scheduler_answers(self, data: st.DataObject, to: int) -> None:
        sent_at = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        one = self.schedulers[to]
        granted_s = one.leases.grant(NODE, one.clock.at(self.now), one.confirmed_at)
        self.answered.append((sent_at, granted_s))

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def an_answer_arrives(self, data: st.DataObject) -> None:
        sent_at, lease_s = self.answered.pop(data.draw(st.integers(0, len(self.answered) - 1)))
        self.lease.extend(sent_at, lease_s)

    @rule(to=st.integers(0, 1))
    def a_heartbeat_is_answered_at_once(self, to: int) -> None:
        one = self.schedulers[to]
        granted_s = one.leases.grant(NODE, one.clock.at(self.now), one.confirmed_at)
        self.lease.extend(self._local(), granted_s)
        self.works = self.works or (granted_s > 0.0 and not self.given_away)

    @precondition(lambda self: self.asked or self.answered)
    @rule()
    def everything_on_its_way_is_lost(self) -> None:
        self.asked.clear()
        self.answered.clear()

    @rule(who=st.integers(0, 1))
    def the_journal_is_asked_who_leads(self, who: int) -> None:
        if who == self.leader:
            one = self.schedulers[who]
            one.confirmed_at = one.clock.at(self.now)

    @rule()
    def the_other_scheduler_takes_over(self) -> None:
        """At any time: an operator may force it, the journal's database may be restored."""
        self.leader = 1 - self.leader
        one = self.schedulers[self.leader]
        local = one.clock.at(self.now)
        one.confirmed_at = local
        one.leases = NodeLeases(LEASE_S, LEAD_S)
        one.leases.take_over(NODE, "", local, LEASE_S)

    @precondition(lambda self: not self.given_away)
    @rule()
    def work_is_launched(self) -> None:
        """The leader's command arrives while the node has its lease."""
        if self.lease.is_needed and self.lease.left_s(self._local()) > 0.0:
            self.works = True

    @rule()
    def the_leader_takes_the_work_elsewhere_if_it_may(self) -> None:
        one = self.schedulers[self.leader]
        if one.leases.left_s(NODE, one.clock.at(self.now)) == 0.0:
            self.given_away = True

    @precondition(lambda self: self.given_away)
    @rule()
    def the_work_comes_back(self) -> None:
        """The other node's part has ended; the work may be launched here again."""
        self.given_away = False

    @invariant()
    def never_two_holders(self) -> None:
        assert not (self.works and self.given_away)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None)


def test_the_model_finds_a_scheduler_that_does_not_wait() -> None:
    """The property can fail: without the wait for the lease, two holders act."""
    model = Histories()
    model.begin((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    model.node_sends_a_heartbeat()
    one = model.schedulers[0]
    model.lease.extend(model.asked[0], one.leases.grant(NODE, 0.0, 0.0))
    model.work_is_launched()
    one.leases = NodeLeases(LEASE_S, LEAD_S)
    model.the_leader_takes_the_work_elsewhere_if_it_may()
    try:
        model.never_two_holders()
    except AssertionError:
        return
    finally:
        model.teardown()
    raise AssertionError("the invariant holds although the work was given away too early")


def test_a_successor_waits_for_the_last_lease_that_the_former_leader_may_grant() -> None:
    """The former leader is cut off from the journal, but not from the node."""
    former, successor = NodeLeases(LEASE_S, LEAD_S), NodeLeases(LEASE_S, LEAD_S)
    successor.take_over(NODE, "", 0.0, LEASE_S)
    assert former.grant(NODE, LEAD_S, lead_confirmed_at=0.0) == LEASE_S
    assert successor.left_s(NODE, LEAD_S + LEASE_S) >= FENCING_S
    assert former.grant(NODE, LEAD_S + 0.1, lead_confirmed_at=0.0) == 0.0


def test_an_agent_waits_for_the_lease_of_another_machine_only() -> None:
    leases = NodeLeases(LEASE_S, LEAD_S)
    assert leases.wait_s(NODE, "one", 0.0) == 0.0
    leases.grant(NODE, 0.0, lead_confirmed_at=0.0)
    assert leases.wait_s(NODE, "one", 1.0) == 0.0, "its agent may come back at once"
    left_s = leases.wait_s(NODE, "two", 1.0)
    assert left_s == leases.left_s(NODE, 1.0) > 0.0
    assert leases.wait_s(NODE, "one", 1.0) == 0.0, "the other machine is not the node yet"
    assert leases.wait_s(NODE, "two", 1.0 + left_s) == 0.0
    leases.grant(NODE, 30.0, lead_confirmed_at=30.0)
    assert leases.wait_s(NODE, "one", 30.0) > 0.0


def test_a_suspended_scheduler_excuses_silence_for_as_long_and_no_later_one() -> None:
    assert excuse(100.0, 0.0, 110.0) == 100.0
    assert excuse(100.0, 7.0, 110.0) == 107.0
    # An hour was lost; what is silent from now on is noticed as soon as ever.
    assert excuse(3699.0, 3600.0, 3700.0) == 3700.0
