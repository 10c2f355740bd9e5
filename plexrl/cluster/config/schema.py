"""Sections and settings of the configuration files, from the dataclasses of the parts.

A section is a table of the TOML file; its settings are the fields of a dataclass, except those that
the launcher derives, such as sockets and folders of the parts.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from plexrl.cluster.config.network import NetworkOptions
from plexrl.cluster.config.node_options import NODE_DIR, NodeOptions
from plexrl.cluster.config.options import ClusterOptions
from plexrl.cluster.config.ray_options import RayOptions
from plexrl.events.config import BrokerConfig
from plexrl.rollout.service.config import RolloutConfig
from plexrl.router.server.config import RouterConfig
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.statemanager.config import StateManagerConfig
from plexrl.worker.interface.config import AgentConfig

DEFAULTED = ("data_dir", "journal", "listen")
"""Settings without a default in their dataclass, to which the launcher gives one."""


@dataclass(frozen=True, slots=True)
class ConfigSection:
    """One table of a configuration file."""

    name: str
    kind: type[Any]
    """Dataclass with the settings and their checks."""
    what: str
    """Subject of the table, for the reference."""
    derived: frozenset[str] = frozenset()
    """Fields that the launcher sets."""
    stand_ins: Mapping[str, Any] = field(default_factory=dict)
    """Values of required derived fields, for checks."""

    def settings(self) -> dict[str, "Field[Any]"]:
        """The settings of the table, by name."""
        return {each.name: each for each in fields(self.kind) if each.name not in self.derived}

    def hints(self) -> dict[str, Any]:
        """The type of each setting."""
        return get_type_hints(self.kind)

    def required(self) -> list[str]:
        """The settings that the table must have."""
        return [
            name
            for name, each in self.settings().items()
            if each.default is MISSING and each.default_factory is MISSING and name not in DEFAULTED
        ]

    def defaults(self) -> dict[str, Any]:
        """The default of each setting that has one."""
        found = {}
        for name, each in self.settings().items():
            if each.default is not MISSING:
                found[name] = each.default
            elif each.default_factory is not MISSING:
                found[name] = each.default_factory()
            if name in MOVED.get(self.name, ()):
                chosen = _CLUSTER_DEFAULTS[name]
                found[name] = found.get(name) if chosen is None else chosen
        return found


_UNIX = ("unix:/run/plexrl/scheduler.sock",)
_SCHEDULER = ConfigSection(
    "scheduler",
    SchedulerConfig,
    "Placement, order, limits and journal. The journal records the settings that decide, so a "
    "changed one takes effect at the next start.",
    frozenset({"listen", "operator_key_digest", "state_dir", "tls", "holder", "events"}),
    {"listen": _UNIX, "journal": "journal.sqlite", "operator_key_digest": ""},
)
_ROUTER = ConfigSection(
    "router",
    RouterConfig,
    "The HTTP API: limits of requests, connections and stored data.",
    frozenset(
        {
            *("router", "scheduler", "host", "port", "data_dir", "data_url", "checkpoint_url"),
            *("parts_file", "tls", "https", "rollout"),
        }
    ),
    {"router": "router0", "scheduler": _UNIX, "host": "127.0.0.1", "port": 0, "data_dir": "/"},
)
_ROLLOUT = ConfigSection(
    "rollout",
    RolloutConfig,
    "The service that coordinates asynchronous rollouts. It starts with the first of them.",
    frozenset({"routers", "data_dir", "operator_key_file", "ca", "tls"}),
    {
        "listen": ("unix:/run/plexrl/rollout.sock",),
        "routers": ("http://localhost",),
        "data_dir": "/",
    },
)
_STATEMANAGER = ConfigSection(
    "statemanager",
    StateManagerConfig,
    "The StateManager of each node of this machine.",
    frozenset(
        {
            *("node", "listen", "host_dir", "host_bytes", "nvme_dir", "nvme_bytes", "fault_points"),
            *("checkpoint_url", "ticket_key_file", "serve_tcp", "tls", "fabric"),
        }
    ),
    {
        "node": "node0",
        "listen": "/sm.sock",
        "host_dir": "/",
        "nvme_dir": "/",
        "host_bytes": 1,
        "nvme_bytes": 1,
        "fabric": "trusted",
        "serve_tcp": "127.0.0.1:0",
    },
)
_AGENT = ConfigSection(
    "agent",
    AgentConfig,
    "The agent of each node of this machine, which starts the workers.",
    frozenset({each.name for each in fields(AgentConfig)} - {"threads"}),
    {
        "node": "node0",
        "scheduler": _UNIX,
        "statemanager": "/sm.sock",
        "gpus": 1,
        "ticket_key_file": "/",
        "gpu_memory_bytes": 1,
        "host_memory_bytes": 1,
        "run_dir": "/",
        "rendezvous_dir": "/",
        "data_dir": "/",
    },
)
MOVED = {
    "scheduler": frozenset(
        {
            *("policy", "ordering", "journal", "journal_bytes_max", "lease_s"),
            *("archive_url", "archive_days", "archive_bytes_max"),
            *("pending_operations_max", "tenant_operations_max", "tenant_live_jobs_max"),
            *("deployment_payload_bytes_max", "tenant_payload_bytes_max"),
        }
    ),
    "router": frozenset(
        {
            *("connections_max", "address_connections_max", "json_bytes_max", "api_docs"),
            *("header_timeout_s", "body_timeout_s", "otlp_endpoint"),
            *("metrics_row_bytes_max", "metrics_job_bytes_max"),
            *("tenant_checkpoints_max", "tenant_checkpoint_bytes_max"),
        }
    ),
}
"""Fields of `ClusterOptions` that the file has in the table of their part."""
_CLUSTER_DEFAULTS = {each.name: each.default for each in fields(ClusterOptions)}
CLUSTER_FILE = (
    ConfigSection(
        "cluster",
        ClusterOptions,
        "Data directory, address of the API, and the nodes of this machine.",
        frozenset({"network", "settings", "events", "new_journal"}.union(*MOVED.values())),
        {"data_dir": Path("~/.plexrl")},
    ),
    ConfigSection(
        "network",
        NetworkOptions,
        "Other machines may join (`--tls`) if this table is there, even if it is empty.",
    ),
    _SCHEDULER,
    _ROUTER,
    _ROLLOUT,
    _STATEMANAGER,
    _AGENT,
    ConfigSection(
        "ray",
        RayOptions,
        "The nodes are those of a Ray cluster (`--ray`) if this table is there.",
        stand_ins={"address": "auto"},
    ),
    ConfigSection(
        "events",
        BrokerConfig,
        "An MQTT broker gets the states of jobs, nodes and groups (`--mqtt`) if this table is "
        "there. The password is in a file of its own, or in `PLEXRL_MQTT_PASSWORD`.",
        frozenset({"password"}),
        {"url": "mqtt://127.0.0.1"},
    ),
)
"""The file of `plexrl up --config`."""
NODE_FILE = (
    ConfigSection(
        "node",
        NodeOptions,
        "The node's name, resources and address.",
        frozenset({"settings"}),
        {"data_dir": NODE_DIR},
    ),
    _STATEMANAGER,
    _AGENT,
)
"""The file of `plexrl node join --config`."""


def field_docs(kind: type[Any]) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for each, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[each.target.id] = " ".join(str(after.value.value).split())
    return found
