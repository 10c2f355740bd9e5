"""Groups shared under `spread`: what placement predicts and what the runtime then has."""

from dataclasses import replace
from statistics import fmean

import pytest

from plexrl.scheduler.state.demand import DemandTrace, Segment
from plexrl.scheduler.state.estimates import MOVE_BYTES_PER_S
from plexrl.sim import JobPlan, VirtualCluster, published, virtual_config

SWITCH_S = 8.0


def plans(
    count: int, *, name: str = "7B", sigma: float = 0.0, cycles: int = 16, declared: bool = True
) -> list[JobPlan]:
    profile = published(name, sigma=sigma, switch_s=SWITCH_S)
    # The size from which the same switch is estimated before one was seen.
    profile = replace(profile, state_bytes=round(SWITCH_S / 2 * MOVE_BYTES_PER_S))
    trace = DemandTrace(
        period_s=profile.cycle_s,
        segments=(Segment(offset_s=0.0, duration_s=profile.cycle_s - profile.rollout_s),),
        jitter_s=0.9 * sigma * profile.cycle_s,
    )
    return [
        JobPlan(
            name=f"job{number}",
            profile=profile,
            start_s=number * profile.cycle_s / count,
            cycles=cycles,
            warm_up=6,
            trace=trace if declared else None,
        )
        for number in range(count)
    ]


def spread(jobs: list[JobPlan], groups: int = 1, waiting_part_max: float = 1.0) -> VirtualCluster:
    config = virtual_config(
        policy="spread", waiting_part_max=waiting_part_max, load_max=8.0, overlap_max=1.0
    )
    return VirtualCluster(jobs, seed=1, config=config, groups=groups)


@pytest.mark.parametrize("sigma", [0.0, 0.15])
def test_the_profiler_and_the_records_measure_the_same_waiting(sigma: float) -> None:
    jobs = plans(3, name="30B", sigma=sigma, cycles=64)
    for job in spread(jobs).run().jobs:
        assert fmean(job.profiled) == pytest.approx(job.waiting_part, abs=0.005)


def test_a_placement_says_what_its_group_will_wait() -> None:
    cluster = spread(plans(4, name="30B"))
    report = cluster.run()
    told = [cluster.explained(f"job{number}")["placement"] for number in range(4)]
    assert [each["contention"] for each in told[:2]] == pytest.approx([0.0, 0.0])
    measured = fmean(job.waiting_part for job in report.jobs)
    assert told[3]["contention"] == pytest.approx(measured, rel=0.1)
    assert measured > 0.2


def test_a_group_whose_members_would_wait_too_much_takes_no_more() -> None:
    """Four 30B jobs saturate a group, and there are two."""
    cluster = spread(plans(4, name="30B", cycles=4), groups=2, waiting_part_max=0.1)
    report = cluster.run()
    placed = [cluster.explained(f"job{number}")["group"] for number in range(4)]
    assert len(set(placed)) == 2
    assert all(job.waiting_part < 0.1 for job in report.jobs)


@pytest.mark.parametrize("policy", ["spread", "spread+backfill"])
def test_jobs_without_a_profile_get_one_and_end_where_they_fit(policy: str) -> None:
    config = virtual_config(policy=policy)
    jobs = plans(4, declared=False)
    cluster = VirtualCluster(jobs, seed=1, config=config, groups=4)
    cluster.run()
    cluster.core.check_invariants()
    told = [cluster.explained(plan.name) for plan in jobs]
    assert all(each["profile"]["cycles"] > 0 for each in told)
    assert len({each["group"] for each in told}) < 4
    assert all(each["waiting_part"] < 0.05 for each in told)
