"""`plexrl simulate`: what a trace would have taken, under which policy, on how many nodes."""

import typer

from plexrl.cli.simulate import options
from plexrl.cli.terminal.context import Json, print_line
from plexrl.cli.traces.command import DAY_S
from plexrl.errors import UnavailableError

HOUR_S = 3600.0


def simulate(
    context: typer.Context,
    trace: options.Trace,
    policy: options.Policy = "isolated,isolated+backfill,spread+backfill",
    nodes: options.Nodes = 256,
    gpus_per_node: options.GpusPerNode = None,
    node_type: options.NodeType = "h200",
    pool: options.Pool = None,
    price: options.Price = None,
    price_reserved: options.PriceReserved = None,
    price_on_demand: options.PriceOnDemand = None,
    price_rollout: options.PriceRollout = None,
    reserved_nodes: options.ReservedNodes = None,
    horizon_days: options.HorizonDays = None,
    switch_s: options.SwitchS = None,
    layout: options.Layout = None,
    skip_bad: options.SkipBad = False,
    days: options.Days = None,
    compress: options.Compress = 1.0,
    backlog: options.Backlog = False,
    cap_days: options.CapDays = None,
    min_gpus: options.MinGpus = 1,
    max_gpus: options.MaxGpus = None,
    min_duration: options.MinDuration = 0.0,
    any_node_type: options.AnyNodeType = False,
    profiles: options.Profiles = True,
    jobs_per_day: options.JobsPerDay = 12.0,
    jitter: options.Jitter = None,
    staleness: options.Staleness = None,
    responses: options.Responses = 0,
    lengths: options.Lengths = "r1",
    tool_stalls: options.ToolStalls = None,
    node_mtbf_hours: options.NodeMtbfHours = 0.0,
    repair_minutes: options.RepairMinutes = 30.0,
    worker_mtbf_hours: options.WorkerMtbfHours = 0.0,
    state_survives: options.StateSurvives = 1.0,
    sweep: options.Sweep = None,
    slo: options.Slo = None,
    max_nodes: options.MaxNodes = 4096,
    what_if: options.WhatIf = None,
    cold: options.Cold = False,
    window: options.Window = None,
    seed: options.Seed = 0,
    detail: options.Detail = "burst",
    check: options.Check = False,
    workers: options.Workers = None,
    ray: options.Ray = None,
    out: options.Out = None,
    jobs_out: options.JobsOut = None,
    as_json: Json = False,
) -> None:
    """Run a trace through the scheduler on a virtual clock: policies, cluster sizes, costs."""
    try:
        from plexrl.cli.simulate import checks, setup
        from plexrl.cli.simulate.answers import answered
        from plexrl.cli.simulate.job_rows import check_jobs_out
        from plexrl.cli.simulate.output import check_folder, tell
        from plexrl.sim.workload.prices import Prices
        from plexrl.sim.workload.scenario import Behaviour, Failures, Scenario
        from plexrl.traces import Shape
    except ImportError as error:
        raise UnavailableError(
            f"plexrl simulate needs {error.name}, which cannot be loaded ({error}): "
            "pip install 'plexrl[simulator]'"
        ) from error

    asked = setup.questions(policy, sweep, slo, what_if)
    given = checks.given_options(context)
    checks.check_options(given, is_published=trace == setup.PUBLISHED)
    if out is not None:
        check_folder(out)
    if jobs_out is not None:
        check_jobs_out(jobs_out, trace, ray, out)
    source = setup.source(
        trace,
        shape=Shape(
            compress=compress,
            backlog=backlog,
            cap_s=None if cap_days is None else cap_days * DAY_S,
            gpus_min=min_gpus,
            duration_s_min=min_duration,
        ),
        days=days,
        gpus_max=max_gpus,
        seed=seed,
        layout=layout,
        skip_bad=skip_bad,
        any_node_type=any_node_type,
        profiles=profiles,
        jobs_per_day=jobs_per_day,
    )
    base = Scenario(
        source=source,
        pools=setup.pools(nodes, gpus_per_node, node_type, pool, price),
        seed=seed,
        behaviour=Behaviour(
            jitter=jitter,
            responses=responses,
            lengths=setup.lengths(lengths),
            stalls=setup.stalls(tool_stalls),
            staleness=staleness,
        ),
        failures=Failures(
            node_mtbf_s=node_mtbf_hours * HOUR_S,
            repair_s=repair_minutes * 60.0,
            worker_mtbf_s=worker_mtbf_hours * HOUR_S,
            state_survives=state_survives,
        ),
        warm=not cold,
        switch_s=switch_s,
        detail=setup.detail(detail),
        check=check,
        window_s=setup.window(window),
        prices=Prices(
            reserved=price_reserved,
            on_demand=price_on_demand,
            rollout=price_rollout,
            reserved_nodes=reserved_nodes,
            horizon_s=None if horizon_days is None else horizon_days * DAY_S,
        ),
    )
    found = answered(
        trace,
        base,
        asked,
        max_nodes=max_nodes,
        workers=workers,
        ray_address=ray,
        quiet=as_json,
        jobs_out=jobs_out,
    )
    tell(found, out, as_json=as_json)
    if jobs_out is not None and not as_json:
        print_line(f"Written: {jobs_out}")
    if found.failed:
        raise typer.Exit(1)
