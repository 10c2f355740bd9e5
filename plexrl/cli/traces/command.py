"""`plexrl traces`: check, convert, describe, generate and record traces of jobs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plexrl.cli.terminal.context import Access, Json, Output, print_line, print_table, write_json
from plexrl.cli.terminal.help import CommandGroup
from plexrl.cli.terminal.option_groups import given_options, with_option_groups
from plexrl.cli.traces.checks import SUFFIXES, check_out, refuse
from plexrl.cli.traces.tables import print_description, print_distributions
from plexrl.process.plain_text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from plexrl.traces import Problem, Shape, Source, TraceJob
    from plexrl.traces.convert.wandb_runs import RunProfile
    from plexrl.traces.formats.servegen import Draw
    from plexrl.traces.generate.distributions import Distribution

traces_app = typer.Typer(
    cls=CommandGroup,
    help="Traces of jobs: check, convert, describe, generate, record.",
    no_args_is_help=True,
)

DAY_S = 86_400.0

Trace = Annotated[
    str, typer.Argument(help="A file, bundled:NAME, or a folder of ServeGen's clients.")
]
Out = Annotated[
    Path,
    typer.Argument(help="File to write: *.csv, *.csv.gz or *.parquet. Replaces an existing file."),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from", help="Column layout (docs/traces.md); default: detected from the header."
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="List bad rows on stderr and skip them.")]
Seed = Annotated[int, typer.Option(help="Seed of all random draws: same seed, same bytes.")]
Gpus = Annotated[int | None, typer.Option(min=1, help="Show the load on so many GPUs.")]


@traces_app.command()
def validate(trace: Trace, layout: From = None, as_json: Json = False) -> None:
    """List all faults of a trace by line and field."""
    from plexrl.traces import check_trace

    source, good = check_trace(
        trace, format=layout, on_problem=None if as_json else _printer(trace, sys.stdout)
    )
    problems = source.problems
    found = {
        "path": trace,
        "format": source.format,
        "good": good,
        "bad_lines": problems.bad_lines,
        "faults": problems.count,
        "left_out": dict(source.left_out),
        "problems": [
            {"line": each.line, "field": each.field, "message": each.message}
            for each in problems.kept
        ],
    }
    rows = [(source.format, good, problems.bad_lines, problems.count, source.left_out.total())]
    columns = ("format", "good rows", "bad lines", "faults", "left out")
    write_json(found) if as_json else print_table(trace, columns, rows)
    if problems.count:
        raise typer.Exit(1)


SHAPING = ("compress", "backlog", "cap_days", "min_gpus", "min_duration", "start_day", "profiles")
"""Options of `convert` that change jobs."""
OF_A_RUN = ("gpus", "rollout_gpus", "metric")
"""Options of `convert` for W&B exports."""
DRAWN = ("requests",)
"""Options for sources of distributions."""


@traces_app.command()
def convert(
    context: typer.Context,
    trace: Trace,
    out: Out,
    layout: From = None,
    skip_bad: SkipBad = False,
    profiles: Annotated[
        bool, typer.Option(help="Give jobs without cycles those of the published RL profiles.")
    ] = False,
    compress: Annotated[float, typer.Option(help="Factor by which arrivals are faster.")] = 1.0,
    backlog: Annotated[bool, typer.Option(help="Submit all jobs at the start.")] = False,
    cap_days: Annotated[float | None, typer.Option(help="Cut longer jobs to so many days.")] = None,
    min_gpus: Annotated[int, typer.Option(min=0, help="Exclude smaller jobs.")] = 0,
    min_duration: Annotated[float, typer.Option(help="Exclude shorter jobs; seconds.")] = 0.0,
    start_day: Annotated[
        float, typer.Option(help="Exclude jobs before this day of the trace, counted from 0.")
    ] = 0.0,
    gpus: Annotated[int, typer.Option(min=1, help="Training GPUs of a W&B run.")] = 8,
    rollout_gpus: Annotated[int, typer.Option(min=0, help="Rollout GPUs of a W&B run.")] = 0,
    metric: Annotated[
        list[str] | None, typer.Option(help="Metric of a W&B run: NAME=PHASE, as my/gen_s=rollout.")
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="Requests to draw from ServeGen's distributions.")
    ] = 10_000,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Read any known trace, or a W&B export (--from wandb), and write it in the schema."""
    from plexrl.traces import Shape, with_profiles, write_jobs, write_lengths
    from plexrl.traces.formats.servegen import Draw

    given = given_options(context)
    check_out(out, trace)
    if "compress" in given:
        refuse(given, ("backlog",), "--compress determines the arrivals")
    if layout == "wandb":
        refuse(given, (*SHAPING, *DRAWN, "seed"), "a W&B export is not shaped")
        runs = _wandb_runs(trace, metric, skip_bad)
        found = (run.job(gpus=gpus, rollout_gpus=rollout_gpus) for run in runs)
        _report(out, write_jobs(out, found), {}, as_json)
        return
    refuse(given, OF_A_RUN, "it applies to W&B exports (--from wandb)")
    source = _open_trace(trace, layout, skip_bad, Draw(requests=requests, seed=seed))
    if source.format != "servegen":
        refuse(given, DRAWN, "nothing is drawn from a trace of requests or jobs")
    if source.table.name == "lengths":
        refuse(given, SHAPING, "it applies to jobs, and this trace has response lengths")
        if source.format != "servegen":
            refuse(given, ("seed",), "nothing is drawn")
        _report(out, write_lengths(out, source.rows), dict(source.left_out), as_json)
        return
    if not profiles:
        refuse(given, ("seed",), "nothing is drawn without --profiles")
    shape = Shape(
        compress=compress,
        backlog=backlog,
        cap_s=None if cap_days is None else cap_days * DAY_S,
        gpus_min=min_gpus,
        duration_s_min=min_duration,
        start_s=start_day * DAY_S,
    )
    jobs = _shape_jobs(source, shape, skip_bad)
    count = write_jobs(out, with_profiles(jobs, seed=seed) if profiles else jobs)
    _report(out, count, dict(source.left_out), as_json)


