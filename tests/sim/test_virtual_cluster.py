"""The simulator drives the real core, loses nothing and repeats itself exactly."""

from dataclasses import replace
from random import Random

import pytest

from plexrl.ids import DeploymentId, JobId, NodeId, TenantId
from plexrl.scheduler.dispatch.ordering import ORDERINGS
from plexrl.scheduler.state import events as ev
from plexrl.sim import (
    PUBLISHED,
    JobPlan,
    RunReport,
    VirtualCluster,
    published,
    summarise,
    virtual_config,
)

SWITCH_S = 8.0


def plans(jobs: int, *, sigma: float = 0.15, cycles: int = 12, name: str = "7B") -> list[JobPlan]:
    profile = published(name, sigma=sigma, switch_s=SWITCH_S)
    return [
        JobPlan(
            name=f"job{number}",
            profile=profile,
            start_s=number * profile.cycle_s / jobs,
            cycles=cycles,
            warm_up=3,
        )
        for number in range(jobs)
    ]


def run(jobs: int, ordering: str = "hrrs", **changes: object) -> RunReport:
    # Snapshots for a recovery are left out: they cost a job that is alone, too.
    config = virtual_config(ordering=ordering, snapshot_work_s=1e9)
    return VirtualCluster(plans(jobs, **changes), seed=1, config=config).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_job_alone_loses_nothing(name: str) -> None:
    report = run(1, name=name)
    assert report.switches == 0
    assert [cycle.wait_s for cycle in report.jobs[0].cycles] == pytest.approx([0.0] * 12, abs=1e-6)
    assert report.jobs[0].duty_wait == pytest.approx(0.0, abs=1e-6)


def test_a_run_in_which_nothing_more_can_happen_names_the_jobs_that_wait() -> None:
    cluster = VirtualCluster(plans(1), seed=1)
    node = ev.NodeJoined(
        node=NodeId("train0"),
        gpus=1,
        gpu_memory_bytes=1 << 40,
        host_memory_bytes=1 << 50,
        statemanager="train0/statemanager",
        node_type="train",
    )
    submitted = ev.JobSubmitted(
        job=JobId("holder"),
        tenant=TenantId("tenant"),
        name="holder",
        controller_timeout_s=1e13,
        reattach_timeout_s=1e13,
    )
    created = ev.DeploymentCreated(
        deployment=DeploymentId("holder/actor"),
        job=JobId("holder"),
        kind="train",
        workers=1,
        state_bytes=1,
        exclusive=True,
        spec_json="{}",
        node_type="train",
    )
    for event in (node, submitted, created):
        cluster.core.handle(event, 0.0)
    with pytest.raises(RuntimeError, match="these jobs are not complete: job0"):
        cluster.run()


def test_the_published_means_add_up_to_the_published_cycle() -> None:
    assert [published(name).cycle_s for name in PUBLISHED] == [289.03, 284.80, 589.71]


def test_draws_have_the_published_mean() -> None:
    profile, random = published("30B", sigma=0.15), Random(1)
    drawn = [profile.draw(random) for _ in range(20_000)]
    assert sum(c.update_s for c in drawn) / len(drawn) == pytest.approx(56.35, rel=0.01)
    assert sum(c.rollout_s for c in drawn) / len(drawn) == pytest.approx(201.26, rel=0.01)
    assert {round(c.update_s / c.tokens, 9) for c in drawn[:50]} == {round(56.35e-6, 9)}


@pytest.mark.parametrize("rule", sorted(ORDERINGS))
def test_the_same_seed_gives_the_same_log_byte_for_byte(rule: str) -> None:
    def log(seed: int) -> bytes:
        config = virtual_config(ordering=rule)
        cluster = VirtualCluster(plans(3), seed=seed, config=config, keep_log=True)
        cluster.run()
        return cluster.log

    assert log(1) == log(1)
    assert log(1) != log(2)


@pytest.mark.parametrize("rule", sorted(ORDERINGS))
def test_every_submitted_operation_finishes(rule: str) -> None:
    cluster = VirtualCluster(plans(4), seed=2, config=virtual_config(ordering=rule))
    cluster.run()
    cluster.core.check_invariants()
    # At the end each job has at most its update's two operations, or one other, under way.
    assert 0 <= cluster.submitted - cluster.finished <= 2 * 4
    assert cluster.finished >= 4 * 15 * 4


def test_every_rule_is_given_the_same_cycles() -> None:
    alone = [
        [cycle.alone_s for job in run(3, rule).jobs for cycle in job.cycles] for rule in ORDERINGS
    ]
    assert all(other == alone[0] for other in alone)


def test_an_expected_member_finds_its_state_on_the_gpus() -> None:
    """Two jobs without jitter that fit beside each other wait for nothing, not even for switches;
    with every switch made on demand, each cycle loses one."""
    expected = run(2, sigma=0.0)
    assert expected.slowdowns == pytest.approx([0.0] * 24, abs=1e-6)
    on_demand = run(2, "fifo-bursts", sigma=0.0)
    waits = [cycle.wait_s for job in on_demand.jobs for cycle in job.cycles]
    assert waits == pytest.approx([SWITCH_S] * 24, abs=1e-6)


def test_a_burst_is_one_switch_and_an_operation_is_up_to_three() -> None:
    bursts, operations = run(4, "fifo-bursts"), run(4, "fifo-operations")
    assert bursts.switches <= 1.1 * 4 * 16
    assert operations.switches > 1.5 * bursts.switches
    assert bursts.summary.mean < operations.summary.mean


def test_summaries_are_of_the_nearest_rank() -> None:
    summary = summarise(n / 100 for n in range(100))
    assert (summary.median, summary.p95) == (0.495, 0.95)


def test_a_slow_controllers_pauses_are_learned_and_waited_for() -> None:
    """Pauses of a second inside a burst cost less than a switch away and back, so after the first
    of them bursts are whole again."""
    slow = [
        replace(plan, profile=replace(plan.profile, controller_s=1.0), cycles=20)
        for plan in plans(4)
    ]
    report = VirtualCluster(slow, seed=1, config=virtual_config(ordering="fifo-bursts")).run()
    assert report.switches <= 1.2 * 4 * 24
