"""The JSON objects in the messages, as `docs/events.md` describes them.

`since` is the time from which `state` holds; absent (null): it began before the present scheduler
process did, and nobody recorded when. All times are in seconds since the epoch.
"""

from urllib.parse import quote

import msgspec

SCHEMA = 1
"""Version of the objects; new fields leave it, other changes raise it."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all objects."""

    state: str
    since: float | None = None
    why: str = ""
    """Reason of the state, for people; empty: none beyond the state's meaning."""
    schema: int = SCHEMA


class SchedulerRecord(Record, frozen=True, kw_only=True):
    """The scheduler that leads: `online` or `offline`."""

    holder: str
    """Its name in the lease."""
    version: str
    """Version of PlexRL."""
    dropped: int = 0
    """Messages that the present process had to drop."""


class DeploymentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment of a job."""

    deployment: str
    kind: str
    state: str
    """State of its worker-process group."""
    residency: str
    group: str | None
    nodes: tuple[str, ...]


class JobRecord(Record, frozen=True, kw_only=True):
    """One job."""

    job: str
    tenant: str
    name: str
    attached: bool
    priority: int
    submitted_at: float
    ended_at: float | None
    deployments: tuple[DeploymentRecord, ...]


class NodeRecord(Record, frozen=True, kw_only=True):
    """One node: `ready`, `expected` or `lost`."""

    node: str
    draining: bool
    gpus: int
    gpu_memory_bytes: int
    host_memory_bytes: int
    nvme_bytes: int
    node_type: str
    block: str


class GpuRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a group."""

    node: str
    gpu: int


class GroupRecord(Record, frozen=True, kw_only=True):
    """One node group, in the state of its lock: `free`, `held` or `switching`."""

    group: str
    holder: str | None
    incoming: str | None
    """The next holder during a switch."""
    members: tuple[str, ...]
    gpus: tuple[GpuRecord, ...]
    shared: bool
    closed: bool
    token: int


class PrefetchHint(msgspec.Struct, frozen=True, kw_only=True):
    """A node will probably load a deployment's state soon."""

    deployment: str
    node: str
    seq: int
    """Version of the state."""
    next_use_s: float | None
    """Expected seconds until the load; null: unknown."""
    at: float
    schema: int = SCHEMA


def topic(*levels: str) -> str:
    """A topic below the prefix. In each level all characters are percent-encoded except letters,
    digits and `_.-~`, so that no name adds a level or is a wildcard."""
    return "/".join(quote(level, safe="") for level in levels)
