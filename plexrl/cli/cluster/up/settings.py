"""The configuration that `plexrl up` runs: its file, overridden by its options."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from plexrl.cli.cluster.up import options
from plexrl.cli.terminal.sizes import memory_size
from plexrl.cluster.config.network import NetworkOptions, parse_ports
from plexrl.cluster.config.options import ClusterOptions
from plexrl.cluster.data_dir.folder import data_dir_at
from plexrl.errors import InvalidRequestError
from plexrl.events.config import absolute, usable_broker

if TYPE_CHECKING:
    from plexrl.cluster.config.file import ClusterFile
    from plexrl.cluster.config.ray_options import RayOptions

OPTION_OF = {"gpu_memory_bytes": "gpu_memory", "host_memory_bytes": "host_memory"}
"""Fields whose option has another name."""
GIVEN = ("COMMANDLINE", "ENVIRONMENT")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """All options of `plexrl up`, by group."""

    local: options.LocalCluster
    scheduling: options.Scheduling
    topology: options.Topology
    api: options.Api
    network: options.NetworkFlags
    durability: options.Durability
    on_ray: options.OnRay
    routers: options.Routers
    events: options.Events
    limits: options.LimitOptions


def choose_options(
    context: typer.Context, given: UpOptions, mqtt_password: str
) -> "tuple[ClusterOptions, RayOptions | None]":
    """The options of the cluster, and those for Ray if its nodes are Ray's.

    Raises:
        ConfigError: the configuration file has problems.
        InvalidRequestError: an option is invalid, or options contradict each other.
    """
    from plexrl.cluster.config.file import ClusterFile, read_cluster_file

    path = given.local.config
    file = ClusterFile() if path is None else read_cluster_file(path)
    fields = _overridden(context, _fields(given), file.options)
    broker = given.events.broker() or file.events
    cluster = ClusterOptions(
        **{**fields, "data_dir": data_dir_at(fields["data_dir"])},
        network=_network(context, given.network, file.network),
        events=None if broker is None else usable_broker(broker, mqtt_password),
        settings=file.settings,
    )
    ray = _ray(context, given, file)
    topology = cluster.node_types or cluster.node_speeds or cluster.blocks
    is_virtual = topology or "nodes" in file.options
    if ray is not None and (is_virtual or given.local.nodes is not None):
        raise InvalidRequestError(
            "--nodes, --node-types, --node-speeds and --blocks are of virtual nodes; with --ray "
            "nodes and types are Ray's, and speeds follow from the names of GPUs and types"
        )
    if ray is not None and cluster.network is not None:
        cluster = replace(cluster, nodes=0)
    return cluster, ray


def _fields(given: UpOptions) -> dict[str, Any]:
    """The fields of `ClusterOptions` as the command line has them, defaults included."""
    local, topology = given.local, given.topology
    return {
        "data_dir": local.data_dir,
        "nodes": 1 if local.nodes is None else local.nodes,
        "gpus": local.gpus,
        "virtual_gpus": local.virtual_gpus,
        "gpu_memory_bytes": None if local.gpu_memory is None else memory_size(local.gpu_memory),
        "host_memory_bytes": None if local.host_memory is None else memory_size(local.host_memory),
        "node_types": _names(topology.node_types),
        "node_speeds": _speeds(topology.node_speeds),
        "blocks": _names(topology.blocks),
        **asdict(given.scheduling),
        **asdict(given.api),
        **asdict(given.durability),
        **asdict(given.routers),
        **asdict(given.limits),
    }


def _overridden(
    context: typer.Context, values: Mapping[str, Any], file: Mapping[str, Any]
) -> dict[str, Any]:
    """The file's values, overridden by the options that were given; then the defaults."""
    return {
        **file,
        **{
            name: value
            for name, value in values.items()
            if name not in file or is_given(context, OPTION_OF.get(name, name))
        },
    }


def is_given(context: typer.Context, option: str) -> bool:
    """Whether the user set the option, on the command line or by its variable."""
    source = context.get_parameter_source(option)
    return source is not None and source.name in GIVEN


def _network(
    context: typer.Context, given: options.NetworkFlags, file: NetworkOptions | None
) -> NetworkOptions | None:
    values = asdict(given)
    is_on = values.pop("tls") or file is not None
    if not is_on:
        for name in values:
            if is_given(context, name):
                option = name.replace("_", "-")
                raise InvalidRequestError(f"--{option} is for several machines: add --tls")
        return None
    values["node_ports"] = parse_ports("--node-ports", given.node_ports)
    for name in ("tls_cert", "tls_key", "tls_ca"):
        values[name] = absolute(values[name])
    return NetworkOptions(**_overridden(context, values, {} if file is None else asdict(file)))


def _ray(context: typer.Context, given: UpOptions, file: "ClusterFile") -> "RayOptions | None":
    from plexrl.cluster.config.ray_options import RayOptions

    on_ray, former = given.on_ray, file.ray
    if on_ray.ray is None and former is None:
        return None
    values = {
        "address": on_ray.ray,
        "places_per_node": given.local.virtual_gpus,
        "node_replace_s": on_ray.node_replace_s,
        "rebuild_operations": on_ray.rebuild_operations,
        "node_dir": on_ray.ray_node_dir,
    }
    known = {} if former is None else asdict(former)
    chosen = {
        name: value
        for name, value in values.items()
        if name not in known or is_given(context, _RAY_OPTION.get(name, name))
    }
    return RayOptions(**{**known, **chosen})


_RAY_OPTION = {
    "address": "ray",
    "places_per_node": "virtual_gpus",
    "node_dir": "ray_node_dir",
}


def _speeds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(",")) if text else ()
    except ValueError:
        raise InvalidRequestError(
            f"--node-speeds {text!r} are no numbers: write them as 1,0.3"
        ) from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text else ()
