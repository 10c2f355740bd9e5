"""Axes, node types, surveys, what-ifs and documents."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import CapacityError, InvalidRequestError, TraceError
from plexrl.sim.engine.simulate import simulate
from plexrl.sim.results.result_json import dumps, result_from, result_values, scenario_values
from plexrl.sim.search.axes import PAPER, axis, policies_named, scenarios_along, with_nodes
from plexrl.sim.search.capacity_search import smallest_cluster
from plexrl.sim.search.objectives import objectives
from plexrl.sim.search.sweep import run_all
from plexrl.sim.search.what_if import apply_change, change, reprice
from plexrl.sim.state.node_types import NODE_TYPES, node_type
from plexrl.sim.workload.policies import SIM_POLICIES
from plexrl.sim.workload.scenario import GIB, TIB, NodeType, Pool, Scenario
from plexrl.sim.workload.source.survey import check_fits, survey_jobs
from plexrl.sim.workload.source.trace_source import PublishedSource, TraceSource
from plexrl.traces import Problem, Shape, TraceJob
from tests.sim.search.test_sweep import BASE, FewJobs

FEW = tuple(FewJobs().jobs())


def pools(nodes: int, *names: str) -> tuple[Pool, ...]:
    return tuple(Pool(nodes=nodes, node_type=NodeType(name=name)) for name in names or ("h200",))


def test_policies_have_names_and_names_of_several() -> None:
    assert policies_named("paper") == PAPER
    assert policies_named("all") == tuple(SIM_POLICIES)
    assert policies_named("pack, isolated") == ("pack", "isolated")
    with pytest.raises(InvalidRequestError, match="'pack' is repeated"):
        policies_named("pack, isolated,pack")
    assert set(PAPER) <= set(SIM_POLICIES)
    with pytest.raises(InvalidRequestError, match=r"'packed' is unknown: use one of isolated"):
        policies_named("pack,packed")
    with pytest.raises(InvalidRequestError, match="name a policy"):
        policies_named(" , ")


def test_axes_make_every_combination_the_last_turning_quickest() -> None:
    axes = [axis("nodes=1:5:2"), axis("jitter=0,0.15"), axis("policy=pack,isolated")]
    found = scenarios_along(BASE, axes)
    assert [(each.pools[0].nodes, each.behaviour.jitter, each.policy) for each in found] == [
        (nodes, jitter, policy)
        for nodes in (1, 3, 5)
        for jitter in (0.0, 0.15)
        for policy in ("pack", "isolated")
    ]
    assert [each.seed for each in scenarios_along(BASE, [axis("seed=3:5")])] == [3, 4, 5]
    varied = scenarios_along(BASE, [axis("staleness=1"), axis("switch-s=2.5")])[0]
    assert (varied.behaviour.staleness, varied.switch_s) == (1, 2.5)


@pytest.mark.parametrize(
    ("sweep", "told"),
    [
        ("nodes", "write NAME="),
        ("nodes=", "write NAME="),
        ("nodes=64:32:8", "LAST not below FIRST"),
        ("nodes=1:9:0", "LAST not below FIRST"),
        ("nodes=1:inf:1", "a range is"),
        ("nodes=1:2:3:4", "a range is"),
        ("nodes=1:1000000", "at most 10000"),
        ("nodes=a:b", "a range is"),
        ("colour=red", "only policy, nodes"),
        ("policy=packed", "unknown"),
        ("nodes=1.5", "is invalid"),
        ("nodes=0", "use a whole number from 1"),
        ("jitter=-1", "is invalid"),
        ("jitter=nan", "is invalid"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(sweep: str, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        scenarios_along(BASE, [axis(sweep)])


def test_a_sweep_is_not_of_one_thing_twice_nor_of_the_nodes_of_several_pools() -> None:
    with pytest.raises(InvalidRequestError, match="swept twice"):
        scenarios_along(BASE, [axis("seed=1"), axis("seed=2")])
    with pytest.raises(InvalidRequestError, match="one pool only"):
        with_nodes(replace(BASE, pools=pools(2, "a", "b")), 4)
    with pytest.raises(InvalidRequestError, match="runs, more than 10000"):
        scenarios_along(BASE, [axis("seed=1:1000"), axis("nodes=1:11")])


def test_node_types_come_by_name_and_from_files(tmp_path: Path) -> None:
    assert node_type("h200") == NodeType()
    assert node_type("a100").speed < node_type("h100").speed == 1.0 < node_type("b200").speed
    assert all(name == each.name for name, each in NODE_TYPES.items())
    toml = tmp_path / "mine.toml"
    toml.write_text('base = "a100"\nhost_memory_bytes = 1_000\nprice = 0\n')
    found = node_type(str(toml))
    assert found == replace(NODE_TYPES["a100"], name="mine", host_memory_bytes=1000, price=0)
    json = tmp_path / "other.json"
    json.write_text('{"name": "theirs", "gpus": 4}')
    assert node_type(str(json)) == NodeType(name="theirs", gpus=4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu = 8", "no field 'gpu': use name, gpus"),
        ("gpus = 0", "gpus must be a whole number above 0, not 0"),
        ("gpus = 7.5", "gpus must be a whole number"),
        ("gpus = true", "gpus must be a whole number"),
        ("price = -1", "price must be a number of at least 0"),
        ("speed = inf", "speed must be a number above 0"),
        ("name = ''", "name must be a text"),
        ("base = 'tpu'", "base 'tpu' is unknown: use one of h200"),
        ("gpus", "mine.toml"),
    ],
)
def test_a_node_type_that_cannot_be_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=told):
        node_type(str(path))


def test_a_node_type_of_no_name_and_no_file_is_told_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"'h2000' is unknown: use h200, .* \.toml file"):
        node_type("h2000")
    with pytest.raises(InvalidRequestError, match="cannot read node type"):
        node_type(str(tmp_path / "none.toml"))


def test_a_survey_counts_what_a_trace_asks_for() -> None:
    survey = survey_jobs(FewJobs().jobs())
    assert (survey.jobs, survey.gpus_max, survey.arrivals_s) == (6, 8, 200.0)
    assert survey.held_gpu_s == 6 * 8 * 12 * 100.0
    assert survey.busy_gpu_s == pytest.approx(0.3 * survey.held_gpu_s)
    assert survey.nodes_for(8) == (1, 6)
    assert survey.nodes_for(4) == (2, 12)
    check_fits(survey, pools(1))


def test_priorities_that_the_scheduler_refuses_are_named_with_their_range() -> None:
    beyond = [
        replace(FEW[0], job_id=name, priority=priority)
        for name, priority in (("low", -101), ("least", -100), ("most", 100), ("high", 1000))
    ]
    with pytest.raises(InvalidRequestError) as raised:
        survey_jobs([*FEW, *beyond])
    told = "2 jobs (low at -101, high at 1000) with a priority outside -100 to 100"
    assert told in raised.value.message
    assert survey_jobs(beyond[1:3]).jobs == 2


def test_jobs_that_no_pool_holds_are_named_and_counted() -> None:
    large = [replace(job, job_id=f"big{index}", gpus=40) for index, job in enumerate(FEW)]
    survey = survey_jobs([*FEW, *large])
    with pytest.raises(
        CapacityError, match=r"6 jobs \(big0, big1, big2, …\) of up to 40 GPUs"
    ) as e:
        check_fits(survey, pools(4))
    assert "--nodes 5" in e.value.message
    assert "--max-gpus 32" in e.value.message
    check_fits(survey, pools(5))


def test_a_size_beyond_the_largest_pool_is_not_suggested() -> None:
    survey = survey_jobs([*FEW, replace(FEW[0], job_id="huge", gpus=1_000_000)])
    with pytest.raises(CapacityError, match=r"1 job \(huge\)") as raised:
        check_fits(survey, pools(4))
    assert "--nodes" not in raised.value.message
    assert "need 125000 nodes and a pool has at most 10000" in raised.value.message
    assert "exclude larger jobs by --max-gpus 32" in raised.value.message


def test_jobs_that_want_other_nodes_are_named() -> None:
    survey = survey_jobs([*FEW, replace(FEW[0], job_id="picky", node_type="a100", gpus=16)])
    with pytest.raises(InvalidRequestError, match=r"'a100' is requested by 1 job \(picky\)"):
        check_fits(survey, pools(4))
    check_fits(survey, pools(2, "h200", "a100"))
    mixed = (*pools(4), *pools(1, "a100"))
    with pytest.raises(CapacityError, match=r"1 job \(picky\)"):
        check_fits(survey, mixed)


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (TraceJob(job_id="a", submit_s=0.0, gpus=8, duration_s=9.0), "1 job .a. without segments"),
        (replace(FEW[0], gpus=0), "without training GPUs: exclude them by --min-gpus 1"),
    ],
)
def test_jobs_that_cannot_be_simulated_are_told_before_any_run(job: TraceJob, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        survey_jobs([replace(FEW[1], job_id="good"), job])
    with pytest.raises(InvalidRequestError, match="has no jobs"):
        survey_jobs([])


def test_a_trace_becomes_jobs_of_a_cluster_shaped_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "job_id,submit_s,gpus,duration_s,node_type\n"
        "a,0,8,4000,v100\nb,60,64,4000,v100\nc,120,4,4000,v100\nd,9000,8,4000,v100\n"
    )
    source = replace(
        TraceSource.at(str(path)),
        shape=Shape(compress=2.0, gpus_min=8),
        gpus_max=32,
        span_s=1000.0,
        any_node_type=True,
    )
    (job,) = source.jobs()
    assert (job.job_id, job.node_type) == ("a", "")
    assert job.segments
    assert [each.submit_s for each in replace(source, gpus_max=None).jobs()] == [0.0, 30.0]
    assert not next(replace(source, profiles=False).jobs()).segments
    bad = tmp_path / "bad.csv"
    bad.write_text("job_id,submit_s,gpus,duration_s\na,0,8,60\nb,x,8,60\n")
    with pytest.raises(TraceError, match="submit_s is not a number"):
        survey_jobs(TraceSource.at(str(bad)).jobs())
    told: list[Problem] = []
    skipping = replace(TraceSource.at(str(bad)), skip_bad=True)
    assert survey_jobs(skipping.read(told.append)).jobs == 1
    assert [problem.line for problem in told] == [3]
    with pytest.raises(InvalidRequestError, match="not jobs"):
        survey_jobs(TraceSource.at("bundled:azure-conversation").jobs())


LATE = (
    "job_id,submit_s,gpus,duration_s\n"
    "x,0,8,bad\na,86400,8,4000\nb,90000,64,4000\nc,93600,8,400\nd,97200,64,4000\ne,190000,64,99\n"
)
"""A day of nothing but a row that cannot be read."""


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, {"a": 0.0, "b": 3600.0, "c": 7200.0, "d": 10800.0, "e": 103600.0}),
        ({"shape": Shape(gpus_min=64)}, {"b": 0.0, "d": 7200.0, "e": 100000.0}),
        ({"shape": Shape(gpus_min=64), "span_s": 86_400.0}, {"b": 0.0, "d": 7200.0}),
        ({"shape": Shape(gpus_min=64, compress=2.0)}, {"b": 0.0, "d": 3600.0, "e": 50000.0}),
        ({"shape": Shape(duration_s_min=500.0), "gpus_max": 8}, {"a": 0.0}),
    ],
)
def test_clock_and_bill_start_at_the_first_job_that_is_kept(
    tmp_path: Path, change: dict[str, Any], wanted: dict[str, float]
) -> None:
    path = tmp_path / "late.csv"
    path.write_text(LATE)
    source = replace(TraceSource.at(str(path)), skip_bad=True, **change)
    assert {job.job_id: job.submit_s for job in source.jobs()} == wanted
    result = simulate(Scenario(source=source, pools=(Pool(nodes=40),)))
    assert max(wanted.values()) < result.drain_s < max(wanted.values()) + 10_000
    pool = Pool(nodes=40)
    hours = pool.nodes * pool.node_type.gpus * result.drain_s / 3600.0
    assert result.cost - result.rollout_cost == pytest.approx(hours * pool.node_type.price)


def test_the_published_jobs_are_three_classes_with_cycles() -> None:
    source = PublishedSource(span_s=20 * 86_400.0, gpus_max=256, shape=Shape(backlog=True))
    jobs = list(source.jobs())
    assert {job.model for job in jobs} == {"7B", "30B"}
    assert {job.submit_s for job in jobs} == {0.0}
    assert jobs == list(source.read(None))
    survey_jobs(jobs)


def test_a_price_is_worked_out_anew_as_a_run_would_have_it() -> None:
    before = simulate(BASE)
    for given in ("price=4.5", "node-type=h200", "price=0"):
        other = apply_change(BASE, change(given))
        priced = reprice(BASE, before, other)
        assert priced is not None, given
        ran = simulate(other)
        assert priced.cost == pytest.approx(ran.cost)
        assert priced.rollout_cost == pytest.approx(ran.rollout_cost)
        same = replace(priced, cost=ran.cost, rollout_cost=ran.rollout_cost, speed=ran.speed)
        assert same == ran
    for given in ("host-memory=0.5TiB", "node-type=a100", "nodes=3", "speed=2", "nvme=1TB"):
        assert reprice(BASE, before, apply_change(BASE, change(given))) is None
    mixed = replace(BASE, pools=(BASE.pools[0], *pools(1, "h100")))
    dearer = replace(
        mixed, pools=(replace(mixed.pools[0], node_type=NodeType(price=9.0)), mixed.pools[1])
    )
    assert reprice(mixed, before, dearer) is None, "two prices: nobody knows whose rollouts"


def test_what_ifs_change_every_pool() -> None:
    two = replace(BASE, pools=pools(2, "x", "y"))
    assert [
        pool.node_type.host_memory_bytes
        for pool in apply_change(two, change("host-memory=512GiB")).pools
    ] == [512 * GIB] * 2
    assert apply_change(BASE, change("host-memory=1.5TiB")).pools[
        0
    ].node_type.host_memory_bytes == (3 * TIB // 2)
    assert apply_change(BASE, change("nodes=7")).pools[0].nodes == 7


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("price", "write NAME=VALUE"),
        ("gpu-memory=4", "write NAME=VALUE with one of price"),
        ("price=dear", "not a valid value; write price=3.0"),
        ("price=-1", "price must be"),
        ("host-memory=lots", "write host-memory=1TiB"),
        ("host-memory=0", "above 0"),
        ("nodes=0", "at least 1 node"),
        ("nodes=1.5", "not a whole number"),
        ("price-reserved=-1", "what if .* the reserved price"),
        ("price-on-demand=nan", "the on-demand price"),
        ("price-rollout=dear", "write price-rollout=3.0"),
        ("reserved-nodes=1.5", "not a whole number"),
        ("reserved-nodes=-1", "at least 0"),
        ("horizon-days=0", "above 0"),
        ("horizon-days=long", "write horizon-days=30"),
        ("node-type=tpu", "'tpu' is unknown"),
        ("speed=nan", "speed must be"),
    ],
)
def test_a_what_if_that_cannot_be_is_refused(given: str, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        change(given)


def test_a_result_comes_back_from_its_document() -> None:
    result = simulate(replace(BASE, window_s=(0.0, 600.0)))
    assert result.spans
    values = result_values(result)
    assert "speed" not in values
    assert result_from(values, result.speed) == result
    assert dumps(result_values(result_from(values))) == dumps(values)
    unknown = replace(result, worst_tenant=math.nan)
    assert result_values(unknown)["worst_tenant"] is None
    assert math.isnan(result_from(result_values(unknown)).worst_tenant)
    assert scenario_values(BASE)["source"] == {"jobs_count": 6, "cycles": 12, "dies": False}


def test_the_smallest_cluster_keeps_its_objectives_and_the_next_smaller_does_not() -> None:
    wanted = objectives(["wait.max<=1s"])
    plan = smallest_cluster(
        replace(BASE, policy="isolated"),
        wanted,
        lowest=1,
        highest=6,
        run=lambda scenarios: run_all(scenarios, workers=1),
    )
    # Every job comes while all before it run, so nobody waits only where each has a node.
    assert plan.nodes == 6
    assert plan.search.failing_from is not None
    assert plan.search.failing_from <= 3
    assert not plan.broken_budgets
    dear = smallest_cluster(
        replace(BASE, policy="isolated"),
        objectives(["wait.max<=1s", "cost<=0"]),
        lowest=6,
        highest=6,
        run=lambda scenarios: run_all(scenarios, workers=1),
    )
    assert dear.nodes is None
    assert [each.text for each in dear.broken_budgets] == ["cost<=0"]
    with pytest.raises(InvalidRequestError, match="add an objective such as"):
        smallest_cluster(BASE, objectives(["cost<=1k"]), lowest=1, highest=2, run=lambda _: ())