def _shape_jobs(source: "Source", shape: "Shape", skip_bad: bool) -> "Iterator[TraceJob]":
    """The shaped jobs; an unchanged file of this schema keeps its clock."""
    from plexrl.traces import Shape, shaped

    if source.format == "jobs" and shape == Shape() and not skip_bad:
        return source.rows
    return shaped(source.rows, shape)


@traces_app.command()
def describe(
    trace: Trace,
    layout: From = None,
    skip_bad: SkipBad = False,
    gpus: Gpus = None,
    fit: Annotated[bool, typer.Option(help="Show fitted distributions and their errors.")] = False,
    as_json: Json = False,
) -> None:
    """Counts, sums and quantiles of a trace."""
    from plexrl.traces import describe_jobs, describe_lengths, fit_lengths, fit_workload
    from plexrl.traces.describe import JobsDescription, LengthsDescription, offered_load

    source = _open_trace(trace, layout, skip_bad)
    if source.table.name == "lengths":
        if gpus is not None:
            refuse({"gpus": gpus}, ("gpus",), "response lengths have no load on GPUs")
        described: JobsDescription | LengthsDescription = describe_lengths(source.rows)
    else:
        described = describe_jobs(source.rows)
        if gpus is not None:
            described["offered_load"] = offered_load(described, gpus)
    laws: list[tuple[str, str, float | None]] = []
    if fit:
        rows = _open_trace(trace, layout, skip_bad).rows
        if source.table.name == "jobs":
            laws = fit_workload(rows).describe()
        else:
            model = fit_lengths(rows)
            if described["table"] == "lengths":
                described["group_correlation"] = model.correlation
            laws = [("output_tokens", model.fit.distribution.describe(), model.fit.distance)]
        described["laws"] = [{"of": of, "law": law, "distance": off} for of, law, off in laws]
    if as_json:
        write_json(described)
        return
    print_description(trace, described)
    if laws:
        print_distributions(laws)


OF_JOBS = ("jobs", "days", "jobs_per_day", "profiles", "cap_days")
"""Options of `generate` for jobs."""
OF_LENGTHS = ("samples", "correlation")


