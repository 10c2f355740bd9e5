"""`plexrl statemanager` and `plexrl statemanager-status`: the daemon of a node."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from plexrl.cli.terminal.context import Cells, Json, print_records, print_table, write_json
from plexrl.cli.terminal.sizes import byte_size, size_text
from plexrl.errors import InvalidRequestError, UnavailableError, from_wire

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="JSON file; options override its fields.")
]


def statemanager(
    node: Annotated[str | None, typer.Option(help="The node's name in the cluster.")] = None,
    listen: Annotated[str | None, typer.Option(help="Path of the Unix socket.")] = None,
    host_dir: Annotated[
        str | None, typer.Option(help="Directory of the host tier, on a memory file system.")
    ] = None,
    host_bytes: Annotated[str | None, typer.Option(help="Size of the host tier, as 64GiB.")] = None,
    nvme_dir: Annotated[str | None, typer.Option(help="Directory of the NVMe tier.")] = None,
    nvme_bytes: Annotated[str | None, typer.Option(help="Size of the NVMe tier, as 2TiB.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="/healthz and /metrics on 127.0.0.1; 0 takes a free port.")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Run a node's StateManager until SIGTERM, SIGHUP or Ctrl-C."""
    from plexrl.process.extras import check_extras
    from plexrl.process.memory.tuning import tune

    given: dict[str, Any] = {
        "node": node,
        "listen": listen,
        "host_dir": host_dir,
        "host_bytes": None if host_bytes is None else byte_size(host_bytes),
        "nvme_dir": nvme_dir,
        "nvme_bytes": None if nvme_bytes is None else byte_size(nvme_bytes),
        "metrics_port": metrics_port,
    }
    fields = _fields(config)
    fields.update((name, value) for name, value in given.items() if value is not None)
    required = ("node", "listen", "host_dir", "host_bytes", "nvme_dir", "nvme_bytes")
    missing = [f"--{name.replace('_', '-')}" for name in required if name not in fields]
    if missing:
        raise InvalidRequestError(f"give {', '.join(missing)}, or set them in --config")
    check_extras("plexrl statemanager", "worker")
    command = [sys.executable, "-m", "plexrl.statemanager", "--config-json", json.dumps(fields)]
    # These variables take effect at process start only; exec keeps the process id for systemd.
    os.execve(sys.executable, command, tune(os.environ))


def statemanager_status(
    config: ConfigFile = None,
    listen: Annotated[str | None, typer.Option(help="Path of the Unix socket.")] = None,
    ticket_key_file: Annotated[
        str | None, typer.Option(help="The StateManager's key; read with its user's rights.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what this node's StateManager stores and does."""
    fields = _fields(config)
    listen = listen or fields.get("listen")
    if ticket_key_file is None:
        ticket_key_file = fields.get("ticket_key_file")
        if ticket_key_file is None and "nvme_dir" in fields:
            ticket_key_file = str(Path(fields["nvme_dir"]) / "ticket.key")
    if listen is None or ticket_key_file is None:
        raise InvalidRequestError("give --listen and --ticket-key-file, or --config")
    found = _status(listen, ticket_key_file)
    if as_json:
        write_json(found)
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    tiers: Cells = {
        "tier": str,
        "used": lambda tier: size_text(found[f"{tier}_bytes"]),
        "bound": lambda tier: size_text(found[f"{tier}_bytes_max"]),
        "in use": lambda tier: f"{found[f'{tier}_bytes'] / found[f'{tier}_bytes_max']:.0%}",
        "resident": lambda tier: _resident(found) if tier == "host" else "",
    }
    print_records(f"StateManager of {found['node']}", tiers, ("host", "nvme"))
    versions: Cells = {
        "deployment": "deployment",
        "rank": "rank",
        "seq": "seq",
        "kind": "kind",
        "tier": "tier",
        "size": lambda version: size_text(version["nbytes"]),
    }
    rows = [
        {"deployment": name, **version}
        for name, entry in sorted(found["deployments"].items())
        for version in sorted(entry["versions"], key=lambda v: (v["kind"], v["seq"], v["rank"]))
    ]
    print_records("Versions", versions, rows)
    tenants = [
        (name or "(none)", size_text(held["host"]), size_text(held["nvme"]))
        for name, held in found["tenants"].items()
    ]
    print_table("Tenants", ("tenant", "in host", "on NVMe"), tenants)
    moves: Cells = {"kind": "kind", "owner": "who", "for": lambda move: f"{move['seconds']:.1f} s"}
    print_records(f"Moves ({found['moves_waiting']} queued)", moves, found["moves"])


def _resident(found: dict[str, Any]) -> str:
    """Memory of the host tier that was used or prefaulted, of what is to be prefaulted."""
    resident, wanted = found["host_resident_bytes"], found["host_prefault_bytes"]
    return size_text(resident) + (f" of {size_text(wanted)}" if resident < wanted else "")


def _fields(config: Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    try:
        found = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{config} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequestError(f"{config} does not contain a JSON object")
    return found


def _status(listen: str, ticket_key_file: str) -> dict[str, Any]:
    """The daemon's status, from a process with the dependencies of its protocol."""
    command = [sys.executable, "-m", "plexrl.statemanager.client.status", listen, ticket_key_file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise UnavailableError(f"the StateManager's status was not read: {done.stderr}") from error
    if "error" in found:
        raise from_wire(found["error"])
    return found
