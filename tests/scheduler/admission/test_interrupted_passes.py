"""An admission pass that is continued in later events places what a whole pass places."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.scheduler.admission.admission_pass import AdmissionPass
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages import timers
from tests.examples import examples
from tests.scheduler.admission.test_admission_pass import (
    GPUS,
    POLICIES,
    Request,
    backlog,
    endings,
    requests,
)
from tests.scheduler.fake_cluster import FakeCluster

STEPS = st.sampled_from((1, 2, 7, 30, 110, 400))


def in_parts(whole: FakeCluster, steps: int) -> FakeCluster:
    """The same history with at most so many steps of a pass in one event, and nothing between the
    parts of one pass."""
    fields = ("policy", "searches_max", "residents_max")
    settings_ = {name: getattr(whole.config, name) for name in fields}
    parts = FakeCluster(admission_steps=steps, **settings_)
    for event, at in whole.journal:
        parts.now = at
        parts.send(event)
        finish_pass(parts)
    return parts


def finish_pass(cluster: FakeCluster) -> None:
    """Fire the timer of the interrupted pass until it is over."""
    for _ in range(10_000):
        if cluster.core._context.admission.interrupted is None:
            return
        due = {what for at, what in cluster.core._context.effects.timers if at <= cluster.now}
        assert timers.ADMISSION in due, "nothing continues the pass"
        assert cluster.core._context.effects.timer_at is not None, "no wake-up was asked for"
        cluster.send(ev.TimerFired())
    raise AssertionError("the pass does not end")


def placements(cluster: FakeCluster) -> dict[str, tuple[object, ...]]:
    """The GPUs of each deployment."""
    deployments = cluster.core._context.state.deployments
    return {name: each.ranks for name, each in deployments.items()}


def nothing_fits(cluster: FakeCluster) -> bool:
    """Whether a whole pass over all deployments would place none."""
    core = SchedulerCore.restore(cluster.config, cluster.core.dump())
    return AdmissionPass.begin(core._context.cluster, cluster.now, None).run(cluster.now) == []


def end_one(cluster: FakeCluster, chosen: int) -> ev.JobFinished | None:
    """The end of one of the jobs that hold GPUs."""
    deployments = cluster.core._context.state.deployments.values()
    holders = sorted({each.job for each in deployments if each.group})
    if not holders:
        return None
    return ev.JobFinished(job=holders[chosen % len(holders)], outcome="completed")


@settings(max_examples=examples(15), deadline=None)
@given(st.sampled_from(POLICIES), requests, endings, st.booleans(), STEPS)
def test_an_interrupted_pass_places_what_a_whole_pass_places(
    policy: str, wanted: list[Request], ending: list[int], is_tight: bool, steps: int
) -> None:
    whole = backlog(policy, wanted, is_tight=is_tight)
    parts = in_parts(whole, steps)
    for chosen in ending:
        assert placements(parts) == placements(whole)
        event = end_one(whole, chosen)
        if event is None:
            return
        parts.now = whole.now
        whole.send(event)
        parts.send(event)
        finish_pass(parts)
    assert placements(parts) == placements(whole)


@settings(max_examples=examples(15), deadline=None)
@given(st.sampled_from(POLICIES), requests, endings, st.lists(st.integers(0, 4)), STEPS)
def test_events_between_the_parts_of_a_pass_leave_nobody_waiting_who_fits(
    policy: str, wanted: list[Request], ending: list[int], between: list[int], steps: int
) -> None:
    parts = in_parts(backlog(policy, wanted, is_tight=False), steps)
    for number, chosen in enumerate(ending):
        event = end_one(parts, chosen)
        if event is None:
            break
        parts.send(event)
        for _ in range(between[number] if number < len(between) else 0):
            parts.send(ev.TimerFired())
        waiting = sorted(parts.core._context.cluster.waiting)
        if waiting and chosen % 2:
            # A job that waits ends before it is reached, or after.
            gone = parts.core._context.state.deployments[waiting[chosen % len(waiting)]].job
            parts.send(ev.JobFinished(job=gone, outcome="cancelled"))
        parts.job(f"late{number}")
        parts.deploy(f"late{number}/a", workers=1 + chosen % GPUS)
    finish_pass(parts)
    assert nothing_fits(parts)
    again = SchedulerCore(parts.config)
    for sent, at in parts.journal:
        again.handle(sent, at)
    assert again.dump() == parts.core.dump()


def crowd(steps: int | None) -> FakeCluster:
    """A full node, and jobs of many tenants behind a full one."""
    cluster = FakeCluster(policy="isolated", admission_steps=steps)
    cluster.join_node(GPUS)
    for number in range(40):
        cluster.job(f"j{number:02}", f"t{number}", priority=-(number % 3))
        cluster.deploy(f"j{number:02}/a", workers=1 if number < GPUS else 1 + number % 3)
        finish_pass(cluster)
    return cluster


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_ends_of_jobs_in_every_part_of_a_pass_do_not_keep_it_from_its_end(steps: int) -> None:
    cluster = crowd(steps)
    for number in range(GPUS):
        cluster.send(ev.JobFinished(job=f"j{number:02}", outcome="completed"))
        assert cluster.core._context.admission.interrupted is not None
    cluster.send(ev.TenantCreated(tenant="x", key_digest="x"))
    for _ in range(400):
        # Budgets of nobody concerned: each has all deployments considered again.
        cluster.send(
            ev.TenantConfigured(
                tenant="x", weight=1.0, jobs_max=None, gpus_max=None, gpu_seconds_max=None
            )
        )
        if cluster.timer_at is not None:
            cluster.timer_at = None
            cluster.send(ev.TimerFired())
    deployments = cluster.core._context.state.deployments.values()
    assert sum(each.workers for each in deployments if each.group) == GPUS


def test_a_restored_scheduler_goes_on_inside_the_pass() -> None:
    cluster = crowd(5)
    cluster.send(ev.JobFinished(job="j00", outcome="completed"))
    other = SchedulerCore.restore(cluster.config, cluster.core.dump())
    steps = 0
    while cluster.core._context.admission.interrupted is not None:
        expected = other.handle(ev.TimerFired(), cluster.now)
        assert cluster.send(ev.TimerFired()) == expected
        other = SchedulerCore.restore(cluster.config, other.dump())
        assert other.dump() == cluster.core.dump()
        steps += 1
    assert steps > 3
    assert nothing_fits(cluster)
