"""Questions about a job that node agents answer: its workers' logs and its checkpoints.

A router asks the scheduler, the scheduler asks every agent, and each of them sends the same message
on. Scheduler, router, SDK and CLI share the types of the answers.
"""

from typing import TypedDict

import msgspec

from plexrl.ids import JobId, NodeId
from plexrl.wire.messages.cluster_views import ErrorView


class ReadLog(msgspec.Struct, frozen=True, kw_only=True):
    """The last `lines` lines of the logs of a job's workers."""

    job: JobId
    deployment: str | None = None
    """Its id or its name within the job; None: all deployments. An agent gets an id."""
    lines: int = 100


class ListCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    """A job's checkpoints, including those being written."""

    job: JobId


class LogView(TypedDict):
    """The end of one worker's log."""

    deployment: str
    node: str
    rank: int
    text: str
    """Its last lines."""


class FileView(TypedDict):
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint's folder."""
    bytes: int


class CheckpointFiles(TypedDict):
    """The files of a complete checkpoint."""

    version: str
    """Names this state of the checkpoint: another one may take its name."""
    files: list[FileView]


class CheckpointView(TypedDict):
    """State of one checkpoint."""

    job: JobId
    name: str
    path: str
    """Where its files are, or will be: a path on the nodes, or a URL."""
    state: str
    """`waiting`, `writing`, `durable`, `failed` or `cancelled`."""
    seq: int
    """Version of the deployment's state that it holds."""
    step: int
    bytes_done: int
    """Bytes written so far."""
    bytes_total: int
    seconds: float
    """Duration of writing."""
    as_of: float
    """Time of this report, or of the complete checkpoint, in seconds since the epoch. Among several
    nodes' reports of one name, the newest is valid."""
    error: ErrorView | None
    """Why it failed; None: it did not."""


class SilentNodeView(TypedDict):
    """A node that has not answered a question."""

    node: NodeId
    reason: str


class Logs(TypedDict):
    """An agent's answer to `ReadLog`."""

    logs: list[LogView]


class JobLogs(Logs):
    """The logs of a job's workers."""

    failed: list[SilentNodeView]
    """The nodes that returned none, and why."""


class Checkpoints(TypedDict):
    """An agent's answer to `ListCheckpoints`."""

    checkpoints: list[CheckpointView]


class JobCheckpoints(Checkpoints):
    """The checkpoints of a job, by name."""

    failed: list[SilentNodeView]
    """The nodes that did not report theirs, and why."""
