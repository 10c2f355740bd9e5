"""The page on the smallest clusters and bills, with extreme figures."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plexrl.sim.report import Billed, write_report
from plexrl.sim.report.bills import bill_table, horizon_warning, price_lines
from plexrl.sim.report.capacity import headline, probe_table
from plexrl.sim.search.capacity_search import CapacityPlan
from plexrl.sim.search.cluster_size_search import Search
from plexrl.sim.search.objectives import objectives
from plexrl.sim.workload.prices import DAY_S, Prices
from plexrl.sim.workload.scenario import NodeType, Pool, Scenario
from tests.sim.metrics.test_collector import NoJobs
from tests.sim.report.test_report import read, run_of, sections, spread_over

if TYPE_CHECKING:
    from plexrl.sim.results.result import SimResult


def plain_run(policy: str, *, gpus: int, drain_s: float = 864_000.0) -> "SimResult":
    """A result that has few other plots."""
    run = run_of(policy, gpus=gpus, drain_s=drain_s)
    nothing = replace(spread_over(0.0), cdf=())
    return replace(
        run, utilisation=(), spans=(), tenants=(), completion=nothing, normalized_wait=nothing
    )


def plan_of(policy: str, wanted: str, waits_s: dict[int, float]) -> CapacityPlan:
    """A search whose runs of so many nodes had these waits."""
    asked = objectives([wanted])
    results = {
        size: replace(
            plain_run(policy, gpus=8 * size), wait=spread_over(wait_s), cost=1_000.0 * size
        )
        for size, wait_s in waits_s.items()
    }
    met = {size: all(each.is_met(result) for each in asked) for size, result in results.items()}
    nodes = min((size for size in met if met[size]), default=None)
    search = Search(nodes=nodes, probes=met, failing_from=None)
    return CapacityPlan(policy=policy, objectives=asked, search=search, results=results)


def page_of(plans: Sequence[CapacityPlan], folder: Path) -> str:
    results = [next(iter(plan.results.values())) for plan in plans]
    path = write_report(
        results, folder, title="A plan", scenario_lines=[("trace", "few")], plans=plans
    )
    return path.read_text(encoding="utf-8")


def test_the_page_begins_with_the_answer_and_how_it_was_found(tmp_path: Path) -> None:
    plans = [
        plan_of("isolated", "wait.p95<=2h", {4: 900_000.0, 8: 8_000.0, 12: 0.0}),
        plan_of("pack", "wait.p95<=2h", {4: 9_000.0, 5: 3_600.0, 8: 0.0}),
    ]
    page = page_of(plans, tmp_path)
    assert sections(page)[:4] == ["objectives", "costcurve", "probes", "runs"]
    text = " ".join(read(page).text.split())
    assert (
        "To keep wait.p95<=2h, pack needs 5 nodes (40 training GPUs) at a cost of 5,000, "
        "isolated 12 at 12,000: 58.3 % fewer nodes than isolated, at 58.3 % less cost." in text
    )
    assert "2.22 h (!)" in text
    assert "wait.p95 over nodes" in page
    assert page_of(plans, tmp_path / "again") == page


def test_the_answer_is_held_against_the_isolated_policy_that_backfills() -> None:
    plans = [
        plan_of("isolated", "wait.p95<=2h", {12: 0.0}),
        plan_of("isolated+backfill", "wait.p95<=2h", {10: 0.0}),
        plan_of("pack", "wait.p95<=2h", {5: 0.0}),
    ]
    assert headline(plans).endswith(
        ": 50.0 % fewer nodes than isolated+backfill, at 50.0 % less cost."
    )


@pytest.mark.parametrize(
    ("wanted", "waits_s"),
    [
        ("wait.p95<=0s", {1: 0.0}),
        ("wait.p95<=60s", {1: math.nan, 2: 10.0}),
        ("wait.p95<=60s", {1: 500.0, 2: 700.0}),
        ("wait.p95>=60s", {1: 0.0, 600: 1e7}),
        ("worst_tenant<=3,drain<=30d,utilisation<=5%,cost<=1k", {1: 0.0, 2: 0.0}),
        ("wait.max<=1s,failed_jobs<=3", {7: 0.0}),
    ],
)
def test_figures_at_their_edges_are_drawn(
    wanted: str, waits_s: dict[int, float], tmp_path: Path
) -> None:
    plan = plan_of("pack", wanted, waits_s)
    page = page_of([plan], tmp_path)
    pictures = len(plan.objectives) - ("failed_jobs" not in wanted)
    assert len(re.findall(r'aria-label="[^"]* over nodes"', page)) == pictures + 1
    assert headline([plan]) in read(page).text
    assert len(probe_table([plan]).rows) == len(waits_s)


def test_parts_stand_in_percent_and_indices_and_multiples_do_not() -> None:
    wanted = "job_slowdown.median<=5%,worst_tenant<=3,completion.p95<=3,utilisation>=0.1,drain<=30d"
    (row,) = probe_table([plan_of("pack", wanted, {8: 0.0})]).rows
    assert row[5:] == ("2.0 %", "1.60", "0", "25.0 %", "10.0 days")


def test_what_costs_nothing_has_no_cost_curve(tmp_path: Path) -> None:
    plan = plan_of("pack", "wait.p95<=60s", {1: 0.0})
    free = {size: replace(result, cost=0.0) for size, result in plan.results.items()}
    assert "costcurve" not in sections(page_of([replace(plan, results=free)], tmp_path))


def billed_of(prices: Prices, **changes: float) -> Billed:
    """Four nodes for ten hours, of which two were held for six hours and one for two more."""
    scenario = Scenario(source=NoJobs(), pools=(Pool(nodes=4),), prices=prices)
    result = replace(
        plain_run("pack", gpus=32, drain_s=36_000.0),
        nodes_held=((1, 2.0), (2, 6.0)),
        paid_s=max(36_000.0, prices.horizon_s or 0.0),
        rollout_cost=100.0,
        **changes,  # type: ignore[arg-type]
    )
    return Billed(label="pack", scenario=scenario, result=result)


def test_a_bill_says_what_it_would_be_with_one_kind_of_nodes_only() -> None:
    billed = billed_of(
        Prices(reserved=1.0, on_demand=2.0), cost=340.0, on_demand_cost=0.0, reserved_nodes=2
    )
    table = bill_table([billed])
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    # 14 node-hours of 40 are held; a node-hour is 8 GPU-hours.
    assert cells["nodes held"] == "35.0 %"
    assert (cells["reserved nodes"], cells["reserved"], cells["on demand"]) == ("2", "240", "0")
    assert cells["if all reserved"] == "420", "4 nodes * 8 GPUs * 10 h, and 100"
    assert cells["if all on demand"] == "324", "14 node-hours * 8 GPUs * 2, and 100"
    simple = bill_table([billed_of(Prices(rollout=1.0), cost=900.0, reserved_nodes=4)])
    assert not {"on demand", "if all reserved"} & set(simple.columns)


def test_prices_and_break_even_are_said_in_words() -> None:
    both = billed_of(Prices(on_demand=5.0, horizon_s=30 * DAY_S)).scenario
    assert dict(price_lines(both)) == {
        "prices of a GPU-hour": "2.5 of reserved nodes, 5 of nodes on demand, 2.5 of rollouts",
        "horizon": "30.0 days",
        "break-even": "reserving a node pays if it is held for more than 50.0 % of the paid time",
    }
    dear = billed_of(Prices(reserved=3.0, on_demand=3.0)).scenario
    assert "reserving never pays" in dict(price_lines(dear))["break-even"]
    assert price_lines(billed_of(Prices()).scenario) == []


def test_a_horizon_before_the_drain_is_told_and_a_later_one_is_not() -> None:
    late = horizon_warning(billed_of(Prices(horizon_s=3_600.0)))
    assert late is not None
    assert late.startswith(
        "pack on 4 nodes drains after 10.0 h, later than the horizon of 60.0 min"
    )
    assert horizon_warning(billed_of(Prices(horizon_s=DAY_S))) is None
    assert horizon_warning(billed_of(Prices())) is None


def test_only_runs_with_prices_of_their_own_have_their_bills_on_the_page(tmp_path: Path) -> None:
    plain = billed_of(Prices())
    split = billed_of(Prices(on_demand=4.0), reserved_nodes=1, cost=900.0)

    def sections_of(billed: Billed) -> set[str]:
        results = [billed.result]
        path = write_report(
            results, tmp_path, title="", scenario_lines=[], labels=["pack"], billed=[billed]
        )
        return set(sections(path.read_text(encoding="utf-8")))

    assert "bills" not in sections_of(plain)
    assert "bills" in sections_of(split)
    horizon = billed_of(Prices(horizon_s=DAY_S), reserved_nodes=4)
    assert "bills" in sections_of(horizon)
    kind = NodeType(price=0.0)
    free = replace(split, scenario=replace(split.scenario, pools=(Pool(nodes=4, node_type=kind),)))
    assert "bills" in sections_of(free)
