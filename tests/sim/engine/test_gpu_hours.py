"""Where the GPU-hours of a run go, over random traces, policies and faults."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.sim.engine.simulate import simulate
from plexrl.sim.results.gpu_hours import Tail, kept_sentence, tail_of, tail_sentence
from plexrl.sim.workload.policies import UNSHARED
from plexrl.sim.workload.scenario import STARVATION_S_MAX, Failures, NodeType, Pool, Scenario
from plexrl.traces import TraceJob, TraceSegment
from tests.examples import examples
from tests.sim.engine.test_run_properties import Jobs, scenarios


@settings(max_examples=examples(12), deadline=None)
@given(
    scenarios(),
    st.sampled_from(["outside", "own", "shared"]),
    st.sampled_from(["", "faults", "fillers", *UNSHARED]),
)
def test_the_gpu_hours_sum_to_those_of_the_cluster_and_none_is_below_0(
    scenario: Scenario, rollouts: str, extra: str
) -> None:
    rows: tuple[TraceJob, ...] = scenario.source.rows  # type: ignore[attr-defined]
    rows = tuple(replace(job, rollout_gpus=min(job.gpus, 8)) for job in rows)
    scenario = replace(scenario, source=Jobs(rows), rollouts=rollouts)  # type: ignore[arg-type]
    if extra == "faults":
        scenario = replace(
            scenario, failures=Failures(node_mtbf_s=20_000.0, worker_mtbf_s=5_000.0, repair_s=300.0)
        )
    elif extra == "fillers":
        scenario = replace(scenario, fills_valleys=True)
    elif extra:
        where = "own" if rollouts == "own" else "outside"
        scenario = replace(
            scenario,
            policy=extra,
            pools=scenario.pools[:1],
            rollouts=where,  # type: ignore[arg-type]
        )
    result = simulate(scenario)
    total = result.gpus * result.drain_s / 3600
    assert sum(hours for _, hours in result.where.parts()) == pytest.approx(total, rel=1e-9)
    assert result.where.total == pytest.approx(total, rel=1e-9)
    for name, hours in result.where.parts():
        assert hours >= -1e-9 * total, name
    assert -1e-9 <= result.where.unallocated_kept <= result.where.unallocated + 1e-9
    assert -1e-9 <= result.where.unallocated_tail <= result.where.unallocated + 1e-9
    if rollouts == "outside":
        assert result.where.rollouts_work == result.where.rollout_gpus_idle == 0.0
    assert 0.0 <= result.tail.works <= result.tail.held + 1e-9
    assert result.tail.held <= 1.0
    assert 0.0 <= result.tail.part <= 1.0


def test_the_tail_is_measured_from_the_middle_of_a_bin() -> None:
    series = ((0.0, 1.0, 0.8), (100.0, 0.5, 0.4), (200.0, 0.25, 0.1))
    tail = tail_of(series, 250.0, 150.0)
    assert (tail.seconds, tail.part) == (100.0, 0.4)
    assert tail.held == pytest.approx((0.5 * 50 + 0.25 * 50) / 100)
    assert tail.works == pytest.approx((0.4 * 50 + 0.1 * 50) / 100)
    assert "the last 40 % of the drain" in tail_sentence(tail)
    assert tail_of(series, 250.0, 250.0) == Tail()


@pytest.mark.parametrize(
    ("policy", "bound_s", "kept_gpus"),
    [
        ("isolated+backfill", 0.0, 4),
        ("isolated+backfill", STARVATION_S_MAX, 0),
        ("isolated", 0.0, 4),
    ],
)
def test_free_gpus_that_are_kept_for_a_large_job_are_counted(
    policy: str, bound_s: float, kept_gpus: int
) -> None:
    busy = (TraceSegment(function="update", offset_s=10.0, duration_s=90.0),)
    jobs = tuple(
        TraceJob(
            job_id=name,
            submit_s=submit_s,
            gpus=gpus,
            cycles=cycles,
            state_bytes=1 << 30,
            period_s=100.0,
            segments=busy,
        )
        for name, submit_s, gpus, cycles in (
            ("first", 0.0, 4, 36),
            ("large", 1.0, 8, 36),
            ("long", 2.0, 4, 360),
        )
    )
    result = simulate(
        Scenario(
            source=Jobs(jobs), pools=(Pool(nodes=1),), policy=policy, starvation_bound_s=bound_s
        )
    )
    where = result.where
    # While the first runs for an hour, half of the GPUs wait for the large one.
    assert where.unallocated_kept == pytest.approx(kept_gpus, rel=0.05)
    assert where.unallocated >= where.unallocated_kept
    assert ("kept for the first job" in kept_sentence(where)) == (kept_gpus > 0)


def test_one_job_runs_on_the_faster_of_two_idle_node_types() -> None:
    busy = (TraceSegment(function="update", offset_s=10.0, duration_s=90.0),)
    job = TraceJob(
        job_id="only",
        submit_s=0.0,
        gpus=8,
        cycles=10,
        state_bytes=8 << 30,
        period_s=100.0,
        segments=busy,
    )
    slow, fast = (
        Pool(nodes=1, node_type=NodeType(name=name, speed=speed, gpu_memory_bytes=memory << 30))
        for name, speed, memory in (("a-slow", 0.315, 80), ("b-fast", 2.275, 180))
    )
    found = [
        simulate(Scenario(source=Jobs((job,)), pools=pools, policy=policy)).drain_s
        for policy in ("isolated", "pack", "spread+backfill")
        for pools in ((fast,), (slow, fast))
    ]
    assert found == pytest.approx(found[:1] * len(found))
