"""`plexrl up`: runs a cluster."""

import os
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from plexrl.cli.cluster.node import join_command
from plexrl.cli.cluster.up import options
from plexrl.cli.cluster.up.settings import UpOptions, choose_options
from plexrl.cli.terminal.context import Json, print_line, write_text
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.cluster.config.options import JOURNAL_VARIABLE, check_argument
from plexrl.errors import JournalMissingError
from plexrl.events.config import PASSWORD_VARIABLE

if TYPE_CHECKING:
    from plexrl.cluster.data_dir.endpoint import Endpoint


@with_option_groups
def up(
    context: typer.Context,
    local: options.LocalCluster,
    scheduling: options.Scheduling,
    topology: options.Topology,
    api: options.Api,
    network: options.NetworkFlags,
    durability: options.Durability,
    on_ray: options.OnRay,
    routers: options.Routers,
    events: options.Events,
    limits: options.LimitOptions,
    as_json: Json = False,
) -> None:
    """Run a cluster until Ctrl-C: of local processes, of machines that join, or on Ray's nodes."""
    from plexrl.cluster.supervisor import run_cluster

    # Removed, so that child processes do not inherit them.
    os.environ.pop(JOURNAL_VARIABLE, None)
    mqtt_password = os.environ.pop(PASSWORD_VARIABLE, "")
    source = context.get_parameter_source("journal")
    journal = scheduling.journal
    if journal is not None and source is not None and source.name == "COMMANDLINE":
        check_argument(journal)

    given = UpOptions(
        local=local,
        scheduling=scheduling,
        topology=topology,
        api=api,
        network=network,
        durability=durability,
        on_ray=on_ray,
        routers=routers,
        events=events,
        limits=limits,
    )
    cluster, ray = choose_options(context, given, mqtt_password)

    def ready(endpoint: "Endpoint") -> None:
        print_endpoint(endpoint, as_json=as_json, has_docs=cluster.api_docs)

    try:
        run_cluster(cluster, ready, ray=ray)
    except JournalMissingError as error:
        if as_json or not sys.stdin.isatty():
            raise
        print_line(f"{error.message}.")
        if not typer.confirm("Begin a new journal?"):
            raise
        run_cluster(replace(cluster, new_journal=True), ready, ray=ray)


def print_endpoint(endpoint: "Endpoint", *, as_json: bool, has_docs: bool) -> None:
    """Say that the cluster is up, and how clients reach it: with its key only at a terminal."""
    if as_json:
        write_text(endpoint.to_json() + "\n")
        return
    docs = f"  API documentation: {endpoint.url.partition(',')[0]}/docs\n"
    gpus = f"  GPUs of each node: {endpoint.gpus}\n" if endpoint.gpus else ""
    ca = f"  export PLEXRL_CA_FILE={endpoint.ca}\n" if endpoint.ca else ""
    # The output of a service is kept in the system's log, which others may read.
    is_private = sys.stdout.isatty()
    file = f"$(cat {shlex.quote(str(endpoint.key_file))})"
    key, tinker_key = endpoint.api_key, f"tml-{endpoint.api_key}"
    if not is_private:
        key, tinker_key = f'"{file}"', f'"tml-{file}"'
    url = endpoint.public_url or endpoint.url
    write_text(
        f"PlexRL is up. Ctrl-C ends it.\n\n"
        f"  export PLEXRL_URL={url}\n"
        f"{ca}"
        f"  export PLEXRL_API_KEY={key}   # the operator's\n"
        f"  export TINKER_BASE_URL={url.partition(',')[0]}   # for the Tinker SDK\n"
        f"  export TINKER_API_KEY={tinker_key}\n\n"
        f"  dashboard:         {url.partition(',')[0]}/dashboard   (it asks for the key)\n"
        f"{docs if has_docs else ''}"
        f"  logs and state:    {endpoint.data_dir}\n"
        f"{gpus}"
    )
    if endpoint.join_address and not is_private:
        write_text("\n`plexrl node token` prints the command that makes another machine a node.\n")
    elif endpoint.join_address:
        command, hours = join_command(endpoint.data_dir, endpoint.join_address)
        write_text(
            f"\nTo make another machine a node, within {hours:g} h (`plexrl node token` prints "
            f"more):\n\n  {command}\n"
        )
