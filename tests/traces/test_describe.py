"""The description of a trace is correct, with quantiles within 1 %."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.traces import (
    ResponseLength,
    TraceJob,
    TraceSegment,
    describe_jobs,
    describe_lengths,
)
from plexrl.traces.describe import NAMES_MAX, ColumnSketch, offered_load


@settings(max_examples=60)
@given(st.lists(st.floats(1e-3, 1e9) | st.just(0.0), min_size=1), st.floats(0, 1))
def test_a_quantile_is_within_one_part_in_a_hundred(values: list[float], part: float) -> None:
    sketch = ColumnSketch()
    for value in values:
        sketch.add(value)
    ordered = sorted(values)
    rank = max(1, -int(-(part * len(values)) // 1))
    assert sketch.quantile(part) == pytest.approx(ordered[rank - 1], rel=0.0101)
    assert sketch.mean == pytest.approx(sum(values) / len(values))
    assert (sketch.low, sketch.high) == (ordered[0], ordered[-1])


def test_a_trace_is_summed_up() -> None:
    segment = TraceSegment(function="update", offset_s=5.0, duration_s=5.0)
    jobs = [
        TraceJob(job_id="a", submit_s=0.0, gpus=8, duration_s=3600.0, tenant="x", model="7B"),
        TraceJob(
            job_id="b",
            submit_s=100.0,
            gpus=64,
            rollout_gpus=64,
            cycles=360,
            period_s=10.0,
            segments=(segment,),
            outcome="failed",
            wait_s=0.0,
        ),
    ]
    found = describe_jobs(jobs)
    assert (found["jobs"], found["gpu_hours"], found["tenants"]) == (2, 136.0, 2)
    assert found["sizes"] == [
        {"size": "8-31 GPUs", "jobs": 1, "gpu_hours": 8.0},
        {"size": "128 GPUs and more", "jobs": 1, "gpu_hours": 128.0},
    ]
    assert found["models"] == {"": 1, "7B": 1}
    assert found["quantities"]["duty"]["mean"] == 0.5
    assert found["quantities"]["wait_s"]["count"] == 1
    assert found["end_s"] == 3700.0
    assert offered_load(found, 136) == pytest.approx(36.0)
    assert describe_jobs([])["quantities"] == {}
    assert offered_load(describe_jobs(jobs[:1]), 8) == float("inf")


def test_names_are_counted_up_to_a_bound() -> None:
    jobs = (
        TraceJob(job_id=str(at), submit_s=0.0, gpus=1, duration_s=1.0, tenant=f"t{at}")
        for at in range(NAMES_MAX + 50)
    )
    assert describe_jobs(jobs)["tenants"] == NAMES_MAX


def test_lengths_are_summed_up() -> None:
    rows = [ResponseLength(output_tokens=10, group="a"), ResponseLength(output_tokens=30)]
    found = describe_lengths(rows)
    assert (found["responses"], found["grouped"]) == (2, 1)
    assert found["quantities"]["output_tokens"]["mean"] == 20.0
