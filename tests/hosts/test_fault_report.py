"""The report of a fault run tells faults that happened from those that did not."""

import pytest

from tests.hosts.fault_report import FaultReport, made
from tests.hosts.fault_schedule import CUT, KILL, Fault
from tests.hosts.injector import Outcome

KILLED = Outcome(Fault(at_s=1, what=KILL, host="a", target="rank"), at_s=2.0, effect="killed")
MISSED = Outcome(Fault(at_s=9, what=KILL, host="b", target="rank"), effect="no process ran")
UNCUT = Outcome(Fault(at_s=20, what=CUT, host="a", target="b"))


def report(*outcomes: Outcome, **steps: int) -> FaultReport:
    return FaultReport(1, 100.0, "head", outcomes=outcomes, steps=steps)


def test_one_effect_of_each_kind_and_steps_of_every_job_are_enough() -> None:
    found = report(KILLED, MISSED, policy=1)
    found.check_effects()
    assert found.counts() == {"kill -9 rank (node)": (2, 1)}
    assert "kill -9: b rank; no process ran" in found.text()


def test_a_kind_without_effect_is_found() -> None:
    with pytest.raises(AssertionError, match=r"took no effect: .*cut a-b"):
        report(KILLED, UNCUT, policy=1).check_effects()


def test_a_job_without_steps_is_found() -> None:
    steps = made({"policy": 3, "trainer": 2}, {"policy": 4, "trainer": 2})
    with pytest.raises(AssertionError, match=r"made no step .*trainer"):
        report(KILLED, **steps).check_effects()
