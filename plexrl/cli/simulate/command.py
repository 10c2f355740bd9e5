"""`plexrl simulate`: runs a trace under several policies on a simulated cluster."""

import typer

from plexrl.cli.simulate.options import groups
from plexrl.cli.terminal.context import Json, print_line
from plexrl.cli.terminal.option_groups import given_options, with_option_groups


@with_option_groups
def simulate(
    context: typer.Context,
    trace: groups.Trace,
    cluster: groups.SimulatedClusterOptions,
    prices: groups.PriceOptions,
    reading: groups.TraceOptions,
    jobs: groups.JobOptions,
    faults: groups.FaultOptions,
    questions: groups.QuestionOptions,
    running: groups.RunOptions,
    as_json: Json = False,
) -> None:
    """Run a trace through the scheduler on a virtual clock: policies, cluster sizes, costs."""
    from plexrl.cli.simulate.answers import find_answers
    from plexrl.cli.simulate.job_rows import check_jobs_out
    from plexrl.cli.simulate.options import checks, setup
    from plexrl.cli.simulate.output import check_folder, output

    asked = setup.questions(cluster.policy, questions)
    given = given_options(context)
    checks.check_options(given, is_published=trace == setup.PUBLISHED)
    if running.out is not None:
        check_folder(running.out)
    if running.jobs_out is not None:
        check_jobs_out(running.jobs_out, trace, running.ray, running.out)
    base = setup.scenario(trace, cluster, prices, reading, jobs, faults, questions, running)
    found = find_answers(
        trace,
        base,
        asked,
        max_nodes=questions.max_nodes,
        workers=running.workers,
        ray_address=running.ray,
        quiet=as_json,
        jobs_out=running.jobs_out,
    )
    output(found, running.out, as_json=as_json)
    if running.jobs_out is not None and not as_json:
        print_line(f"Written: {running.jobs_out}")
    if found.failed:
        raise typer.Exit(1)
