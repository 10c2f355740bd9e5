"""Jobs that share a node group: what ordering rules and placement cost each of them."""

from statistics import fmean

import pytest

from benchmarks.simulating.shared_group import SharedGroup

SWITCH_S = 8.0
UNBOUNDED = {"policy": "spread", "waiting_part_max": 1.0, "load_max": 8.0, "overlap_max": 1.0}
"""Scheduler settings under which no group is too busy."""
WARM_UP = 3


def shared(
    jobs: int, ordering: str, *, cycles: int = 15, sigma: float = 0.0, controller_s: float = 0.01
) -> SharedGroup:
    group = SharedGroup(
        ("7B",) * jobs,
        # Snapshots for recovery cost a job time on a group of its own too.
        settings={"ordering": ordering, "snapshot_work_s": 1e9},
        cycles=cycles,
        sigma=sigma,
        switch_s=SWITCH_S,
        controller_s=controller_s,
    )
    group.run(cycles)
    return group


def waits_s(group: SharedGroup) -> list[float]:
    return [
        cycle.took_s - cycle.alone_s
        for cycles in group.cycles.values()
        for cycle in cycles[WARM_UP:]
    ]


def test_anticipation_hides_the_switches_of_jobs_that_fit_beside_each_other() -> None:
    hidden = waits_s(shared(2, "hrrs"))
    assert hidden == pytest.approx([0.0] * len(hidden), abs=1e-6)
    on_demand = waits_s(shared(2, "fifo-bursts"))
    assert on_demand == pytest.approx([SWITCH_S] * len(on_demand), abs=1e-6)


def test_ordering_by_burst_switches_once_a_cycle_and_by_operation_more_often() -> None:
    bursts = shared(4, "fifo-bursts", sigma=0.15)
    operations = shared(4, "fifo-operations", sigma=0.15)
    assert bursts.switches <= 1.1 * len(bursts.slowdowns)
    assert operations.switches > 1.5 * bursts.switches
    assert fmean(bursts.slowdowns) < fmean(operations.slowdowns)


def test_the_scheduler_learns_a_slow_controllers_pauses_and_keeps_its_bursts_whole() -> None:
    """A pause of a second inside a burst costs less than a switch away and back."""
    group = shared(4, "fifo-bursts", cycles=23, sigma=0.15, controller_s=1.0)
    assert group.switches <= 1.2 * len(group.slowdowns)


@pytest.mark.parametrize("sigma", [0.0, 0.15])
def test_the_profiler_and_the_records_measure_the_same_waiting(sigma: float) -> None:
    group = SharedGroup(("30B",) * 3, settings=UNBOUNDED, cycles=70, sigma=sigma)
    readings: dict[str, list[float]] = {job: [] for job in group.jobs}
    for cycles in range(14, 71, 8):
        group.run(cycles)
        for job in group.jobs:
            readings[job].append(group.explain(job)["waiting_part"])
    for job in group.jobs:
        assert fmean(readings[job]) == pytest.approx(group.waiting_part(job, 6), abs=0.008)


def test_a_placement_predicts_what_its_group_will_wait() -> None:
    group = SharedGroup(("30B",) * 4, settings=UNBOUNDED, cycles=22)
    group.run(22)
    placements = [group.explain(job)["placement"] for job in group.jobs]
    assert [each["contention"] for each in placements[:2]] == pytest.approx([0.0, 0.0])
    measured = fmean(group.waiting_part(job, 6) for job in group.jobs)
    assert placements[3]["contention"] == pytest.approx(measured, rel=0.1)
    assert measured > 0.2


def test_a_group_whose_members_would_wait_too_much_takes_no_more() -> None:
    """Four 30B jobs saturate a group, and there are two groups."""
    settings = {**UNBOUNDED, "waiting_part_max": 0.1}
    group = SharedGroup(("30B",) * 4, settings=settings, cycles=10, groups=2)
    group.run(10)
    assert len({group.explain(job)["group"] for job in group.jobs}) == 2
    assert all(group.waiting_part(job, 6) < 0.1 for job in group.jobs)


@pytest.mark.parametrize("policy", ["spread", "spread+backfill"])
def test_jobs_without_a_declared_demand_get_a_profile_and_share_groups(policy: str) -> None:
    group = SharedGroup(("7B",) * 4, settings={"policy": policy}, cycles=22, groups=4, warm=False)
    group.run(22)
    explained = [group.explain(job) for job in group.jobs]
    assert all(each["profile"]["cycles"] > 0 for each in explained)
    assert len({each["group"] for each in explained}) < 4
    assert all(each["waiting_part"] < 0.05 for each in explained)
