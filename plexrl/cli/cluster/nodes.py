"""`plexrl nodes` and `plexrl groups`."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated

import typer

from plexrl.cli.terminal.context import GIB, Access, Cells, Output, local_time, print_records
from plexrl.cli.terminal.help import CommandGroup
from plexrl.cli.terminal.option_groups import given_options, option_name, with_option_groups
from plexrl.cluster.data_dir.folder import data_dir_at
from plexrl.errors import NotFoundError
from plexrl.wire.messages.cluster_views import GpuView, NodeView

nodes_app = typer.Typer(cls=CommandGroup)
NodeName = Annotated[str, typer.Argument(help="The node's name.")]


@nodes_app.callback(invoke_without_command=True)
@with_option_groups
def nodes(context: typer.Context, access: Access, output: Output) -> None:
    """Nodes and their GPUs; drain a node, or return it to use."""
    if context.invoked_subcommand is not None:
        _refuse_lost_options(context)
        return
    with access.open() as cluster:
        show_nodes(cluster.nodes(), output)


def show_nodes(found: Sequence[NodeView], output: Output) -> None:
    """Print two tables, because one with all columns is wider than a terminal. There is no second
    one if nothing is known of where the nodes are and all are equally fast. A third one has what
    holds their GPUs up."""
    cells: Cells = {
        "node": "node",
        "alive": lambda each: _yes(each["alive"]),
        "draining": lambda each: _yes(each["is_draining"]),
        "GPUs reserved": _reserved,
        "per GPU": lambda each: _gib(each["gpu_memory_bytes"]),
        "host tier": _host_tier,
        "NVMe tier": lambda each: _gib(each["nvme_bytes"]),
    }
    output.table(cells, found)
    is_told = any(each.get(name) for each in found for name in _PLACE.values())
    has_speeds = any(each["speed"] != 1 for each in found)
    if not output.as_json and (is_told or has_speeds):
        places: Cells = {"node": "node"} | {
            title: partial(_text, name) for title, name in _PLACE.items()
        }
        speeds: Cells = {"speed": lambda each: f"{each['speed']:g}"} if has_speeds else {}
        print_records("Where they are", {**places, **speeds}, found)
    foreign = [row for each in found for row in each.get("foreign_memory", ())]
    if foreign and not output.as_json:
        rows: Cells = {
            "node": "node",
            "GPU": "gpu",
            "process": "pid",
            "holds": lambda row: _gib(row["nbytes"]),
            "since": lambda row: local_time(row["since"]),
        }
        print_records("Memory that loads wait for, of processes that are no workers", rows, foreign)


_PLACE = {"address": "host", "fabric": "fabric", "type": "node_type", "block": "block"}
"""Field by heading. Only the operator is told addresses."""


def _text(name: str, node: NodeView) -> str:
    return str(node.get(name, ""))


def _refuse_lost_options(context: typer.Context) -> None:
    """Refuse options before a subcommand, which would have no effect."""
    for name in given_options(context):
        raise typer.BadParameter(f"put {option_name(name)} after {context.invoked_subcommand}")


@nodes_app.command("drain")
@with_option_groups
def drain(node: NodeName, access: Access, output: Output) -> None:
    """Move all work off a node as soon as other nodes have capacity (operator only)."""
    with access.open() as cluster:
        found = cluster.drain(node)
    cells: Cells = {
        "node": lambda _: node,
        "GPUs still reserved": "gpus_reserved",
        "groups still there": lambda each: ", ".join(each["groups"]),
    }
    output.table(cells, [found], found)


@nodes_app.command("undrain")
@with_option_groups
def undrain(node: NodeName, access: Access, output: Output) -> None:
    """Return a drained node to use (operator only)."""
    with access.open() as cluster:
        found = cluster.undrain(node)
    output.table({"node": lambda _: node, "GPUs reserved": _reserved}, [found], found)


@nodes_app.command("remove")
@with_option_groups
def remove(node: NodeName, access: Access, output: Output) -> None:
    """Forget a node that has left or does not come back, and has no work (operator only). On the
    head this revokes the node's certificates too."""
    from plexrl.cli.cluster.node import revoke_membership

    with access.open() as cluster:
        cluster.remove_node(node)
    revoked = 0
    if _is_on_head(access):
        # Only the head has the authority; a node without a certificate is not in its record.
        with suppress(NotFoundError):
            revoked = revoke_membership(access.data_dir, node)
    found = {"node": node, "certificates_revoked": revoked}
    cells: Cells = {
        "node": "node",
        "removed": lambda _: "yes",
        "certificates revoked": "certificates_revoked",
    }
    output.table(cells, [found], found)


def _is_on_head(access: Access) -> bool:
    """Whether the data directory is that of the cluster; with a URL it may be another's."""
    from plexrl.cluster.data_dir.endpoint import read_endpoint

    if access.url is None:
        return True
    endpoint = read_endpoint(data_dir_at(access.data_dir))
    return endpoint is not None and endpoint.serves(access.url)


@with_option_groups
def groups(access: Access, output: Output) -> None:
    """Node groups: which job holds each, time spent in switches (operator only)."""
    with access.open() as cluster:
        found = cluster.groups()
    cells: Cells = {
        "group": "group",
        "GPUs": lambda each: _gpu_ranges(each["gpus"]),
        "members": lambda each: ", ".join(each["members"]),
        "type": "node_type",
        "load": lambda each: f"{each['load']:.0%}",
        "closed": lambda each: _yes(each["is_closed"]),
        "held by": lambda each: each["holder"] or "nobody",
        "phase": "phase",
        "switches": "switches",
        "seconds in them": lambda each: f"{each['switch_seconds']:.2f}",
        "shared because": "sharing",
    }
    output.table(cells, found)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"


def _host_tier(node: NodeView) -> str:
    """Its size and, until that is done, how far its StateManager is in allocating it in advance."""
    size = _gib(node["host_memory_bytes"])
    ready, wanted = node.get("host_ready_bytes", 0), node.get("host_prefault_bytes", 0)
    return f"{size}, {ready / wanted:.0%} ready" if ready < wanted else size


def _reserved(node: NodeView) -> str:
    return f"{node['gpus_reserved']}/{node['gpus']}"


def _gpu_ranges(gpus: list[GpuView]) -> str:
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
