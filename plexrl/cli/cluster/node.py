"""`plexrl node`: tokens with which machines join, and the node of this machine."""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plexrl.cli.cluster.up.settings import is_given
from plexrl.cli.terminal.context import (
    DATA_DIR,
    Cells,
    DataDir,
    Json,
    ShowKey,
    check_shown,
    local_time,
    print_line,
    print_records,
    write_json,
    write_text,
)
from plexrl.cli.terminal.help import CommandGroup
from plexrl.cli.terminal.option_groups import given_options, option_name, with_option_groups
from plexrl.cli.terminal.secret_options import chosen_secret, secret_file_option, secret_option
from plexrl.cli.terminal.sizes import memory_size
from plexrl.cluster.config.network import NODE_PORTS, parse_ports, ports_text
from plexrl.cluster.data_dir.folder import data_dir_at
from plexrl.errors import InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    from plexrl.cluster.config.node_options import NodeOptions
    from plexrl.cluster.join.authority import Authority
    from plexrl.cluster.join.ledger import Ledger
    from plexrl.cluster.join.tokens import JoinToken
    from plexrl.cluster.node.supervisor import RunningNode

node_app = typer.Typer(cls=CommandGroup, help="Machines that join a cluster.", no_args_is_help=True)
NodeDir = Annotated[Path, typer.Option("--data-dir", help="Data directory of the node.")]
TOKEN_VARIABLE = "PLEXRL_JOIN_TOKEN"
"""Environment variable with the token."""
NODE_DIR = Path("~/.plexrl-node")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """The cluster to join, and what is kept of it."""

    head: Annotated[
        str | None,
        typer.Argument(metavar="[HEAD]", help="tls://HOST:PORT, as `plexrl up` prints it."),
    ] = None
    token: Annotated[str | None, secret_option(TOKEN_VARIABLE)] = None
    token_file: Annotated[
        Path | None, secret_file_option("what `plexrl node token` made; once", TOKEN_VARIABLE)
    ] = None
    data_dir: NodeDir = NODE_DIR
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with all settings (`plexrl config reference`)."),
    ] = None
    name: Annotated[str, typer.Option(help="The node's name; default: the host name.")] = ""
    systemd: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Join and write a systemd unit instead of running."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of the node."""

    gpus: Annotated[
        int | None,
        typer.Option(help="NVIDIA GPUs to serve; default: all of the machine. 0: none."),
    ] = None
    virtual_gpus: Annotated[
        int | None,
        typer.Option(help="Virtual GPUs instead, whose workers compute on the CPU."),
    ] = None
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of each GPU, as 80GiB or 80; default: the machine's.")
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(help="Size of the host tier; default: half of the memory with GPUs, or 2GiB."),
    ] = None
    nvme: Annotated[str, typer.Option(help="Size of the NVMe tier.")] = "64GiB"
    node_type: Annotated[str, typer.Option(help="Type of the node, such as h200.")] = ""
    node_speed: Annotated[
        float, typer.Option(help="Training speed relative to other nodes; 0: by its GPUs and type.")
    ] = 0.0
    block: Annotated[str, typer.Option(help="Location, such as row1/rack3.")] = ""
    pin_workers: Annotated[
        bool, typer.Option("--pin-workers", help="Bind workers to cores of their own.")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNetwork:
    """How other machines reach the node."""

    host: Annotated[
        str, typer.Option(help="Address of this machine; default: that of its way to the head.")
    ] = ""
    ports: Annotated[
        str, typer.Option(metavar="A-B", help="Ports of its workers and StateManager.")
    ] = ports_text(NODE_PORTS)
    fabric: Annotated[
        str,
        typer.Option(help="`trusted`: nobody else is on the network; groups may span machines."),
    ] = ""


# On the head


@node_app.command("token")
def token(
    ttl: Annotated[str, typer.Option(help="How long it is valid, such as 30m, 1h or 2d.")] = "1h",
    uses: Annotated[int, typer.Option(help="Number of machines that may join with it.")] = 1,
    revoke: Annotated[
        str | None, typer.Option(help="Revoke the token with this id instead.")
    ] = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
    show_key: ShowKey = False,
) -> None:
    """Make a token with which a machine joins (on the head)."""
    from plexrl.cluster.join.tokens import create_token, revoke_token, token_id

    ledger, authority = _head_record(data_dir)
    if revoke is not None:
        revoked = token_id(revoke_token(ledger, revoke))
        if as_json:
            write_json({"id": revoked, "revoked": True})
        else:
            print_line(
                f"The token {revoked} is revoked. Nodes that joined with it stay; `plexrl node "
                "revoke` ends them."
            )
        return
    check_shown(show_key=show_key)
    made, entry = create_token(ledger, authority.fingerprint, ttl_s=_seconds(ttl), uses=uses)
    address = _join_address(data_dir)
    command = _join_command(address or "tls://HEAD:PORT", made)
    if as_json:
        write_json(
            {
                "token": str(made),
                "id": token_id(entry),
                "expires_at": entry.expires_at,
                "uses": uses,
                "join_address": address,
                "command": command,
            }
        )
    else:
        write_text(command + "\n")


@node_app.command("tokens")
def tokens(data_dir: DataDir = DATA_DIR, as_json: Json = False) -> None:
    """The tokens and the nodes that joined with them (on the head). Secrets are not stored."""
    from plexrl.cluster.join.tokens import token_id

    ledger, _ = _head_record(data_dir)
    now = time.time()
    found = [
        {
            "id": token_id(each),
            "state": each.refusal(now) or "valid",
            "created_at": each.created_at,
            "expires_at": each.expires_at,
            "uses": each.uses,
            "nodes": [node for node, _ in each.admitted],
        }
        for each in ledger.read().tokens
    ]
    if as_json:
        write_json(found)
        return
    cells: Cells = {
        "token": "id",
        "state": "state",
        "created": lambda each: local_time(each["created_at"]),
        "expires": lambda each: local_time(each["expires_at"]),
        "used": lambda each: f"{len(each['nodes'])}/{each['uses']}",
        "by": lambda each: ", ".join(each["nodes"]),
    }
    print_records("", cells, found)


@node_app.command("revoke")
def revoke(
    node: Annotated[str, typer.Argument(help="The node's name.")],
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """End a node's membership at once, as after the theft of its key (on the head)."""
    count = revoke_membership(data_dir, node)
    if as_json:
        write_json({"node": node, "certificates": count})
    else:
        print_line(
            f"{node} is no member any more; {count} of its certificates are revoked. Its links end "
            "within seconds, and its work moves when its lease has run out."
        )


def revoke_membership(data_dir: Path, node: str) -> int:
    """End a node's membership on the head of this data directory; returns the number of revoked
    certificates. Raises `NotFoundError`."""
    from plexrl.cluster.join.ledger import revoke as revoke_node

    ledger, authority = _head_record(data_dir)
    return revoke_node(ledger, authority, node)


def join_command(data_dir: str, address: str) -> tuple[str, float]:
    """(command that makes a machine a node, with a new token; hours for which it works)."""
    from plexrl.cluster.join.tokens import TTL_S, create_token

    ledger, authority = _head_record(Path(data_dir))
    made, _ = create_token(ledger, authority.fingerprint)
    return _join_command(address, made), TTL_S / 3600


def _join_command(address: str, token: "JoinToken") -> str:
    """For a shell, whose assignments are in no process's arguments."""
    return f"{TOKEN_VARIABLE}={token} plexrl node join {address}"


def _head_record(data_dir: Path) -> "tuple[Ledger, Authority]":
    """The head's record of tokens and members, and its authority."""
    from plexrl.cluster.join.authority import CERTIFICATE, Authority
    from plexrl.cluster.join.head import AUTHORITY_FOLDER
    from plexrl.cluster.join.ledger import Ledger

    folder = data_dir_at(data_dir) / AUTHORITY_FOLDER
    if not (folder / CERTIFICATE).exists():
        raise NotFoundError(
            f"{folder.parent} is not the data directory of a head: start it with `plexrl up --tls`,"
            " or name its data directory with --data-dir"
        )
    return Ledger(folder), Authority.open(folder)


def _join_address(data_dir: Path) -> str:
    """Where nodes join; empty if the head does not run."""
    from plexrl.cluster.data_dir.endpoint import read_endpoint

    endpoint = read_endpoint(data_dir_at(data_dir))
    return "" if endpoint is None else endpoint.join_address


def _seconds(text: str) -> float:
    number, unit = text[:-1], text[-1:]
    if unit in _UNITS and number.replace(".", "", 1).isdigit():
        return float(number) * _UNITS[unit]
    raise InvalidRequestError(f"--ttl {text!r} is no duration: write 30m, 1h or 2d")


# On the node


@node_app.command("join")
@with_option_groups
def join(
    context: typer.Context,
    joining: Joining,
    resources: Resources,
    links: NodeNetwork,
    as_json: Json = False,
) -> None:
    """Make this machine a node, until Ctrl-C. After the first time neither HEAD nor a token is
    needed."""
    from plexrl.process.extras import check_extras

    # Before the head sees the token, which works once.
    check_extras("plexrl node join", "worker")
    from plexrl.cluster.join.tokens import parse_token
    from plexrl.cluster.node.supervisor import Entry, join_once, run_node
    from plexrl.cluster.node.systemd import unit_text
    from plexrl.wire.links.address import TlsAddress, parse_address

    # Removed, so that child processes do not inherit it.
    os.environ.pop(TOKEN_VARIABLE, None)
    options = _node_options(context, joining, resources, links)
    head = None if joining.head is None else parse_address(joining.head)
    if head is not None and not isinstance(head, TlsAddress):
        raise InvalidRequestError(f"{joining.head!r}: write the head as tls://HOST:PORT")
    token = chosen_secret("token", joining.token_file, joining.token)
    entry = Entry(head=head, token=None if token is None else parse_token(token))
    if joining.systemd is not None:
        kept = join_once(options, entry)
        arguments = [] if joining.config is None else ["--config", str(joining.config.resolve())]
        for name, value in given_options(context).items():
            if name not in ("head", "token_file", "config", "systemd", "as_json"):
                arguments += [option_name(name), str(value)]
        joining.systemd.write_text(unit_text(options.data_dir, arguments))
        if as_json:
            write_json({"node": kept.node, "unit": str(joining.systemd)})
            return
        print_line(
            f"{kept.node} has joined. {joining.systemd} starts it: run `systemctl daemon-reload`, "
            f"then `systemctl enable --now {joining.systemd.stem}`."
        )
        return

    def ready(running: "RunningNode") -> None:
        if as_json:
            write_json(asdict(running))
        else:
            print_line(
                f"Node {running.node} serves {running.gpus} GPUs to {running.head}, at "
                f"{running.host}. Ctrl-C ends it; its logs and state are in {running.data_dir}."
            )

    run_node(options, entry, ready)


@node_app.command("leave")
def leave(
    data_dir: NodeDir = NODE_DIR,
    timeout: Annotated[
        str, typer.Option(help="Give up if work is still left after this time, such as 10m.")
    ] = "1d",
    force: Annotated[
        bool, typer.Option("--force", help="Leave at once; work on the node is interrupted.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Move all work off this machine, end its node, and leave the cluster."""
    from plexrl.cluster.node.leave import leave_cluster

    def progress(text: str) -> None:
        if not as_json:
            print_line(text)

    node = leave_cluster(
        data_dir_at(data_dir), progress, timeout_s=_seconds(timeout), is_forced=force
    )
    if as_json:
        write_json({"node": node, "left": True})
    else:
        print_line(f"{node} has left the cluster.")


def _node_options(
    context: typer.Context, joining: Joining, resources: Resources, links: NodeNetwork
) -> "NodeOptions":
    """The options of the file, overridden by those of the command line."""
    from plexrl.cluster.config.file import NodeFile, read_node_file
    from plexrl.cluster.config.node_options import NodeOptions

    file = NodeFile() if joining.config is None else read_node_file(joining.config)
    values: dict[str, object] = {
        "data_dir": joining.data_dir,
        "name": joining.name,
        "gpus": resources.gpus,
        "virtual_gpus": resources.virtual_gpus,
        "gpu_memory_bytes": _size(resources.gpu_memory),
        "host_memory_bytes": _size(resources.host_memory),
        "nvme_bytes": memory_size(resources.nvme),
        "node_type": resources.node_type,
        "node_speed": resources.node_speed,
        "block": resources.block,
        "pin_workers": resources.pin_workers,
        "host": links.host,
        "ports": parse_ports("--ports", links.ports),
        "fabric": links.fabric,
    }
    names = {"gpu_memory_bytes": "gpu_memory", "host_memory_bytes": "host_memory"}
    names["nvme_bytes"] = "nvme"
    chosen = {
        name: value
        for name, value in values.items()
        if name not in file.options or is_given(context, names.get(name, name))
    }
    found = {**file.options, **chosen}
    found["data_dir"] = data_dir_at(found["data_dir"])
    return NodeOptions(**found, settings=file.settings)


def _size(text: str | None) -> int | None:
    return None if text is None else memory_size(text)
