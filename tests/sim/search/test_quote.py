"""Quotes: futures of a plan with and without a job, seed by seed."""

import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest

from plexrl.errors import CapacityError, InvalidRequestError, from_wire
from plexrl.ids import JobId, TenantId
from plexrl.scheduler.queries.overview.planned_jobs import (
    ClusterPlan,
    PlannedNodes,
    PlannedTenant,
    ProjectedJob,
)
from plexrl.scheduler.rules.config import planning
from plexrl.scheduler.state.demand.job_quote import JobQuote
from plexrl.scheduler.state.demand.trace import Segment
from plexrl.sim.engine.shell import virtual_config
from plexrl.sim.search.quote.quote import interval_of, quote
from plexrl.sim.search.quote.ways import resized

PERIOD_S = 100.0


def job(
    name: str,
    *,
    tenant: str = "own",
    cycles: int = 10,
    duty: float = 0.2,
    waited_s: float | None = None,
    gpus: int = 8,
) -> ProjectedJob:
    """A job that has GPUs, or has waited for them."""
    return ProjectedJob(
        job=JobId(name),
        tenant=TenantId(tenant),
        name=name,
        priority=0,
        slo=None,
        has_gpus=waited_s is None,
        waited_s=waited_s or 0.0,
        gpus=gpus,
        rollout_gpus=0,
        rollouts="own",
        node_type="",
        state_bytes=10**9,
        knowledge="measured",
        left_s=cycles * PERIOD_S,
        period_s=PERIOD_S,
        segments=(Segment(offset_s=0.0, duration_s=duty * PERIOD_S),),
    )


def tenant(name: str) -> PlannedTenant:
    return PlannedTenant(
        tenant=TenantId(name),
        weight=1.0,
        jobs_max=None,
        gpus_max=None,
        priority_max=0,
        is_operator=False,
    )


def plan(*jobs: ProjectedJob, asked: ProjectedJob, nodes: int = 1) -> ClusterPlan:
    pool = PlannedNodes(
        nodes=nodes,
        node_type="h200",
        gpus=8,
        gpu_memory_bytes=141 << 30,
        host_memory_bytes=2 << 40,
        nvme_bytes=0,
        is_virtual=False,
    )
    return ClusterPlan(
        now=0.0,
        settings=planning(virtual_config()),
        nodes=(pool,),
        tenants=(tenant("own"), tenant("other")),
        jobs=jobs,
        asked=asked,
    )


def asked() -> ProjectedJob:
    return replace(job("asked"), has_gpus=False)


def test_an_empty_cluster_takes_the_job_at_once_and_bills_its_work() -> None:
    found = quote(plan(asked=asked()), price=2.0, seeds=1)["asked"]
    assert found["start_s"] == 0.0
    # 30 s to start the workers, and ten cycles.
    assert found["end_s"] == pytest.approx(1030.0, rel=0.01)
    assert found["gpu_hours"] == pytest.approx(8 * 10 * 20.0 / 3600.0, rel=0.05)
    assert found["cost"] == 2.0 * found["gpu_hours"]
    assert (found["delayed"], found["others"]["jobs"]) == ([], 0)


def test_a_job_that_always_works_makes_the_next_one_wait_for_its_end() -> None:
    busy = job("busy", duty=1.0)
    found = quote(plan(busy, asked=asked()), price=None, seeds=1)["asked"]
    assert found["start_s"] == pytest.approx(1000.0, abs=2 * PERIOD_S)
    assert found["cost"] is None


def test_delayed_jobs_of_other_tenants_have_no_names() -> None:
    mine, theirs = job("mine", duty=0.3), job("theirs", tenant="other", duty=0.3)
    new = replace(job("asked", duty=0.25), has_gpus=False)
    view = quote(plan(mine, theirs, asked=new), price=None, seeds=2)
    assert "theirs" not in msgspec.json.encode(view).decode()
    ways = (view["asked"], *view["alternatives"])
    named = {each["job"] for way in ways for each in way["delayed"]}
    assert named <= {"mine"}


def test_there_are_two_other_ways_with_their_figures() -> None:
    view = quote(plan(job("busy", duty=0.8), asked=asked(), nodes=2), price=1.0, seeds=2)
    ways = [each["way"] for each in view["alternatives"]]
    assert len(set(ways)) == 2
    assert "as asked" not in ways
    assert all(each["end_s"] > 0.0 and each["cost"] is not None for each in view["alternatives"])


def test_equal_plans_have_equal_quotes() -> None:
    given = plan(job("a"), job("b", waited_s=50.0), asked=asked())
    assert quote(given, price=None, seeds=2) == quote(given, price=None, seeds=2)


def test_a_job_that_no_empty_cluster_holds_is_refused() -> None:
    with pytest.raises(CapacityError, match="cannot hold"):
        quote(plan(asked=replace(asked(), gpus=64)), price=None, seeds=1)


def test_a_tenants_quota_makes_its_job_wait_for_its_own_jobs() -> None:
    given = plan(job("mine"), asked=asked(), nodes=4)
    limited = replace(given, tenants=(replace(tenant("own"), jobs_max=1), tenant("other")))
    assert quote(given, price=None, seeds=1)["asked"]["start_s"] == 0.0
    assert quote(limited, price=None, seeds=1)["asked"]["start_s"] > 500.0


def test_intervals_come_from_earlier_errors_and_are_wide_without_them() -> None:
    assert interval_of((), 100.0, 100.0) == (50.0, 200.0)
    errors = [each / 100.0 for each in range(-4, 5)]
    assert interval_of(errors, 100.0, 100.0) == pytest.approx((96.0, 104.0))


def test_twice_the_gpus_halve_the_training_and_not_the_rollout() -> None:
    larger = resized(job("a"), 2.0)
    assert larger.gpus == 16
    assert larger.period_s == PERIOD_S - 10.0
    assert larger.left_s == pytest.approx(900.0)
    assert larger.segments[0].duration_s == 10.0


def test_the_child_answers_on_its_output_and_names_errors() -> None:
    refused = plan(asked=replace(asked(), gpus=64))
    task = msgspec.json.encode({"plan": refused, "price": None})
    command = [sys.executable, "-m", "plexrl.sim.search.quote"]
    child = subprocess.run(command, input=task, capture_output=True, check=True, timeout=120)
    answer = msgspec.json.decode(child.stdout)
    assert isinstance(from_wire(answer["error"]), CapacityError)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_quote_with_a_strange_number_is_refused(value: float) -> None:
    figures = dict.fromkeys(("start_s", "start_low_s", "start_high_s", "end_low_s"), 0.0)
    with pytest.raises(InvalidRequestError, match="end_s"):
        JobQuote(**figures, end_s=value, end_high_s=1.0, gpu_hours=1.0)
