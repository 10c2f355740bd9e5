"""`plexrl samples`: shows the samples that a job's controller keeps with `job.log_samples`."""

from typing import Annotated

import typer

from plexrl.cli.terminal.context import Access, Output, local_time, print_line, write_json
from plexrl.cli.terminal.job_ids import JobArgument, find_job
from plexrl.cli.terminal.option_groups import with_option_groups


@with_option_groups
def samples(
    job: JobArgument,
    step: Annotated[int | None, typer.Option(help="The step; default: the newest.")] = None,
    last: Annotated[int, typer.Option(min=1, help="Most samples to print.")] = 10,
    *,
    access: Access,
    output: Output,
) -> None:
    """Samples of a job's step: text, reward, length, and what ended each."""
    with access.open() as cluster:
        found = find_job(cluster, job)
        kept = found.samples(step)
        steps = found.sampled_steps()
    if output.as_json:
        write_json({**kept, "job": found.job, "steps": steps})
        return
    shown = kept["samples"][:last]
    print_line(
        f"{found.job}, step {kept['step']}, {local_time(kept['time'])}: {len(shown)} of "
        f"{kept['total']} samples. "
        f"Steps with samples: {len(steps)}, from {steps[0]} to {steps[-1]}."
    )
    for number, sample in enumerate(shown, start=1):
        reward = "failed" if sample["reward"] is None else f"{sample['reward']:.4g}"
        print_line("")
        print_line(
            f"{number}. reward {reward}, {sample['length']} tokens, ended by {sample['ended_by']}"
        )
        if sample["prompt"]:
            print_line(f"prompt: {sample['prompt']}")
        print_line(f"text: {sample['text']}")
