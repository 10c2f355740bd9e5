"""Timers: what the core looks at again, and when.

A timer is a hint. The handler checks whether there is still something to do, so a timer that has
become pointless does no harm.
"""

from enum import StrEnum
from typing import NamedTuple

from plexrl.ids import DeploymentId, GroupId, JobId, NodeId, OperationId


class TimerKind(StrEnum):
    """What a timer names."""

    ADMISSION = "admission"
    """The admission pass that was interrupted: in snapshots of earlier versions only."""
    DEADLINE = "deadline"
    """An operation's deadline."""
    GROUP = "group"
    """A group's next step."""
    JOB = "job"
    """The silence of a job's controller."""
    LAUNCH = "launch"
    """A launch that waits for free disk space."""
    MIGRATION = "migration"
    """A copy of a WPG's state that is to be tried again."""
    NODE = "node"
    """The WPGs on a lost or draining node."""
    OVERDUE = "overdue"
    """What runs on a deployment's workers."""
    PLACEMENT = "placement"
    """The deployments that wait for GPUs."""
    PROFILE = "profile"
    """A deployment whose profile is awaited."""


class Subject(NamedTuple):
    """What is looked at again. Subjects that are due at the same time are ordered by their text."""

    kind: TimerKind
    name: str

    def __str__(self) -> str:
        """Its name in the journal's list of skipped steps."""
        return f"{self.kind.value}:{self.name}"


Timer = tuple[float, Subject]
"""(time in seconds, what is looked at then)."""

PLACEMENT = Subject(TimerKind.PLACEMENT, "")


def deadline(operation: OperationId) -> Subject:
    """The subject for an operation's deadline."""
    return Subject(TimerKind.DEADLINE, operation)


def group_step(group: GroupId) -> Subject:
    """The subject for a group's next step."""
    return Subject(TimerKind.GROUP, group)


def silence(job: JobId) -> Subject:
    """The subject for the silence of a job's controller."""
    return Subject(TimerKind.JOB, job)


def launch(deployment: DeploymentId) -> Subject:
    """The subject for a launch that waits for free disk space."""
    return Subject(TimerKind.LAUNCH, deployment)


def migration(deployment: DeploymentId) -> Subject:
    """The subject for a copy that is to be tried again."""
    return Subject(TimerKind.MIGRATION, deployment)


def node_check(node: NodeId) -> Subject:
    """The subject for the WPGs on a lost or draining node."""
    return Subject(TimerKind.NODE, node)


def overdue(deployment: DeploymentId) -> Subject:
    """The subject for what runs on a deployment's workers."""
    return Subject(TimerKind.OVERDUE, deployment)


def profile(deployment: DeploymentId) -> Subject:
    """The subject for a deployment whose profile is awaited."""
    return Subject(TimerKind.PROFILE, deployment)
