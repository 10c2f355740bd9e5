"""Objectives are parsed, evaluated and refused."""

import math
from dataclasses import replace

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.sim.results.result import DistributionSummary
from plexrl.sim.search.objectives import NO_FAILED_JOBS, objective, objectives, utilisation
from tests.sim.report.test_report import run_of


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("wait.p95<=2h", 7200.0),
        ("wait.max <= 90 s", 90.0),
        ("drain<=30d", 30 * 86_400.0),
        ("wait.mean<=1.5min", 90.0),
        ("job_slowdown.median<=5%", 0.05),
        ("job_slowdown.p50<=0.05", 0.05),
        ("completion.p95<=3", 3.0),
        ("cost<=1.5M", 1.5e6),
        ("cost<=20k", 20_000.0),
        ("worst_tenant<=3", 3.0),
        ("failed_jobs<=2", 2.0),
    ],
)
def test_an_objective_is_understood_in_its_unit(text: str, bound: float) -> None:
    found = objective(text)
    assert found.bound == pytest.approx(bound)
    assert found.at_most == ("<=" in text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("wait.p95", "write METRIC<=VALUE"),
        ("wait.p95<2h", "write METRIC<=VALUE"),
        ("wait.p95<=-2h", "write METRIC<=VALUE"),
        ("", "write METRIC<=VALUE"),
        ("wait.p95<=7200", "is a time"),
        ("wait.p95<=5%", "is a time"),
        ("job_slowdown.median<=2h", "a number or a percentage"),
        ("failed_jobs<=2%", "without a unit"),
        ("cost<=3h", "an amount"),
        ("wait.p90<=2h", "no statistic 'p90'"),
        ("wait<=2h", "a statistic missing"),
        ("latency.p95<=2h", "unknown figure 'latency.p95'"),
        ("drain.p95<=2h", "unknown figure 'drain.p95'"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_what_can(text: str, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        objective(text)


def test_no_job_may_fail_unless_a_bound_says_so() -> None:
    assert objectives(["wait.p95<=2h, drain<=3d"])[2:] == (NO_FAILED_JOBS,)
    assert [each.metric for each in objectives(["failed_jobs<=3", "drain<=3d"])] == [
        "failed_jobs",
        "drain",
    ]


def test_the_figures_are_those_of_the_result() -> None:
    result = run_of("spread")
    assert objective("wait.p95<=2h").value(result) == result.wait.p95
    assert objective("wait.max<=2h").value(result) == result.wait.highest
    assert objective("completion.p50<=2").value(result) == result.completion.median
    assert objective("drain<=2d").value(result) == result.drain_s
    assert objective("cost<=5").value(result) == result.cost
    assert objective("utilisation>=0.5").value(result) == utilisation(result)
    assert utilisation(result) == pytest.approx(
        result.busy_gpu_hours / (result.gpus * result.drain_s / 3600)
    )
    assert utilisation(replace(result, drain_s=0.0)) == 0.0


def test_a_bound_is_met_at_its_own_value_and_never_by_no_number() -> None:
    result = run_of("spread")
    exact = replace(result, wait=replace(result.wait, p95=7200.0))
    assert objective("wait.p95<=2h").is_met(exact)
    assert not objective("wait.p95<=2h").is_met(
        replace(result, wait=replace(result.wait, p95=7200.5))
    )
    assert objective("worst_tenant<=2").is_met(replace(result, worst_tenant=2.0))
    assert not objective("worst_tenant<=2").is_met(replace(result, worst_tenant=2.1))
    nobody = DistributionSummary(
        count=0, mean=math.nan, median=math.nan, p95=math.nan, p99=math.nan, highest=math.nan
    )
    assert not objective("wait.p95<=2h").is_met(replace(result, wait=nobody))
