"""`plexrl status`, `plexrl nodes` and `plexrl groups`."""

from typing import Annotated, Any

import typer

from plexrl.cli.terminal.context import (
    DATA_DIR,
    GIB,
    DataDir,
    Json,
    Key,
    Output,
    Url,
    local_time,
    open_cluster,
    print_table,
)
from plexrl.cli.terminal.help import CommandGroup

nodes_app = typer.Typer(cls=CommandGroup)
NodeName = Annotated[str, typer.Argument(help="The node's name.")]


def status(
    url: Url = None, api_key: Key = None, data_dir: DataDir = DATA_DIR, as_json: Json = False
) -> None:
    """The cluster in a few numbers, and its problems."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.status()
    shown_below = ("now", "held", "conditions", "restarts", "last_restart_at", "parts")
    rows = [
        (name.replace("_", " "), value)
        for name, value in found.items()
        if name not in shown_below and value != ""
    ]
    rows.append(("deployments held", len(found["held"])))
    rows.append(("parts restarted", _restarts(found["restarts"], found["last_restart_at"])))
    rows.append(("conditions", len(found["conditions"]) or "none"))
    Output(as_json).table("", ("what", "value"), rows, found)
    if as_json:
        return
    if found["conditions"]:
        conditions = [
            (each["code"], local_time(each["since"]), each.get("message"))
            for each in found["conditions"]
        ]
        print_table("What is wrong now", ("condition", "since", "what"), conditions)
    if found.get("parts"):
        parts = [
            (
                name,
                _restarts(each["restarts"], each["last_restart_at"]),
                local_time(each["down_since"]),
            )
            for name, each in found["parts"].items()
        ]
        print_table("Parts that ended", ("part", "restarted", "down since"), parts)


def _restarts(count: int, last_at: float | None) -> str:
    return f"{count}, the last at {local_time(last_at)}" if last_at is not None else str(count)


@nodes_app.callback(invoke_without_command=True)
def nodes(
    context: typer.Context,
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """Nodes and their GPUs; drain a node, or return it to use."""
    if context.invoked_subcommand is not None:
        _refuse_lost_options(context)
        return
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.nodes()
    rows = [
        (
            each["node"],
            each["node_type"],
            each["block"],
            "yes" if each["alive"] else "no",
            "yes" if each["is_draining"] else "no",
            f"{each['gpus_reserved']}/{each['gpus']}",
            f"{each['gpu_memory_bytes'] / GIB:.1f} GiB",
            f"{each['host_memory_bytes'] / GIB:.1f} GiB",
            f"{each['nvme_bytes'] / GIB:.1f} GiB",
        )
        for each in found
    ]
    columns = (
        *("node", "type", "block", "alive", "draining", "GPUs reserved"),
        *("per GPU", "host tier", "NVMe tier"),
    )
    Output(as_json).table("", columns, rows, found)


def _refuse_lost_options(context: typer.Context) -> None:
    """Refuse options before a subcommand, which would have no effect."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--json" if name == "as_json" else f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"put {option} after {context.invoked_subcommand}")


@nodes_app.command("drain")
def drain(
    node: NodeName,
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """Move all work off a node as soon as other nodes have capacity (operator only)."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.drain(node)
    rows = [(node, found["gpus_reserved"], ", ".join(found["groups"]))]
    columns = ("node", "GPUs still reserved", "groups still there")
    Output(as_json).table("", columns, rows, found)


@nodes_app.command("undrain")
def undrain(
    node: NodeName,
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """Return a drained node to use (operator only)."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.undrain(node)
    rows = [(node, f"{found['gpus_reserved']}/{found['gpus']}")]
    Output(as_json).table("", ("node", "GPUs reserved"), rows, found)


def groups(
    url: Url = None, api_key: Key = None, data_dir: DataDir = DATA_DIR, as_json: Json = False
) -> None:
    """Node groups: which job holds each, time spent in switches (operator only)."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.groups()
    rows = [
        (
            each["group"],
            _gpu_ranges(each["gpus"]),
            ", ".join(each["members"]),
            each["node_type"],
            f"{each['load']:.0%}",
            "yes" if each["is_closed"] else "no",
            each["holder"] or "nobody",
            each["phase"],
            each["switches"],
            f"{each['switch_seconds']:.2f}",
        )
        for each in found
    ]
    columns = (
        *("group", "GPUs", "members", "type", "load", "closed", "held by"),
        *("phase", "switches", "seconds in them"),
    )
    Output(as_json).table("", columns, rows, found)


def _gpu_ranges(gpus: list[dict[str, Any]]) -> str:
    """The GPUs of each node with ranges, such as `node0:0-3,6, node1:0`."""
    by_node: dict[str, list[int]] = {}
    for gpu in gpus:
        by_node.setdefault(gpu["node"], []).append(gpu["gpu"])
    texts = []
    for node, indexes in by_node.items():
        ranges: list[list[int]] = []
        for index in sorted(indexes):
            if ranges and index == ranges[-1][1] + 1:
                ranges[-1][1] = index
            else:
                ranges.append([index, index])
        indexes_text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
        texts.append(f"{node}:{indexes_text}")
    return ", ".join(texts)
