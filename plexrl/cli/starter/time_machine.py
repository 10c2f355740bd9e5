"""`plexrl rewind` and `plexrl fork`: a training goes back to a kept step, or on from it in several
ways."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plexrl.cli.terminal.context import Access, Output, print_line, write_json
from plexrl.cli.terminal.job_ids import JobArgument, find_job
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from plexrl.client.blocking.cluster import Cluster
    from plexrl.client.blocking.job import Job

Setting = str | float | bool


@with_option_groups
def rewind(
    job: JobArgument,
    step: Annotated[int, typer.Option(min=0, help="Optimizer steps to go back to.")],
    access: Access,
    output: Output,
) -> None:
    """Set a live job back to a step of which it has a checkpoint.

    Its controller is fenced off, and ends with an error. Start it again: it goes on from the step.
    """
    with access.open() as cluster:
        found = cluster.attach_job(find_job(cluster, job).job)
        try:
            found.rewind(step)
        finally:
            found.detach()
    if output.as_json:
        write_json({"job": found.job, "step": step})
    else:
        print_line(f"{found.job} has the state after step {step}: start its controller again.")


@with_option_groups
def fork(
    job: JobArgument,
    step: Annotated[int, typer.Option(min=0, help="Optimizer steps to begin with.")],
    script: Annotated[Path, typer.Argument(help="The controller of the forks.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments, after `--`.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of forks.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE, or a value for each fork: NAME=V1,V2."),
    ] = None,
    *,
    access: Access,
    output: Output,
) -> None:
    """Run a controller on this machine several times, each as a fork of a job from a step.

    The exit code is 1 unless all of them succeed.
    """
    given = [values_of(text, count) for text in settings or ()]
    with access.open() as cluster:
        parent = find_job(cluster, job)
        _check_kept(parent, step)
        names = [f"{parent.job[:80]}-fork-{uuid.uuid4().hex[:6]}" for _ in range(count)]
        started = [
            _start(
                cluster,
                [sys.executable, os.fspath(script), *(arguments or ())],
                {"PLEXRL_JOB_ID": name, "PLEXRL_FORK": _fork(parent.job, step, given, number)},
                is_quiet=output.as_json,
            )
            for number, name in enumerate(names)
        ]
        if not output.as_json:
            for number, name in enumerate(names):
                print_line(f"{name} {_shown(given, number)}".rstrip())
        codes = [process.wait() for process in started]
    if output.as_json:
        write_json(
            [{"job": name, "exit_code": code} for name, code in zip(names, codes, strict=True)]
        )
    if any(codes):
        raise typer.Exit(1)


def values_of(text: str, count: int) -> tuple[str, list[Setting]]:
    """A setting's name, and its value in each of `count` forks.

    Raises:
        typer.BadParameter: it has no name, or not one value or one for each.
    """
    name, equals, given = text.partition("=")
    values = given.split(",")
    if not name or not equals or len(values) not in (1, count):
        raise typer.BadParameter(
            f"--set {text!r}: write NAME=VALUE, or one value for each of the {count} forks, "
            "separated by commas"
        )
    plain = [_value(each) for each in values]
    return name, plain * count if len(plain) == 1 else plain


def _value(text: str) -> Setting:
    if text in ("true", "false"):
        return text == "true"
    try:
        number = float(text)
    except ValueError:
        return text
    # JSON, in which a fork is told its settings, has finite numbers only.
    return number if isfinite(number) else text


def _fork(job: str, step: int, settings: Sequence[tuple[str, list[Setting]]], number: int) -> str:
    chosen = {name: values[number] for name, values in settings}
    return json.dumps({"job": job, "step": step, "settings": chosen})


def _shown(settings: Sequence[tuple[str, list[Setting]]], number: int) -> str:
    return " ".join(f"{name}={values[number]}" for name, values in settings)


def _start(
    cluster: "Cluster", command: list[str], variables: Mapping[str, str], *, is_quiet: bool
) -> "subprocess.Popen[bytes]":
    """Start the controller of one fork, which finds the cluster by its environment."""
    environment = {
        **os.environ,
        "PLEXRL_URL": cluster.url,
        "PLEXRL_API_KEY": cluster.api_key,
        **variables,
    }
    if cluster.ca is not None:
        environment["PLEXRL_CA_FILE"] = os.fspath(cluster.ca)
    # Only JSON goes to the standard output then.
    return subprocess.Popen(command, env=environment, stdout=sys.stderr if is_quiet else None)


def _check_kept(job: "Job", step: int) -> None:
    """Raises `CheckpointNotFoundError` if no trainer of the job has a checkpoint of the step."""
    kept = sorted({each["step"] for each in job.checkpoints() if "-step-" in each["name"]})
    if step and step not in kept:
        raise CheckpointNotFoundError(
            f"job {job.job!r} has no checkpoint of step {step}; kept are "
            f"{', '.join(map(str, kept)) or 'none'}: create its trainer with checkpoint_every"
        )
