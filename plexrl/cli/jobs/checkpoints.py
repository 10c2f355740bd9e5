"""`plexrl checkpoints`: lists, shows, downloads and deletes checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plexrl.cli.terminal.context import (
    Access,
    Cells,
    Output,
    local_time,
    print_line,
    warn,
    write_json,
)
from plexrl.cli.terminal.help import ListGroup
from plexrl.cli.terminal.job_ids import JobArgument, find_job
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.cli.terminal.sizes import size_text
from plexrl.errors import CheckpointNotFoundError
from plexrl.wire.messages.node_queries import CheckpointView

if TYPE_CHECKING:
    from plexrl.client.blocking.cluster import Cluster
    from plexrl.client.blocking.job import Job

DURABLE = "durable"
"""State of a complete checkpoint."""

checkpoints_app = typer.Typer(
    cls=ListGroup,
    help="Checkpoints of jobs, finished or in progress: `plexrl checkpoints [JOB]` lists them.",
)


@checkpoints_app.command("list")
@with_option_groups
def list_checkpoints(
    job: Annotated[
        str | None, typer.Argument(help="The job; default: all jobs that the key may see.")
    ] = None,
    *,
    access: Access,
    output: Output,
) -> None:
    """List checkpoints: step, state, bytes, time of the request, and path."""
    found: list[CheckpointView] = []
    silent: dict[str, str] = {}
    with access.open() as cluster:
        names = _jobs_with_checkpoints(cluster) if job is None else [find_job(cluster, job).job]
        for name in names:
            listing = cluster.read_checkpoints(name)
            found += listing["checkpoints"]
            silent |= {node["node"]: node["reason"] for node in listing["failed"]}
    for node, reason in silent.items():
        warn(f"plexrl: no answer from node {node}: {reason}")
    show(found, output)


def show(found: Sequence[CheckpointView], output: Output) -> None:
    """Print a table of checkpoints, and why those that failed did."""
    cells: Cells = {
        "job": "job",
        "name": "name",
        "step": "step",
        "state": "state",
        "size": _size,
        "when": lambda each: local_time(each["as_of"]),
        "path": "path",
    }
    output.table(cells, found)
    if not output.as_json:
        for each in found:
            if (error := each["error"]) is not None:
                print_line(f"{each['job']} {each['name']}: {error['message']}")


@checkpoints_app.command("show")
@with_option_groups
def show_checkpoint(
    job: JobArgument,
    name: Annotated[str, typer.Argument(help="A checkpoint of the job.")],
    access: Access,
    output: Output,
) -> None:
    """Show one checkpoint, and its files if it is complete."""
    with access.open() as cluster:
        found = find_job(cluster, job)
        view = _known(found, [name])[name]
        files = found.checkpoint_files(name) if view["state"] == DURABLE else []
    if output.as_json:
        write_json({**view, "files": files})
        return
    print_line(
        f"{found.job} {name}: step {view['step']}, {view['state']}, {_size(view)}, "
        f"{local_time(view['as_of'])}, in {view['path']}"
    )
    if (error := view["error"]) is not None:
        print_line(error["message"])
    cells: Cells = {"file": "path", "size": lambda each: size_text(each["bytes"])}
    if files:
        output.table(cells, files)


@checkpoints_app.command("keep")
@with_option_groups
def keep_checkpoints(
    job: JobArgument,
    count: Annotated[int, typer.Argument(min=1, help="Number of the newest that are kept.")],
    *,
    access: Access,
    output: Output,
) -> None:
    """Delete the complete checkpoints of a job except those of the highest steps."""
    with access.open() as cluster:
        found = find_job(cluster, job)
        whole = [checkpoint for checkpoint in found.checkpoints() if checkpoint["state"] == DURABLE]
        whole.sort(key=lambda each: (each["step"], each["as_of"]))
        gone = whole[:-count]
        for each in gone:
            found.delete_checkpoint(each["name"])
    if output.as_json:
        write_json([{"job": found.job, "name": each["name"], "deleted": True} for each in gone])
        return
    for each in gone:
        print_line(f"{found.job} {each['name']} is deleted: {each['path']}")
    print_line(f"{found.job} has {len(whole) - len(gone)} complete checkpoints.")


@checkpoints_app.command("download")
@with_option_groups
def download_checkpoint(
    job: JobArgument,
    name: Annotated[str, typer.Argument(help="A complete checkpoint of the job.")],
    folder: Annotated[Path, typer.Argument(help="A new folder on this machine.")],
    access: Access,
    output: Output,
) -> None:
    """Write the files of a checkpoint into a folder, which `transformers` can load."""
    with access.open() as cluster:
        found = find_job(cluster, job)
        found.download_checkpoint(name, folder)
    nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if output.as_json:
        write_json({"job": found.job, "name": name, "folder": str(folder), "bytes": nbytes})
        return
    print_line(f"{found.job} {name} is in {folder}: {size_text(nbytes)}")


@checkpoints_app.command("delete")
@with_option_groups
def delete_checkpoints(
    job: JobArgument,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Checkpoints of the job.")],
    access: Access,
    output: Output,
) -> None:
    """Delete checkpoints of a job ; if one does not exist, none is deleted."""
    with access.open() as cluster:
        found = find_job(cluster, job)
        known = _known(found, names)
        for name in dict.fromkeys(names):
            found.delete_checkpoint(name)
    if output.as_json:
        write_json([{"job": found.job, "name": name, "deleted": True} for name in names])
        return
    for name in dict.fromkeys(names):
        print_line(f"{found.job} {name} is deleted: {known[name]['path']}")


def _known(job: "Job", names: Sequence[str]) -> dict[str, CheckpointView]:
    """The job's checkpoints by name. Raises `CheckpointNotFoundError` if one of `names` is none."""
    known = {checkpoint["name"]: checkpoint for checkpoint in job.checkpoints()}
    unknown = [name for name in names if name not in known]
    if unknown:
        existing = ", ".join(sorted(known)) or "none"
        raise CheckpointNotFoundError(
            f"job {job.job!r} has no checkpoint {unknown[0]!r}; it has {existing}"
        )
    return known


def _jobs_with_checkpoints(cluster: "Cluster") -> list[str]:
    """Jobs that have written a checkpoint, oldest first."""
    rows = cluster.usage()
    return list(dict.fromkeys(row["job"] for row in rows if row["kind"] == "save_checkpoint"))


def _size(checkpoint: CheckpointView) -> str:
    done, total = checkpoint["bytes_done"], checkpoint["bytes_total"]
    whole = size_text(total)
    return whole if done == total else f"{size_text(done)} of {whole}"