@traces_app.command()
def generate(
    context: typer.Context,
    out: Out,
    jobs: Annotated[int | None, typer.Option(min=1, help="Number of jobs.")] = None,
    days: Annotated[float | None, typer.Option(min=0.0, help="Days in which jobs arrive.")] = None,
    fit: Annotated[
        str | None, typer.Option(help="Trace to fit; default: the published profile.")
    ] = None,
    jobs_per_day: Annotated[
        float, typer.Option(min=1e-3, help="Jobs a day in the published profile.")
    ] = 12.0,
    profiles: Annotated[bool, typer.Option(help="Give jobs RL cycles.")] = True,
    cap_days: Annotated[float, typer.Option(min=1e-3, help="Cap on durations, in days.")] = 14.0,
    lengths: Annotated[
        int | None, typer.Option(min=1, help="Write response lengths of so many prompts instead.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses to each prompt.")] = 8,
    correlation: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Correlation of response lengths to one prompt; default: of --fit, else 0.5.",
        ),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Generate a trace from the published profile or from distributions fitted to a trace."""
    from plexrl.traces import fit_workload, generate_jobs, published_workload, write_jobs

    given = given_options(context)
    check_out(out, fit)
    if lengths is not None:
        refuse(given, OF_JOBS, "--lengths generates responses, not jobs")
        if correlation != correlation:
            raise typer.BadParameter("--correlation is 0 to 1, not nan")
        count = _generate_lengths(out, lengths, samples, correlation, fit, seed)
        _report(out, count, {}, as_json)
        return
    refuse(given, OF_LENGTHS, "it applies to response lengths (--lengths)")
    if fit is not None:
        refuse(given, ("jobs_per_day",), "--fit determines the arrivals")
    if jobs is None and days is None:
        raise typer.BadParameter("give --jobs or --days")
    workload = published_workload(jobs_per_day) if fit is None else fit_workload(_job_rows(fit))
    made = generate_jobs(
        workload,
        seed=seed,
        jobs=jobs,
        span_s=None if days is None else days * DAY_S,
        cap_s=cap_days * DAY_S,
        profiles=profiles,
    )
    count = write_jobs(out, made)
    if not as_json:
        print_distributions(workload.describe())
    _report(out, count, {}, as_json)


@traces_app.command()
@with_option_groups
def record(out: Out, access: Access, output: Output) -> None:
    """Record a cluster's jobs as far back as its operation log goes: one row each, or, to a file
    named *.json, their whole history (for `plexrl fidelity`)."""
    from plexrl.client.display.chrome_trace import operation_rows
    from plexrl.traces import record as recorded
    from plexrl.traces import write_jobs
    from plexrl.traces.convert.history import history_of, write_history

    check_out(out, suffixes=(*SUFFIXES, ".json"))
    with access.open() as cluster:
        status = cluster.status()
        history = history_of(cluster.jobs(), operation_rows(cluster), status)
    if out.suffix == ".json":
        count = write_history(out, history)
    else:
        count = write_jobs(out, recorded(history.jobs, history.operations, history.now))
    _report(out, count, {}, output.as_json)


def _generate_lengths(
    out: Path, prompts: int, samples: int, correlation: float | None, fit: str | None, seed: int
) -> int:
    from plexrl.traces import bundled, fit_lengths, generate_lengths, write_lengths
    from plexrl.traces.formats import read_histogram
    from plexrl.traces.generate.generator import GROUP_CORRELATION

    distribution: Distribution
    if fit is None:
        distribution = read_histogram(bundled("r1-lengths"))
    else:
        source = _open_trace(fit, None, False)
        if source.table.name != "lengths":
            raise typer.BadParameter(f"{fit} has no response lengths to fit")
        model = fit_lengths(source.rows)
        distribution = model.fit.distribution
        correlation = model.correlation if correlation is None else correlation
    made = generate_lengths(
        distribution,
        seed=seed,
        prompts=prompts,
        samples_per_prompt=samples,
        correlation=GROUP_CORRELATION if correlation is None else correlation,
    )
    return write_lengths(out, made)


def _job_rows(trace: str) -> "Iterable[TraceJob]":
    source = _open_trace(trace, None, False)
    if source.table.name != "jobs":
        raise typer.BadParameter(f"{trace} has response lengths, not jobs")
    return source.rows


def _open_trace(
    trace: str, layout: str | None, skip_bad: bool, draw: "Draw | None" = None
) -> "Source":
    from plexrl.traces import open_trace

    on_problem = _printer(trace, sys.stderr) if skip_bad else None
    return open_trace(trace, format=layout, skip_bad=skip_bad, on_problem=on_problem, draw=draw)


def _printer(trace: str, stream: Any) -> Any:
    """A report that prints each problem as `file:line: field message`, which editors parse."""

    def report(problem: "Problem") -> None:
        field = f"{problem.field} " if problem.field else ""
        stream.write(one_line(f"{trace}:{problem.line}: {field}{problem.message}") + "\n")

    return report


def _wandb_runs(trace: str, metrics: list[str] | None, skip_bad: bool) -> "Iterable[RunProfile]":
    from plexrl.traces import read_runs

    phases = {}
    for metric in metrics or ():
        name, equals, phase = metric.rpartition("=")
        if not equals:
            raise typer.BadParameter(f"{metric!r}: write it as NAME=PHASE")
        phases[name] = phase
    on_problem = _printer(trace, sys.stderr) if skip_bad else None
    return read_runs(trace, metrics=phases, skip_bad=skip_bad, on_problem=on_problem)


def _report(out: Path, count: int, left_out: dict[str, int], as_json: bool) -> None:
    if as_json:
        found = {"path": str(out), "rows": count, "left_out": left_out}
        write_json(found)
        return
    reasons = "; ".join(f"{rows} left out: {reason}" for reason, rows in sorted(left_out.items()))
    print_line(f"{out}: {count} rows" + (f" ({reasons})" if reasons else ""))
