"""The options of `plexrl simulate`, by the panels of its help."""

from pathlib import Path
from typing import Annotated

import typer

_CLUSTER, _TRACE, _JOBS, _FAULTS, _ASKED, _RUNS = (
    *("The cluster", "The trace", "The jobs' behaviour", "Faults", "Questions", "Running it"),
)

Trace = Annotated[
    str,
    typer.Argument(help="A file, bundled:NAME, or `published`: made-up jobs of the paper."),
]
Policy = Annotated[
    str,
    typer.Option(
        help="Names with commas between (docs/simulating.md), `paper` or `all`.",
        rich_help_panel=_CLUSTER,
    ),
]
Nodes = Annotated[int, typer.Option(min=1, help="All for training.", rich_help_panel=_CLUSTER)]
GpusPerNode = Annotated[
    int | None,
    typer.Option(min=1, help="Else the node type's: 8.", rich_help_panel=_CLUSTER),
]
NodeType = Annotated[
    str,
    typer.Option(help="h200, h100, a100, b200; a .json or .toml.", rich_help_panel=_CLUSTER),
]
Pool = Annotated[
    list[str] | None,
    typer.Option(
        help="NODE_TYPE:NODES, for each pool of a cluster of several; instead of --nodes.",
        rich_help_panel=_CLUSTER,
    ),
]
Price = Annotated[
    float | None,
    typer.Option(min=0.0, help="Of a GPU-hour; else the type's.", rich_help_panel=_CLUSTER),
]
SwitchS = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Of a context switch; else by state and the node type's rates.",
        rich_help_panel=_CLUSTER,
    ),
]
Layout = Annotated[
    str | None,
    typer.Option("--from", help="Its column layout (docs/traces.md).", rich_help_panel=_TRACE),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Go on without bad rows.", rich_help_panel=_TRACE)
]
Days = Annotated[
    float | None,
    typer.Option(min=0.0, help="Its first so many; `published`: 90.", rich_help_panel=_TRACE),
]
Compress = Annotated[
    float, typer.Option(help="Arrivals come so many times as fast.", rich_help_panel=_TRACE)
]
Backlog = Annotated[
    bool,
    typer.Option("--backlog", help="All jobs are there at the start.", rich_help_panel=_TRACE),
]
CapDays = Annotated[
    float | None, typer.Option(help="Cut longer jobs to this.", rich_help_panel=_TRACE)
]
MinGpus = Annotated[
    int, typer.Option(min=1, help="Leave smaller jobs out.", rich_help_panel=_TRACE)
]
MaxGpus = Annotated[
    int | None, typer.Option(min=1, help="Leave larger jobs out.", rich_help_panel=_TRACE)
]
MinDuration = Annotated[
    float, typer.Option(help="Leave shorter jobs out; seconds.", rich_help_panel=_TRACE)
]
AnyNodeType = Annotated[
    bool,
    typer.Option("--any-node-type", help="Jobs run on any.", rich_help_panel=_TRACE),
]
Profiles = Annotated[
    bool,
    typer.Option(help="Jobs without cycles get the published RL profiles.", rich_help_panel=_TRACE),
]
JobsPerDay = Annotated[
    float, typer.Option(min=1e-3, help="Of `published`.", rich_help_panel=_TRACE)
]
Jitter = Annotated[
    float | None,
    typer.Option(min=0.0, help="Of cycles, as 0.15; else the trace's own.", rich_help_panel=_JOBS),
]
Staleness = Annotated[
    int | None,
    typer.Option(min=0, help="Steps rollouts run ahead; else the trace's.", rich_help_panel=_JOBS),
]
Responses = Annotated[
    int,
    typer.Option(min=0, help="Of a rollout; the longest ends it.", rich_help_panel=_JOBS),
]
Lengths = Annotated[
    str, typer.Option(help="Of --responses: r1, or a trace of lengths.", rich_help_panel=_JOBS)
]
ToolStalls = Annotated[
    str | None,
    typer.Option(help="CHANCE:SECONDS[:SIGMA] of a rollout's wait.", rich_help_panel=_JOBS),
]
NodeMtbfHours = Annotated[
    float, typer.Option(min=0.0, help="Of one node; 0: never.", rich_help_panel=_FAULTS)
]
RepairMinutes = Annotated[
    float, typer.Option(min=0.0, help="Until a lost node is back.", rich_help_panel=_FAULTS)
]
WorkerMtbfHours = Annotated[
    float, typer.Option(min=0.0, help="Of a job's workers.", rich_help_panel=_FAULTS)
]
StateSurvives = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Part of lost nodes that come back with their host memory.",
        rich_help_panel=_FAULTS,
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        help="nodes=64:256:64, jitter=0,0.15, …: every combination.", rich_help_panel=_ASKED
    ),
]
Slo = Annotated[
    list[str] | None,
    typer.Option(
        help="wait.p95<=2h, …: find the smallest cluster that keeps it.",
        rich_help_panel=_ASKED,
    ),
]
MaxNodes = Annotated[
    int, typer.Option(min=1, help="Largest that --slo tries.", rich_help_panel=_ASKED)
]
WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        help="price=3, node-type=h100, host-memory=1TiB, nodes=128: what differs.",
        rich_help_panel=_ASKED,
    ),
]
Cold = Annotated[
    bool,
    typer.Option(
        "--cold",
        help="No job declares its demand; the scheduler profiles each.",
        rich_help_panel=_JOBS,
    ),
]
Window = Annotated[
    str | None,
    typer.Option(help="START:END in hours, for a Gantt chart.", rich_help_panel=_ASKED),
]
Seed = Annotated[int, typer.Option(help="Same seed, same bytes.", rich_help_panel=_RUNS)]
Detail = Annotated[
    str,
    typer.Option(help="burst: quick; operation: each segment.", rich_help_panel=_RUNS),
]
Check = Annotated[
    bool,
    typer.Option("--check", help="Check the invariants all along.", rich_help_panel=_RUNS),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Runs at a time; else one a core.", rich_help_panel=_RUNS),
]
Ray = Annotated[
    str | None,
    typer.Option(help="Run on this Ray cluster: host:port, or auto.", rich_help_panel=_RUNS),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for report.html and results.json.", rich_help_panel=_RUNS),
]
