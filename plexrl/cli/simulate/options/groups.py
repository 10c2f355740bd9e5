"""The options of `plexrl simulate`, one dataclass for each panel of its help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

Trace = Annotated[
    str,
    typer.Argument(
        help="A file, bundled:NAME, or `published`: generated jobs of the paper's three classes."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedClusterOptions:
    """The cluster and its policies."""

    PANEL: ClassVar = "The cluster"

    policy: Annotated[
        str,
        typer.Option(
            help="Policies to compare, with commas between (docs/simulating.md), `paper` or `all`."
        ),
    ] = "isolated,isolated+backfill,spread+backfill"
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the cluster.")] = 256
    place_rollouts: Annotated[
        str,
        typer.Option(
            help="Where rollouts run, on as many GPUs as each job requests: `outside` of the "
            "cluster, never short; on GPUs of the cluster that are their `own`; `shared` with "
            "their training and other deployments; `automatic`: shared while others wait for GPUs "
            "(docs/simulating.md)."
        ),
    ] = "outside"
    fill_valleys: Annotated[
        bool,
        typer.Option(
            "--fill-valleys",
            help="Preemptible deployments generate in the idle time of all shared groups.",
        ),
    ] = False
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a node; default: the node type's, 8.")
    ] = None
    node_type: Annotated[
        str, typer.Option(help="h200, h100, a100, b200, or a .json or .toml file.")
    ] = "h200"
    pool: Annotated[
        list[str] | None,
        typer.Option(
            help="NODE_TYPE:NODES of one pool; repeat for several node types; replaces "
            "--nodes; default: one pool."
        ),
    ] = None
    longest_first: Annotated[
        bool,
        typer.Option(
            "--longest-first",
            help="Waiting jobs get GPUs by their length, the longest first: a backlog ends sooner, "
            "and short jobs wait longer (docs/scheduling.md).",
        ),
    ] = False
    mixed_sizes: Annotated[
        bool | None,
        typer.Option(
            "--mixed-sizes/--equal-sizes",
            help="Whether deployments of different sizes share GPUs (docs/groups.md); default: "
            "the policy's.",
        ),
    ] = None
    starvation_s: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Wait for GPUs or for a group after which a job goes first and has a reservation "
            "(docs/scheduling.md); default: 600.",
        ),
    ] = None
    switch_s: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Seconds of a context switch; default: by the job's state and the node type's "
            "rates.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceOptions:
    """Prices of GPU-hours and billing."""

    PANEL: ClassVar = "Prices"

    price: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Price of a GPU-hour if no other price applies; default: the node type's."
        ),
    ] = None
    price_reserved: Annotated[
        float | None,
        typer.Option(
            help="Price of a GPU-hour of reserved training nodes, paid used or not; default: "
            "--price."
        ),
    ] = None
    price_on_demand: Annotated[
        float | None,
        typer.Option(
            help="Price of a GPU-hour of on-demand training nodes, paid while groups hold them; "
            "default: all nodes are reserved."
        ),
    ] = None
    price_rollout: Annotated[
        float | None,
        typer.Option(
            help="Price of a GPU-hour of rollouts, paid while their jobs run; default: --price."
        ),
    ] = None
    reserved_nodes: Annotated[
        int | None,
        typer.Option(
            help="Number of reserved nodes, the others on demand; default: the cheapest number."
        ),
    ] = None
    horizon_days: Annotated[
        float | None,
        typer.Option(
            help="Days that reserved nodes are paid for; default: until the trace is drained."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Reading and changing the trace."""

    PANEL: ClassVar = "The trace"

    layout: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Column layout of the trace (docs/traces.md); default: detected from the header.",
        ),
    ] = None
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad rows out instead of ending.")
    ] = False
    start_day: Annotated[
        float,
        typer.Option(help="Leave out jobs before this day of the trace, counted from 0."),
    ] = 0.0
    days: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Use only so many days, from --start-day on; default: all; `published`: 90.",
        ),
    ] = None
    compress: Annotated[float, typer.Option(help="Factor by which arrivals are faster.")] = 1.0
    backlog: Annotated[bool, typer.Option("--backlog", help="Submit all jobs at the start.")] = (
        False
    )
    cap_days: Annotated[
        float | None, typer.Option(help="Shorten longer jobs to this many days; default: no limit.")
    ] = None
    min_gpus: Annotated[int, typer.Option(min=1, help="Leave out jobs with fewer GPUs.")] = 1
    max_gpus: Annotated[
        int | None, typer.Option(min=1, help="Leave out jobs with more GPUs; default: keep all.")
    ] = None
    min_duration: Annotated[float, typer.Option(help="Leave out jobs shorter than this.")] = 0.0
    any_node_type: Annotated[
        bool, typer.Option("--any-node-type", help="Ignore the node type that jobs request.")
    ] = False
    profiles: Annotated[
        bool, typer.Option(help="Give jobs without cycles those of the published RL profiles.")
    ] = True
    jobs_per_day: Annotated[float, typer.Option(min=1e-3, help="Jobs a day of `published`.")] = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Behaviour of the jobs."""

    PANEL: ClassVar = "The jobs' behaviour"

    jitter: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Random variation of cycles: 0.15 is 15 %; default: the trace's."
        ),
    ] = None
    staleness: Annotated[
        int | None,
        typer.Option(
            min=0, help="Steps that rollouts may run ahead of training; default: the trace's."
        ),
    ] = None
    responses: Annotated[
        int,
        typer.Option(
            min=0, help="Responses per rollout; the longest sets its length; 0: lognormal rollouts."
        ),
    ] = 0
    lengths: Annotated[
        str, typer.Option(help="Lengths of --responses: r1, or a trace of lengths.")
    ] = "r1"
    tool_stalls: Annotated[
        str | None,
        typer.Option(help="PROBABILITY:MEAN_SECONDS[:SIGMA] of a wait for tools; default: none."),
    ] = None
    job_slo: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Part of its time that each job accepts to wait for others on its GPUs; default: "
            "the trace's, else 0.3.",
        ),
    ] = None
    cold: Annotated[
        bool,
        typer.Option("--cold", help="Jobs declare no demand; the scheduler must measure each."),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions:
    """Failures of nodes and workers."""

    PANEL: ClassVar = "Faults"

    node_mtbf_hours: Annotated[
        float, typer.Option(min=0.0, help="Hours between failures of one node; 0: never.")
    ] = 0.0
    repair_minutes: Annotated[
        float, typer.Option(min=0.0, help="Minutes until a failed node is back.")
    ] = 30.0
    worker_mtbf_hours: Annotated[
        float, typer.Option(min=0.0, help="Hours between failures of one job's workers; 0: never.")
    ] = 0.0
    state_survives: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Fraction (0 to 1) of failed nodes that keep the contents of host memory.",
        ),
    ] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionOptions:
    """Questions about the scenario."""

    PANEL: ClassVar = "Questions"

    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="nodes=64:256:64, jitter=0,0.15, …: run every combination; may be repeated."
        ),
    ] = None
    slo: Annotated[
        list[str] | None,
        typer.Option(help="wait.p95<=2h, …: find the fewest nodes that meet it; may be repeated."),
    ] = None
    max_nodes: Annotated[int, typer.Option(min=1, help="Most nodes that --slo tries.")] = 4096
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="price=3, node-type=h100, host-memory=1TiB, nodes=128, …: what would "
            "differ; may be repeated."
        ),
    ] = None
    window: Annotated[
        str | None,
        typer.Option(
            help="START:END in hours from the trace's start, for a Gantt chart; default: none."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Execution of the runs, and output files."""

    PANEL: ClassVar = "Running it"

    seed: Annotated[
        int, typer.Option(help="Seed of all random draws: same seed, same results.")
    ] = 0
    detail: Annotated[
        str, typer.Option(help="burst (fast): one operation per burst; operation: one per segment.")
    ] = "burst"
    check: Annotated[
        bool,
        typer.Option("--check", help="Check the scheduler's invariants at every event; slower."),
    ] = False
    workers: Annotated[
        int | None, typer.Option(min=1, help="Parallel runs; default: one per core.")
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(help="Run on this Ray cluster: host:port, or auto; default: on this machine."),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html and results.json; default: nothing is written."),
    ] = None
    jobs_out: Annotated[
        Path | None,
        typer.Option(help="File with one row per job (.csv, .csv.gz, .parquet); default: none."),
    ] = None
