"""`plexrl up`: runs a cluster."""

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from plexrl.cli.cluster import up_options as options
from plexrl.cli.terminal.context import (
    GIB,
    Json,
    print_line,
    write_text,
)
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.cluster.config.options import JOURNAL_VARIABLE, ClusterOptions, check_argument
from plexrl.cluster.data_dir.folder import data_dir_at
from plexrl.errors import InvalidRequestError, JournalMissingError
from plexrl.events.config import PASSWORD_VARIABLE, BrokerConfig, check_installed

if TYPE_CHECKING:
    from plexrl.cluster.data_dir.endpoint import Endpoint
    from plexrl.cluster.ray.options import RayOptions

GPUS_PER_NODE = 4
"""Default GPUs of a virtual node."""


@with_option_groups
def up(
    context: typer.Context,
    local: options.LocalCluster,
    scheduling: options.Scheduling,
    topology: options.Topology,
    api: options.Api,
    durability: options.Durability,
    on_ray: options.OnRay,
    routers: options.Routers,
    events: options.Events,
    limits: options.Limits,
    as_json: Json = False,
) -> None:
    """Run a cluster until Ctrl-C: of local processes, or on the nodes of a Ray cluster."""
    from plexrl.cluster.supervisor import run_cluster

    is_virtual = local.nodes is not None or topology.node_types or topology.blocks
    if on_ray.ray is not None and is_virtual:
        raise InvalidRequestError(
            "--nodes, --node-types and --blocks are of virtual nodes; with --ray they are Ray's"
        )

    # Removed, so that child processes do not inherit them.
    os.environ.pop(JOURNAL_VARIABLE, None)
    mqtt_password = os.environ.pop(PASSWORD_VARIABLE, "")
    source = context.get_parameter_source("journal")
    journal = scheduling.journal
    if journal is not None and source is not None and source.name == "COMMANDLINE":
        check_argument(journal)

    cluster = _cluster_options(local, scheduling, topology, api, durability, routers, limits)
    cluster = replace(cluster, events=_broker(events, mqtt_password))
    ray = _ray_options(on_ray, local)

    def ready(endpoint: "Endpoint") -> None:
        _print_endpoint(endpoint, as_json=as_json, has_docs=api.api_docs)

    try:
        run_cluster(cluster, ready, ray=ray)
    except JournalMissingError as error:
        if as_json or not sys.stdin.isatty():
            raise
        print_line(f"{error.message}.")
        if not typer.confirm("Begin a new journal?"):
            raise
        run_cluster(replace(cluster, new_journal=True), ready, ray=ray)


def _cluster_options(
    local: options.LocalCluster,
    scheduling: options.Scheduling,
    topology: options.Topology,
    api: options.Api,
    durability: options.Durability,
    routers: options.Routers,
    limits: options.Limits,
) -> ClusterOptions:
    return ClusterOptions(
        data_dir=data_dir_at(local.data_dir),
        nodes=1 if local.nodes is None else local.nodes,
        gpus_per_node=GPUS_PER_NODE if local.gpus_per_node is None else local.gpus_per_node,
        gpu_memory_bytes=int(local.gpu_memory * GIB),
        host_memory_bytes=int(local.host_memory * GIB),
        node_types=_names(topology.node_types),
        blocks=_names(topology.blocks),
        **asdict(scheduling),
        **asdict(api),
        **asdict(durability),
        **asdict(routers),
        **asdict(limits),
    )


def _broker(events: options.Events, password: str) -> BrokerConfig | None:
    """Raises `InvalidRequestError`: the client is not installed, or a file cannot be used."""
    if events.mqtt is None:
        return None
    broker = BrokerConfig(
        url=events.mqtt,
        password="" if events.mqtt_password_file else password,
        password_file=_absolute(events.mqtt_password_file),
        ca=_absolute(events.mqtt_ca),
        certificate=_absolute(events.mqtt_certificate),
        key=_absolute(events.mqtt_key),
    )
    check_installed()
    broker.read_password()
    broker.tls_context()
    return broker


def _absolute(path: str) -> str:
    """The path as other processes need it; empty stays empty."""
    return str(Path(path).expanduser().resolve()) if path else ""


def _ray_options(on_ray: options.OnRay, local: options.LocalCluster) -> "RayOptions | None":
    from plexrl.cluster.ray.options import RayOptions

    if on_ray.ray is None:
        return None
    return RayOptions(
        address=on_ray.ray,
        places_per_node=local.gpus_per_node,
        node_replace_s=on_ray.node_replace_s,
        rebuild_operations=on_ray.rebuild_operations,
    )


def _print_endpoint(endpoint: "Endpoint", *, as_json: bool, has_docs: bool) -> None:
    if as_json:
        write_text(endpoint.to_json() + "\n")
    else:
        docs = f"  API documentation: {endpoint.url.partition(',')[0]}/docs\n"
        write_text(
            f"PlexRL is up. Ctrl-C ends it.\n\n"
            f"  export PLEXRL_URL={endpoint.url}\n"
            f"  export PLEXRL_API_KEY={endpoint.api_key}   # the operator's\n\n"
            f"{docs if has_docs else ''}"
            f"  logs and state:    {endpoint.data_dir}\n"
        )
    sys.stdout.flush()


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text else ()
