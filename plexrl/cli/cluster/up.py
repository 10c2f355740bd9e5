"""`plexrl up` and `plexrl demo`: what runs until it is done."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from plexrl.cli.terminal.context import (
    DATA_DIR,
    GIB,
    DataDir,
    Json,
    data_dir_option,
    print_line,
    write_json,
    write_text,
)
from plexrl.cluster.config import (
    JOURNAL_VARIABLE,
    ORDERINGS,
    POLICIES,
    ClusterOptions,
    check_argument,
)
from plexrl.errors import InvalidRequestError, JournalMissingError
from plexrl.model.parallelism import Parallelism

GPUS_PER_NODE = 4
"""Of a virtual node, where nothing else is said."""


def up(
    context: typer.Context,
    data_dir: DataDir = DATA_DIR,
    nodes: Annotated[int | None, typer.Option(help="Virtual nodes; 1 if not said.")] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            help="Places for workers on each node; if not said 4, or with --ray its GPUs."
        ),
    ] = None,
    gpu_memory: Annotated[float, typer.Option(help="GiB of each GPU.")] = 2.0,
    host_memory: Annotated[float, typer.Option(help="GiB of each node's host tier.")] = 2.0,
    policy: Annotated[str, typer.Option(help=f"Placement: {', '.join(POLICIES)}.")] = "pack",
    ordering: Annotated[
        str, typer.Option(help=f"Turns within a group: {', '.join(ORDERINGS)}.")
    ] = "hrrs",
    journal: Annotated[
        str | None,
        typer.Option(
            help="A path, or postgresql://user@host/name; with a password only by the variable.",
            envvar=JOURNAL_VARIABLE,
        ),
    ] = None,
    new_journal: Annotated[
        bool,
        typer.Option(
            "--new-journal",
            help="Begin an empty journal although the data directory has state of former jobs.",
        ),
    ] = False,
    node_types: Annotated[
        str, typer.Option(help="Kinds of the nodes, comma between: one for all, or one each.")
    ] = "",
    blocks: Annotated[str, typer.Option(help="Where the nodes stand, likewise.")] = "",
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all. There is no TLS.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the API; 0 takes a free one.")] = 0,
    api_docs: Annotated[
        bool,
        typer.Option("--api-docs", help="Describe the HTTP API at /docs, for anybody."),
    ] = False,
    journal_bytes_max: Annotated[int | None, typer.Option(help="Bound of the journal.")] = None,
    lease_s: Annotated[
        float | None, typer.Option(help="Silence of the scheduler until a standby leads.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Run on the nodes of this Ray cluster: host:port, or auto.")
    ] = None,
    node_replace_s: Annotated[
        float,
        typer.Option(help="With --ray: seconds that jobs wait for a node of a lost one's name."),
    ] = 60.0,
    rebuild_operations: Annotated[
        int,
        typer.Option(help="With --ray: operations kept to compute a model's lost state anew."),
    ] = 1024,
    routers: Annotated[int, typer.Option(help="Routers, each with a port of its own.")] = 1,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Send operations there as OpenTelemetry spans.")
    ] = None,
    pending_operations_max: Annotated[
        int | None, typer.Option(help="Operations that wait in one deployment's queue.")
    ] = None,
    tenant_operations_max: Annotated[
        int | None, typer.Option(help="Unfinished operations of one tenant.")
    ] = None,
    deployment_payload_bytes_max: Annotated[
        int | None, typer.Option(help="Bytes of the unfinished operations of one deployment.")
    ] = None,
    tenant_payload_bytes_max: Annotated[
        int | None, typer.Option(help="Bytes of the unfinished operations of one tenant.")
    ] = None,
    tenant_live_jobs_max: Annotated[
        int, typer.Option(help="Jobs of one tenant that have not ended.")
    ] = 1000,
    tenant_checkpoints_max: Annotated[
        int | None, typer.Option(help="Checkpoints of one tenant.")
    ] = None,
    tenant_checkpoint_bytes_max: Annotated[
        int | None, typer.Option(help="Bytes of one tenant's checkpoints; else half of the disk.")
    ] = None,
    metrics_row_bytes_max: Annotated[
        int | None, typer.Option(help="Bytes of a row of a job's metrics.")
    ] = None,
    metrics_job_bytes_max: Annotated[
        int | None, typer.Option(help="Bytes of all metrics of a job.")
    ] = None,
    connections_max: Annotated[
        int | None, typer.Option(help="Open connections of one router.")
    ] = None,
    address_connections_max: Annotated[
        int | None, typer.Option(help="Open connections of one client address to one router.")
    ] = None,
    header_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds in which a request's head is there.")
    ] = None,
    body_timeout_s: Annotated[
        float | None,
        typer.Option(help="Seconds for a request's JSON, and of silence in a payload."),
    ] = None,
    json_bytes_max: Annotated[int | None, typer.Option(help="Bytes of a request's JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Run a cluster until Ctrl-C: of local processes, or on the nodes of a Ray cluster."""
    from plexrl.cluster.endpoint import Endpoint
    from plexrl.cluster.ray.options import RayOptions
    from plexrl.cluster.supervisor import run_cluster

    if ray is not None and (nodes is not None or node_types or blocks):
        raise InvalidRequestError(
            "--nodes, --node-types and --blocks are of virtual nodes; with --ray they are Ray's"
        )

    # Taken out, so that it is not for what this process starts.
    os.environ.pop(JOURNAL_VARIABLE, None)
    source = context.get_parameter_source("journal")
    if journal is not None and source is not None and source.name == "COMMANDLINE":
        check_argument(journal)

    def ready(endpoint: Endpoint) -> None:
        if as_json:
            write_text(endpoint.to_json() + "\n")
        else:
            docs = f"  API documentation: {endpoint.url.partition(',')[0]}/docs\n"
            write_text(
                f"PlexRL is up. Ctrl-C ends it.\n\n"
                f"  export PLEXRL_URL={endpoint.url}\n"
                f"  export PLEXRL_API_KEY={endpoint.api_key}   # the operator's\n\n"
                f"{docs if api_docs else ''}"
                f"  logs and state:    {endpoint.data_dir}\n"
            )
        sys.stdout.flush()

    options = ClusterOptions(
        data_dir=data_dir_option(data_dir),
        nodes=1 if nodes is None else nodes,
        gpus_per_node=GPUS_PER_NODE if gpus_per_node is None else gpus_per_node,
        gpu_memory_bytes=int(gpu_memory * GIB),
        host_memory_bytes=int(host_memory * GIB),
        policy=policy,
        ordering=ordering,
        journal=journal,
        new_journal=new_journal,
        node_types=_names(node_types),
        blocks=_names(blocks),
        host=host,
        api_docs=api_docs,
        port=port,
        journal_bytes_max=journal_bytes_max,
        lease_s=lease_s,
        routers=routers,
        otlp_endpoint=otlp_endpoint,
        pending_operations_max=pending_operations_max,
        tenant_operations_max=tenant_operations_max,
        deployment_payload_bytes_max=deployment_payload_bytes_max,
        tenant_payload_bytes_max=tenant_payload_bytes_max,
        tenant_live_jobs_max=tenant_live_jobs_max,
        tenant_checkpoints_max=tenant_checkpoints_max,
        tenant_checkpoint_bytes_max=tenant_checkpoint_bytes_max,
        metrics_row_bytes_max=metrics_row_bytes_max,
        metrics_job_bytes_max=metrics_job_bytes_max,
        connections_max=connections_max,
        address_connections_max=address_connections_max,
        header_timeout_s=header_timeout_s,
        body_timeout_s=body_timeout_s,
        json_bytes_max=json_bytes_max,
    )
    on_ray = (
        None
        if ray is None
        else RayOptions(
            address=ray,
            places_per_node=gpus_per_node,
            node_replace_s=node_replace_s,
            rebuild_operations=rebuild_operations,
        )
    )
    try:
        run_cluster(options, ready, ray=on_ray)
    except JournalMissingError as error:
        if as_json or not sys.stdin.isatty():
            raise
        print_line(f"{error.message}.")
        if not typer.confirm("Begin a new journal?"):
            raise
        run_cluster(replace(options, new_journal=True), ready, ray=on_ray)


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("out/demo"),
    steps: Annotated[int, typer.Option(min=1, help="RL steps of each job.")] = 150,
    seed: Annotated[int, typer.Option(help="Of models, data and sampling.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Workers of a training group.")] = 2,
    backend: Annotated[str | None, typer.Option(help="That trains; default: fsdp.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="Of a training group, as dp=1,tp=2; default: dp=workers.")
    ] = None,
    isolated: Annotated[bool, typer.Option(help="Measure the isolated baseline too.")] = True,
    as_json: Json = False,
) -> None:
    """Train two tenants' jobs on one shared group, then each alone; write a report."""
    from rich.console import Console

    from plexrl.cli.demo.report import report_json
    from plexrl.cli.demo.run import DemoOptions, run_demo

    options = DemoOptions(
        out=out,
        steps=steps,
        seed=seed,
        workers=workers,
        backend=backend,
        layout=None if layout is None else Parallelism.from_text(layout),
        isolated=isolated,
    )
    result = run_demo(options, Console(stderr=as_json))
    if as_json:
        write_json(report_json(result))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text else ()
