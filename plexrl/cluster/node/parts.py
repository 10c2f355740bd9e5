"""Configurations and start order of the processes of a cluster."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plexrl.cluster.config.options import GIB, ClusterOptions, PartSettings
from plexrl.cluster.node.gpus import Gpus
from plexrl.cluster.node.host_memory import (
    HOST_BYTES_MIN,
    HOST_BYTES_USUAL,
    default_host_bytes,
    file_system_bytes,
)
from plexrl.errors import InvalidRequestError
from plexrl.process.children.part import Part
from plexrl.process.folders.folders import SHARED_MEMORY, Folders
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.process.memory.usable import ROOT
from plexrl.statemanager.protocol.network import remote_address
from plexrl.wire.links.address import UnixAddress, host_port
from plexrl.wire.links.credentials import (
    ROLLOUT,
    SCHEDULER,
    Identity,
    Role,
    TlsFiles,
    router_identity,
)

if TYPE_CHECKING:
    from plexrl.cluster.join.head import ClusterHead

LOG = logging.getLogger(__name__)

MIB = 1 << 20
OptionT = TypeVar("OptionT")

GPU_MEMORY_BYTES = 2 * GIB
"""Memory of a virtual GPU, if the operator gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Name and resources of a node."""

    node: str
    gpus: int
    node_type: str = ""
    speed: float = 0.0
    block: str = ""
    cores: tuple[int, ...] = ()
    """Cores for the workers of the virtual GPUs; empty: workers are not bound."""
    gpu_uuids: tuple[str, ...] = ()
    """UUID of each GPU; empty: workers compute on the CPU."""
    gpu_kind: str = ""
    """Name of the GPUs; empty: they are virtual."""

    @classmethod
    def local(cls, options: ClusterOptions, index: int, gpus: Gpus) -> "NodeConfig":
        """The node number `index` of this machine, which serves these GPUs."""
        return cls(
            node=f"node{index}",
            gpus=gpus.count,
            node_type=_of_node(options.node_types, index, ""),
            speed=_of_node(options.node_speeds, index, 0.0),
            block=_of_node(options.blocks, index, ""),
            cores=tuple(_cores(options, index)),
            gpu_uuids=gpus.uuids,
            gpu_kind=gpus.kind,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLinks:
    """How a node that is part of a cluster of several machines and the other machines reach each
    other."""

    scheduler: tuple[str, ...]
    """Addresses of the scheduler and its standbys."""
    tls: TlsFiles
    host: str
    """Address at which other machines reach the node."""
    ports: tuple[int, int]
    """First and last port: the first is the StateManager's, the others are the agent's."""
    fabric: str


BOUNDS = (
    *("archive_days", "archive_bytes_max", "lease_s"),
    *("pending_operations_max", "tenant_operations_max"),
    *("deployment_payload_bytes_max", "tenant_payload_bytes_max", "tenant_live_jobs_max"),
)
"""Settings of the scheduler that have a default there."""
ROUTER_BOUNDS = (
    *("connections_max", "address_connections_max", "json_bytes_max"),
    *("header_timeout_s", "body_timeout_s", "metrics_row_bytes_max", "metrics_job_bytes_max"),
    *("tenant_checkpoints_max", "tenant_checkpoint_bytes_max"),
)
"""Settings of a router that have a default there."""


def scheduler_part(
    options: ClusterOptions,
    folders: Folders,
    key_digest: str,
    settings: Mapping[str, Any] | None = None,
    head: "ClusterHead | None" = None,
) -> Part:
    """The scheduler; `settings` override the options. With a `head`, other machines reach it."""
    listen, tls = [scheduler_address(folders)], None
    if head is not None:
        listen.append(head.scheduler_listen)
        tls = asdict(head.files(SCHEDULER))
    return Part(
        "scheduler",
        "plexrl.scheduler",
        {
            "listen": listen,
            "tls": tls,
            "journal": _journal(options, folders),
            "journal_bytes_max": options.journal_bytes_max,
            "archive_url": options.archive_url or str(folders.data / "history"),
            "policy": options.policy,
            "ordering": options.ordering,
            "operator_key_digest": key_digest,
            **_given(options, BOUNDS),
            "state_dir": "" if options.new_journal else str(folders.data),
            "events": None if options.events is None else asdict(options.events),
            **options.settings.scheduler,
            **(settings or {}),
        },
        (folders.run,),
    )


def router_parts(
    options: ClusterOptions,
    folders: Folders,
    ports: Sequence[int],
    head: "ClusterHead | None" = None,
) -> list[Part]:
    """The routers, one for each port. With a `head` they serve HTTPS and reach other machines."""
    return [
        Part(
            "router" if index == 0 else f"router{index}",
            "plexrl.router",
            {
                "router": f"router{index}",
                "scheduler": [scheduler_address(folders)],
                "rollout": str(rollout_address(folders)),
                "tls": None if head is None else asdict(head.files(router_identity(index))),
                "https": None if head is None else head.https(index),
                "host": options.host,
                "port": port,
                "data_dir": str(folders.data),
                "data_url": options.data_url or "",
                "checkpoint_url": options.checkpoint_url or "",
                "api_docs": options.api_docs,
                "parts_file": str(folders.parts_file),
                "otlp_endpoint": options.otlp_endpoint if index == 0 else None,
                **_given(options, ROUTER_BOUNDS),
                **options.settings.router,
            },
        )
        for index, port in enumerate(ports)
    ]


def rollout_part(
    options: ClusterOptions,
    folders: Folders,
    ports: Sequence[int],
    head: "ClusterHead | None" = None,
) -> Part:
    """The rollout service, which reaches the cluster by the routers at `ports`."""
    given = options.settings.rollout
    return Part(
        "rollout",
        "plexrl.rollout",
        {
            **given,
            "listen": [str(rollout_address(folders)), *given.get("listen", ())],
            "routers": (options.url(ports) if head is None else head.own_urls).split(","),
            "ca": "" if head is None else head.api_ca,
            "tls": None if head is None else asdict(head.files(ROLLOUT)),
            "data_dir": str(folders.data),
        },
        (folders.run,),
    )


def runs_part(
    options: ClusterOptions,
    folders: Folders,
    ports: Sequence[int],
    head: "ClusterHead | None" = None,
) -> list[Part]:
    """The service of controllers, if the operator has allowed any."""
    runs_max = options.settings.router.get("runs_max", 0)
    if not runs_max:
        return []
    urls = options.url(ports) if head is None else head.own_urls
    settings = {
        "data_dir": str(folders.data),
        "routers": urls.split(","),
        "ca": "" if head is None else head.api_ca,
        "at_once": runs_max,
    }
    return [Part("runs", "plexrl.runs", settings)]


def options_of_nodes(options: ClusterOptions) -> ClusterOptions:
    """The options that `node_parts` reads, without the others: the journal's URL may have a
    password, and so may those of brokers and collectors."""
    given = options.settings
    return ClusterOptions(
        data_dir=options.data_dir,
        gpu_memory_bytes=options.gpu_memory_bytes,
        host_memory_bytes=options.host_memory_bytes,
        nvme_bytes=options.nvme_bytes,
        checkpoint_url=options.checkpoint_url,
        part_stuck_s=options.part_stuck_s,
        settings=PartSettings(statemanager=given.statemanager, agent=given.agent),
    )


def node_parts(
    options: ClusterOptions, folders: Folders, config: NodeConfig, links: NodeLinks | None = None
) -> tuple[Part, Part]:
    """A node's StateManager and its agent, which needs the StateManager. With `links`, other
    machines reach the node."""
    node = config.node
    run = folders.run / node
    make_private_folder(run)
    socket = str(run / "sm.sock")
    # One key for all nodes, because workers pull from other nodes' StateManagers.
    ticket_key = str(folders.data / "ticket.key")
    given = options.settings.statemanager
    statemanager = Part(
        f"statemanager-{node}",
        "plexrl.statemanager",
        {
            "node": node,
            "listen": socket,
            "host_dir": str(folders.shared_memory / node),
            "host_bytes": options.host_memory_bytes or HOST_BYTES_USUAL,
            "nvme_dir": str(folders.data / "nodes" / node / "nvme"),
            "nvme_bytes": options.nvme_bytes,
            "checkpoint_url": options.checkpoint_url or str(folders.data / "checkpoints"),
            "ticket_key_file": ticket_key,
            "device": "cuda" if config.gpu_uuids else "cpu",
            **_statemanager_links(links),
            **given,
        },
        (folders.run, run, folders.shared_memory, folders.shared_memory / node),
    )
    agent = Part(
        f"agent-{node}",
        "plexrl.worker",
        {
            "node": node,
            "scheduler": [scheduler_address(folders)],
            "statemanager": socket,
            "ticket_key_file": ticket_key,
            "gpus": config.gpus,
            "gpu_memory_bytes": options.gpu_memory_bytes or GPU_MEMORY_BYTES,
            "host_memory_bytes": options.host_memory_bytes or HOST_BYTES_USUAL,
            "nvme_bytes": options.nvme_bytes,
            "node_type": config.node_type,
            "node_speed": config.speed,
            "block": config.block,
            "run_dir": str(run),
            "rendezvous_dir": str(folders.run),
            "data_dir": str(folders.data),
            "checkpoint_url": options.checkpoint_url or "",
            "cores": list(config.cores),
            "gpu_uuids": list(config.gpu_uuids),
            "gpu_kind": config.gpu_kind,
            "part_stuck_s": options.part_stuck_s,
            **_agent_links(node, links, serves_nixl=bool(given.get("serve_nixl"))),
            **options.settings.agent,
        },
        (folders.run, run),
    )
    return statemanager, agent


def head_node_links(
    options: ClusterOptions, folders: Folders, head: "ClusterHead", index: int
) -> NodeLinks:
    """The links of the head's own node number `index`, which has a share of the ports."""
    assert options.network is not None
    first, last = options.network.node_ports
    share = (last + 1 - first) // options.nodes
    return NodeLinks(
        scheduler=(scheduler_address(folders),),
        tls=head.files(Identity(Role.NODE, f"node{index}")),
        host=head.advertised,
        ports=(first + index * share, first + (index + 1) * share - 1),
        fabric=options.network.fabric,
    )


