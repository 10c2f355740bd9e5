"""The options of `plexrl up`, grouped; the help lists them in this order."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from plexrl.cli.terminal.context import DATA_DIR, DataDir
from plexrl.cluster.config.network import JOIN_PORT, NODE_PORTS, SCHEDULER_PORT, ports_text
from plexrl.cluster.config.options import JOURNAL_VARIABLE
from plexrl.events.config import PASSWORD_VARIABLE, BrokerConfig
from plexrl.scheduler.rules.ordering import ORDERINGS
from plexrl.scheduler.rules.policies import POLICIES


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """Data directory, nodes and GPUs of a local cluster."""

    data_dir: DataDir = DATA_DIR
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with settings of all parts (`plexrl config reference`)."),
    ] = None
    nodes: Annotated[
        int | None,
        typer.Option(
            help="Nodes on this machine; default: 1, which has its GPUs. With --tls 0: only nodes "
            "that join."
        ),
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(help="NVIDIA GPUs to use; default: all of this machine. 0: none."),
    ] = None
    virtual_gpus: Annotated[
        int | None,
        typer.Option(
            help="Virtual GPUs of each node instead, whose workers compute on the CPU; default: 4 "
            "without GPUs."
        ),
    ] = None
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Memory of each GPU, as 80GiB or 80; default: its own, or 2GiB."),
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(help="Each node's host tier; default: half the memory with GPUs, or 2GiB."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """The scheduler's rules, its journal, and the stores of payloads and checkpoints."""

    policy: Annotated[str, typer.Option(help=f"Placement: {', '.join(POLICIES)}.")] = (
        "spread+backfill"
    )
    ordering: Annotated[
        str, typer.Option(help=f"Order within a group: {', '.join(ORDERINGS)}.")
    ] = "hrrs"
    journal: Annotated[
        str | None,
        typer.Option(
            help="A path, or postgresql://user@host/name; give a password only in PLEXRL_JOURNAL.",
            envvar=JOURNAL_VARIABLE,
        ),
    ] = None
    new_journal: Annotated[
        bool,
        typer.Option(
            "--new-journal",
            help="Begin an empty journal although the data directory has state of earlier jobs.",
        ),
    ] = False
    data_url: Annotated[
        str | None,
        typer.Option(help="Payloads, results, metrics: a folder or s3://bucket/prefix."),
    ] = None
    checkpoint_url: Annotated[
        str | None, typer.Option(help="Checkpoints: a folder or s3://bucket/prefix.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Node types and network blocks of virtual nodes."""

    node_types: Annotated[
        str, typer.Option(help="Types of the nodes, separated by commas: one for all, or one each.")
    ] = ""
    node_speeds: Annotated[
        str, typer.Option(help="Training speeds relative to each other, such as 1,0.3.")
    ] = ""
    blocks: Annotated[str, typer.Option(help="Network blocks of the nodes, in the same form.")] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """The address of the API."""

    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all. Without --tls, plain HTTP.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port of the API; 0: a free one.")] = 0
    api_docs: Annotated[
        bool,
        typer.Option("--api-docs", help="Serve the HTTP API's documentation at /docs, no key."),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFlags:
    """Several machines."""

    tls: Annotated[
        bool,
        typer.Option("--tls", help="Let other machines join, by mutual TLS; HTTPS for the API."),
    ] = False
    advertise: Annotated[
        str, typer.Option(help="Name or address by which other machines reach this one.")
    ] = ""
    public_url: Annotated[
        str, typer.Option(help="URL of the API for clients, as behind a proxy.")
    ] = ""
    join_port: Annotated[int, typer.Option(help="Port at which nodes join; 0: a free one.")] = (
        JOIN_PORT
    )
    scheduler_port: Annotated[
        int, typer.Option(help="The scheduler's port for nodes; 0: a free one.")
    ] = SCHEDULER_PORT
    node_ports: Annotated[
        str, typer.Option(metavar="A-B", help="Ports of this machine's own nodes.")
    ] = ports_text(NODE_PORTS)
    fabric: Annotated[
        str,
        typer.Option(
            help="`trusted`: nobody else is on the network between the nodes, so groups may span "
            "machines."
        ),
    ] = ""
    tls_cert: Annotated[
        str, typer.Option(help="PEM file of the API's own certificate, not of the cluster's CA.")
    ] = ""
    tls_key: Annotated[str, typer.Option(help="PEM file of its key.")] = ""
    tls_ca: Annotated[
        str, typer.Option(help="PEM file of its authority, if clients do not trust it already.")
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Durability:
    """Limits of the journal and the scheduler's lease."""

    journal_bytes_max: Annotated[int | None, typer.Option(help="Largest journal in bytes.")] = None
    archive_url: Annotated[
        str | None,
        typer.Option(help="Folder or URL of the history's archive; absent: in the data directory."),
    ] = None
    archive_days: Annotated[
        float | None, typer.Option(help="Days that the history is kept; 0: it is not archived.")
    ] = None
    archive_bytes_max: Annotated[
        int | None, typer.Option(help="Largest archive in bytes; the oldest goes first.")
    ] = None
    lease_s: Annotated[
        float | None,
        typer.Option(help="Seconds without renewal after which a standby scheduler takes over."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRay:
    """Running on the nodes of a Ray cluster."""

    ray: Annotated[
        str | None, typer.Option(help="Run on the nodes of this Ray cluster: host:port, or auto.")
    ] = None
    node_replace_s: Annotated[
        float,
        typer.Option(help="With --ray: seconds that jobs wait for the replacement of a lost node."),
    ] = 60.0
    rebuild_operations: Annotated[
        int,
        typer.Option(help="With --ray: operations kept to rebuild a model's lost state."),
    ] = 1024
    ray_node_dir: Annotated[
        str, typer.Option(help="With --ray and --tls: folder for data on each Ray machine.")
    ] = "~/.plexrl-ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """The routers."""

    routers: Annotated[int, typer.Option(help="Routers, each with a port of its own.")] = 1
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Endpoint for operations as OpenTelemetry spans.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Events on an MQTT broker."""

    mqtt: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Publish states of jobs, nodes and groups: mqtt[s]://[user@]host[:port][/prefix].",
        ),
    ] = None
    mqtt_password_file: Annotated[
        str, typer.Option(help=f"File with the password; or set {PASSWORD_VARIABLE}.")
    ] = ""
    mqtt_ca: Annotated[str, typer.Option(help="PEM file that signs the broker's certificate.")] = ""
    mqtt_certificate: Annotated[str, typer.Option(help="PEM file of the client certificate.")] = ""
    mqtt_key: Annotated[str, typer.Option(help="PEM file of its key.")] = ""

    def broker(self) -> BrokerConfig | None:
        """The broker; None if no URL was given. Raises `InvalidRequestError`."""
        if self.mqtt is None:
            return None
        return BrokerConfig(
            url=self.mqtt,
            password_file=self.mqtt_password_file,
            ca=self.mqtt_ca,
            certificate=self.mqtt_certificate,
            key=self.mqtt_key,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Limits per tenant, deployment, job and connection."""

    pending_operations_max: Annotated[
        int | None, typer.Option(help="Operations that wait in one deployment's queue.")
    ] = None
    tenant_operations_max: Annotated[
        int | None, typer.Option(help="Unfinished operations of one tenant.")
    ] = None
    deployment_payload_bytes_max: Annotated[
        int | None, typer.Option(help="Bytes of the unfinished operations of one deployment.")
    ] = None
    tenant_payload_bytes_max: Annotated[
        int | None, typer.Option(help="Bytes of the unfinished operations of one tenant.")
    ] = None
    tenant_live_jobs_max: Annotated[
        int, typer.Option(help="Jobs of one tenant that have not ended.")
    ] = 1000
    tenant_checkpoints_max: Annotated[
        int | None, typer.Option(help="Checkpoints of one tenant.")
    ] = None
    tenant_checkpoint_bytes_max: Annotated[
        int | None,
        typer.Option(help="Bytes of one tenant's checkpoints; default: half the disk."),
    ] = None
    metrics_row_bytes_max: Annotated[
        int | None, typer.Option(help="Bytes of a row of a job's metrics.")
    ] = None
    metrics_job_bytes_max: Annotated[
        int | None, typer.Option(help="Bytes of all metrics of a job.")
    ] = None
    connections_max: Annotated[int | None, typer.Option(help="Open connections of one router.")] = (
        None
    )
    address_connections_max: Annotated[
        int | None, typer.Option(help="Open connections of one client address to one router.")
    ] = None
    header_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds to receive a request's header.")
    ] = None
    body_timeout_s: Annotated[
        float | None,
        typer.Option(help="Seconds to receive a request's JSON, and of silence in a payload."),
    ] = None
    json_bytes_max: Annotated[int | None, typer.Option(help="Bytes of a request's JSON.")] = None
