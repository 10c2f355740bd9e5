"""`plexrl simulate`: what a trace would have taken, under which policy, on how many nodes."""

from pathlib import Path
from typing import Annotated

import typer

from plexrl.cli.context import Json
from plexrl.cli.traces import DAY_S
from plexrl.errors import UnavailableError

HOUR_S = 3600.0

_CLUSTER, _TRACE, _JOBS, _FAULTS, _ASKED, _RUNS = (
    *("The cluster", "The trace", "The jobs' behaviour", "Faults", "Questions", "Running it"),
)


def simulate(
    trace: Annotated[
        str,
        typer.Argument(help="A file, bundled:NAME, or `published`: made-up jobs of the paper."),
    ],
    policy: Annotated[
        str,
        typer.Option(
            help="Names with commas between (docs/simulating.md), `paper` or `all`.",
            rich_help_panel=_CLUSTER,
        ),
    ] = "isolated,spread+backfill",
    nodes: Annotated[
        int, typer.Option(min=1, help="All for training.", rich_help_panel=_CLUSTER)
    ] = 256,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Else the node type's: 8.", rich_help_panel=_CLUSTER),
    ] = None,
    node_type: Annotated[
        str,
        typer.Option(help="h200, h100, a100, b200; a .json or .toml.", rich_help_panel=_CLUSTER),
    ] = "h200",
    pool: Annotated[
        list[str] | None,
        typer.Option(
            help="NODE_TYPE:NODES, for each pool of a cluster of several; instead of --nodes.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(min=0.0, help="Of a GPU-hour; else the type's.", rich_help_panel=_CLUSTER),
    ] = None,
    switch_s: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Of a context switch; else by state and the node type's rates.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option("--from", help="Its column layout (docs/traces.md).", rich_help_panel=_TRACE),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Go on without bad rows.", rich_help_panel=_TRACE)
    ] = False,
    days: Annotated[
        float | None,
        typer.Option(min=0.0, help="Its first so many; `published`: 90.", rich_help_panel=_TRACE),
    ] = None,
    compress: Annotated[
        float, typer.Option(help="Arrivals come so many times as fast.", rich_help_panel=_TRACE)
    ] = 1.0,
    backlog: Annotated[
        bool,
        typer.Option("--backlog", help="All jobs are there at the start.", rich_help_panel=_TRACE),
    ] = False,
    cap_days: Annotated[
        float | None, typer.Option(help="Cut longer jobs to this.", rich_help_panel=_TRACE)
    ] = None,
    min_gpus: Annotated[
        int, typer.Option(min=1, help="Leave smaller jobs out.", rich_help_panel=_TRACE)
    ] = 1,
    max_gpus: Annotated[
        int | None, typer.Option(min=1, help="Leave larger jobs out.", rich_help_panel=_TRACE)
    ] = None,
    min_duration: Annotated[
        float, typer.Option(help="Leave shorter jobs out; seconds.", rich_help_panel=_TRACE)
    ] = 0.0,
    any_node_type: Annotated[
        bool,
        typer.Option("--any-node-type", help="Jobs run on any.", rich_help_panel=_TRACE),
    ] = False,
    profiles: Annotated[
        bool,
        typer.Option(
            help="Jobs without cycles get the published RL profiles.", rich_help_panel=_TRACE
        ),
    ] = True,
    jobs_per_day: Annotated[
        float, typer.Option(min=1e-3, help="Of `published`.", rich_help_panel=_TRACE)
    ] = 12.0,
    jitter: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Of cycles, as 0.15; else the trace's own.", rich_help_panel=_JOBS
        ),
    ] = None,
    staleness: Annotated[
        int | None,
        typer.Option(
            min=0, help="Steps rollouts run ahead; else the trace's.", rich_help_panel=_JOBS
        ),
    ] = None,
    responses: Annotated[
        int,
        typer.Option(min=0, help="Of a rollout; the longest ends it.", rich_help_panel=_JOBS),
    ] = 0,
    lengths: Annotated[
        str, typer.Option(help="Of responses: r1, or a trace of lengths.", rich_help_panel=_JOBS)
    ] = "r1",
    tool_stalls: Annotated[
        str | None,
        typer.Option(help="CHANCE:SECONDS[:SIGMA] of a rollout's wait.", rich_help_panel=_JOBS),
    ] = None,
    node_mtbf_hours: Annotated[
        float, typer.Option(min=0.0, help="Of one node; 0: never.", rich_help_panel=_FAULTS)
    ] = 0.0,
    repair_minutes: Annotated[
        float, typer.Option(min=0.0, help="Until a node is back.", rich_help_panel=_FAULTS)
    ] = 30.0,
    worker_mtbf_hours: Annotated[
        float, typer.Option(min=0.0, help="Of a job's workers.", rich_help_panel=_FAULTS)
    ] = 0.0,
    state_survives: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Part of lost nodes that come back with their host memory.",
            rich_help_panel=_FAULTS,
        ),
    ] = 1.0,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="nodes=64:256:64, jitter=0,0.15, …: every combination.", rich_help_panel=_ASKED
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="wait.p95<=2h, …: find the smallest cluster that keeps it.",
            rich_help_panel=_ASKED,
        ),
    ] = None,
    max_nodes: Annotated[
        int, typer.Option(min=1, help="Largest that --slo tries.", rich_help_panel=_ASKED)
    ] = 4096,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="price=3, node-type=h100, host-memory=1TiB, nodes=128: what differs.",
            rich_help_panel=_ASKED,
        ),
    ] = None,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold",
            help="No job declares its demand; the scheduler profiles each.",
            rich_help_panel=_JOBS,
        ),
    ] = False,
    window: Annotated[
        str | None,
        typer.Option(help="START:END in hours, for a Gantt chart.", rich_help_panel=_ASKED),
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.", rich_help_panel=_RUNS)] = 0,
    detail: Annotated[
        str,
        typer.Option(help="burst: quick; operation: each segment.", rich_help_panel=_RUNS),
    ] = "burst",
    check: Annotated[
        bool,
        typer.Option("--check", help="Check the invariants all along.", rich_help_panel=_RUNS),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time; else one a core.", rich_help_panel=_RUNS),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Run on this Ray cluster: host:port, or auto.", rich_help_panel=_RUNS),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html and results.json.", rich_help_panel=_RUNS),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a trace through the scheduler on a virtual clock: policies, cluster sizes, costs."""
    try:
        from plexrl.cli import simulate_setup as setup
        from plexrl.cli.simulate_answers import answered, check_folder, document, show, write
        from plexrl.sim.scenario import Behaviour, Failures, Scenario
        from plexrl.traces import Shape
    except ImportError as error:
        raise UnavailableError(
            f"plexrl simulate needs {error.name}, which cannot be loaded ({error}): "
            "pip install 'plexrl[simulator]'"
        ) from error

    asked = setup.questions(policy, sweep, slo, what_if)
    if out is not None:
        check_folder(out)
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
    )
    found = answered(
        trace, base, asked, max_nodes=max_nodes, workers=workers, ray_address=ray, quiet=as_json
    )
    if as_json:
        typer.echo(document(found))
    else:
        show(found)
    if out is not None:
        write(found, out, quiet=as_json)
    if found.failed:
        raise typer.Exit(1)