def _statemanager_links(links: NodeLinks | None) -> dict[str, Any]:
    if links is None:
        return {}
    return {
        "serve_tcp": host_port(links.host, links.ports[0]),
        "tls": asdict(links.tls),
        "fabric": links.fabric,
    }


def _agent_links(node: str, links: NodeLinks | None, *, serves_nixl: bool) -> dict[str, Any]:
    if links is None:
        return {}
    first, last = links.ports
    return {
        "scheduler": list(links.scheduler),
        "statemanager_address": remote_address(
            node, links.host, first, fabric=links.fabric, serves_nixl=serves_nixl
        ),
        "tls": asdict(links.tls),
        "host": links.host,
        "ports": [first + 1, last],
        "fabric": links.fabric,
    }


def _given(options: ClusterOptions, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def with_memory(options: ClusterOptions, gpus: Gpus, root: Path = ROOT) -> ClusterOptions:
    """The options with the memory of each GPU, and the size of each node's host tier, which fits
    the shared-memory file system.

    Raises:
        InvalidRequestError: the given size does not fit, or the file system is too small for any.
    """
    folder = root / SHARED_MEMORY.relative_to("/")
    size = file_system_bytes(folder)
    wanted = options.host_memory_bytes or default_host_bytes(gpus.uuids, root)
    memory = options.gpu_memory_bytes or gpus.memory_bytes or None
    options = replace(options, gpu_memory_bytes=memory, host_memory_bytes=wanted)
    if size is None:
        return options
    larger = f"`mount -o remount,size=2g {folder}`, or `docker run --shm-size=2g`"
    if size < HOST_BYTES_MIN:
        raise InvalidRequestError(
            f"{folder} has {size / MIB:.1f} MiB, and PlexRL keeps the state of models there: make "
            f"it {HOST_BYTES_MIN / MIB:.0f} MiB or larger ({larger})",
            size_bytes=size,
        )
    if wanted > size:
        raise InvalidRequestError(
            f"a host tier of {wanted / GIB:.2f} GiB does not fit into {folder}, which has "
            f"{size / GIB:.2f} GiB: choose less with --host-memory, or make {folder} larger "
            f"({larger})",
            host_memory_bytes=wanted,
            size_bytes=size,
        )
    if options.nodes * wanted > size:
        LOG.warning(
            "the host tiers of %d nodes may take %.2f GiB of %s, which has %.2f GiB: once it is "
            "full, state goes to disk, and work may wait for space",
            *(options.nodes, options.nodes * wanted / GIB, folder, size / GIB),
        )
    elif wanted < HOST_BYTES_USUAL and wanted == size:
        LOG.warning(
            "the host tier is all of %s, %.2f GiB: state that does not fit goes to disk (%s)",
            *(folder, size / GIB, larger),
        )
    return options


def scheduler_address(folders: Folders) -> str:
    """The address at which the scheduler listens for processes of this machine."""
    return str(UnixAddress(str(folders.run / "scheduler.sock")))


def rollout_address(folders: Folders) -> UnixAddress:
    """The address at which the rollout service listens for processes of this machine."""
    return UnixAddress(str(folders.run / "rollout.sock"))


def _journal(options: ClusterOptions, folders: Folders) -> str:
    """A database URL as it is; a path made absolute, because parts may have other working
    directories."""
    if options.journal is None:
        return str(folders.data / "journal.sqlite")
    if "://" in options.journal:
        return options.journal
    return str(Path(options.journal).expanduser().resolve())


def _of_node(values: tuple[OptionT, ...], node: int, default: OptionT) -> OptionT:
    """The node's own entry of `values`, or the single entry for all nodes."""
    return values[node % len(values)] if values else default


def _cores(options: ClusterOptions, node: int) -> list[int]:
    """A virtual node's share of the machine's cores; empty if workers are not bound."""
    if not options.pin_workers:
        return []
    cores = sorted(os.sched_getaffinity(0))
    first, last = (at * len(cores) // options.nodes for at in (node, node + 1))
    return cores[first : max(last, first + 1)]
