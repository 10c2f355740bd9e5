"""Where the states of deployments lie: on GPUs, in pinned host memory, or on NVMe alone.

Bytes are those of the whole state as it was declared. A state that is on GPUs may also be stored:
then it counts in both places, as it takes memory in both.
"""

from collections.abc import Iterable

from plexrl.scheduler.state.deployment.wpg.wpg import Wpg
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.records import Deployment, Job, State
from plexrl.wire.messages.overview_views import JobMemoryView, TierBytes

_ON_GPUS = (Residency.DEVICE, Residency.MOVING)


def tiers_of(deployment: Deployment) -> TierBytes:
    """The bytes of one deployment."""
    state_bytes, wpg = deployment.spec.state_bytes, deployment.wpg
    nvme = min(state_bytes, _nvme_bytes(wpg))
    return {
        "gpu": state_bytes if wpg.residency in _ON_GPUS else 0,
        "host": state_bytes - nvme if wpg.stored.nodes else 0,
        "nvme": nvme,
    }


def memory_of(state: State, job: Job) -> list[JobMemoryView]:
    """The bytes of each deployment of a job that has any."""
    found = [(state.deployments[name], name) for name in job.deployments]
    views: list[JobMemoryView] = [
        {"deployment": name, "bytes": tiers_of(deployment)} for deployment, name in found
    ]
    return [view for view in views if any(view["bytes"].values())]


def total(found: Iterable[TierBytes]) -> TierBytes:
    """Their sum."""
    sums: TierBytes = {"gpu": 0, "host": 0, "nvme": 0}
    for each in found:
        sums["gpu"] += each["gpu"]
        sums["host"] += each["host"]
        sums["nvme"] += each["nvme"]
    return sums


def _nvme_bytes(wpg: Wpg) -> int:
    stored = wpg.stored
    return sum(stored.nvme_bytes_by_node.get(node, 0) for node in stored.nodes)
