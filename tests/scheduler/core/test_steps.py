"""The steps that an event causes are bounded."""

import pytest

from plexrl.ids import GroupId
from plexrl.scheduler.core.advance import STEPS_EACH, STEPS_MIN, EndlessStepsError, Fault
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster


class Sticky(dict[GroupId, None]):
    """Groups to look at again, of which one never leaves."""

    def __init__(self, kept: GroupId) -> None:
        super().__init__({kept: None})
        self._kept = kept
        self.steps = 0

    def __delitem__(self, key: GroupId) -> None:
        if key == self._kept:
            self.steps += 1
        else:
            super().__delitem__(key)


def test_a_step_that_repeats_without_end_is_named() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node()
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    context = cluster.core._context
    _, restless = context.state.groups
    context.effects.dirty = dirty = Sticky(restless)
    with pytest.raises(Fault) as found:
        cluster.core.handle(ev.TimerFired(), cluster.now)
    assert found.value.step == f"group {restless}"
    assert isinstance(found.value.error, EndlessStepsError)
    assert f"'group {restless}'" in str(found.value.error)
    assert dirty.steps == STEPS_MIN + STEPS_EACH * 4 + 1


def test_thousands_of_timers_may_be_due_in_one_event() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node()
    jobs = 2 * (STEPS_MIN + STEPS_EACH)
    for number in range(jobs):
        cluster.send(
            ev.JobSubmitted(
                job=f"job{number}",
                tenant="t",
                name="",
                controller_timeout_s=60.0,
                reattach_timeout_s=1e6,
            )
        )
    cluster.now += 100.0
    cluster.core.handle(ev.TimerFired(), cluster.now)
    assert not any(job.attached for job in cluster.core._context.state.jobs.values())
