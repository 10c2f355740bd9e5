"""Units: a single waiting deployment, or all deployments of a gang, which get GPUs at once."""

import math
from typing import Final, NamedTuple

from plexrl.ids import DeploymentId, TenantId
from plexrl.model.memory.device_memory import DeviceMemory
from plexrl.scheduler.state.demand.trace import DemandTrace
from plexrl.scheduler.state.records import Deployment, Job

JOB_S = 3600.0
"""Expected length of a job without a declared length, and without earlier jobs of its name."""

_STEPS: Final = (4, 22)
"""Smallest and largest power of two of an expected length: 16 s and 48 days."""


class Size(NamedTuple):
    """The GPUs that a deployment requests."""

    node_type: str
    workers: int
    shares: bool
    """Whether others may be on the same group."""


Sizes = tuple[Size, ...]
"""The sizes of a unit's deployments, ascending."""


class UnitOwner(NamedTuple):
    """Tenant and priority class, which together determine the first criteria of the order."""

    tenant: TenantId
    priority: int


class EquivalenceClass(NamedTuple):
    """What interchangeable units have in common, in addition to their sizes: all fit, or none."""

    owner: UnitOwner
    expected_s: float
    """Expected length, rounded by `expected_step`."""
    lasts_s: float
    """Expected length: it decides whether a unit may pass a reservation."""
    demand: tuple[tuple[int, DemandTrace | None, DeviceMemory | None], ...]
    """(state bytes, trace, memory on a GPU) of each deployment, in the order of the sizes."""
    slo: float | None
    """How long the job may wait in a group decides which groups it may join."""


class Head(NamedTuple):
    """The oldest deployment of a unit, which decides the unit's position; and what a unit of a
    single deployment needs."""

    created_at: float
    serial: int
    name: DeploymentId
    duty: float
    """Added to the load of a group; 0 for a gang."""
    state_bytes: int
    """0 for a gang."""


class Member(NamedTuple):
    """One deployment of a unit."""

    created_at: float
    serial: int
    name: DeploymentId
    size: Size


class Unit(NamedTuple):
    """A unit and its position in the queue."""

    head: Head
    sizes: Sizes
    equivalence: EquivalenceClass
    members: tuple[Member, ...]


def expected_length(job: Job) -> float:
    """Length of a job in seconds: declared, else that of its tenant's earlier jobs of its name."""
    return job.expected_s or job.usual_s or JOB_S


def expected_step(expected_s: float) -> float:
    """The expected length rounded down to a power of two."""
    _, exponent = math.frexp(expected_s or JOB_S)
    return 2.0 ** min(max(exponent - 1, _STEPS[0]), _STEPS[1])


def size_of(deployment: Deployment) -> Size:
    """The GPUs that one deployment requests."""
    return Size(deployment.spec.node_type, deployment.spec.workers, deployment.spec.shares)
