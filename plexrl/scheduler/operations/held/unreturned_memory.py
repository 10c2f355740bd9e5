"""What holds the device memory that a load lacks: workers that kept some, and other processes.

A load measures the device's free memory before it is let in; the error of its refusal names what
holds the rest. A member of the group whose state is offloaded needs no more than its context. If
its process has kept much more, the process is restarted: its state is stored, so nothing is lost.
Until it is loaded again it is not restarted for this reason again. Processes that are no workers
are left alone: operators see them until the load succeeds.
"""

from typing import Final

import msgspec

from plexrl.errors import DeviceMemoryFullError, PlexRLError
from plexrl.ids import DeploymentId
from plexrl.model.memory.device_memory import CONTEXT_BYTES
from plexrl.scheduler.state.deployment.wpg.backoff import ForeignMemory
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, Group, State

KEPT_FACTOR: Final = 2
"""How much more than its estimate a process may keep: contexts differ between drivers and GPUs."""


class _Holder(msgspec.Struct, frozen=True):
    deployment: str
    rank: int
    lent_bytes: int
    process_bytes: int


class _Refusal(msgspec.Struct, frozen=True):
    """Details of `DeviceMemoryFullError`."""

    rank: int = -1
    """The rank that was refused; -1: unknown."""
    holders: tuple[_Holder, ...] = ()
    strangers: dict[int, int] | None = None
    """Bytes by process."""


def foreign_memory(deployment: Deployment, error: PlexRLError) -> tuple[ForeignMemory, ...]:
    """The processes that are no workers and hold much of the GPU where a run of the deployment
    ended with `error`. One that holds no more than a context may be a worker that starts."""
    refusal = _read(error)
    return tuple(
        [
            ForeignMemory(node=rank.node, gpu=rank.gpu, pid=pid, nbytes=nbytes)
            for rank in deployment.placement.ranks
            if rank.rank == refusal.rank
            for pid, nbytes in sorted((refusal.strangers or {}).items())
            if nbytes > KEPT_FACTOR * CONTEXT_BYTES
        ]
    )


def named_holders(deployment: Deployment, error: PlexRLError) -> tuple[DeploymentId, ...]:
    """The other deployments that the error's message names as holders of memory."""
    names = {DeploymentId(holder.deployment): None for holder in _read(error).holders}
    return tuple([name for name in names if name != deployment.deployment])


def reason_for(state: State, deployment: Deployment, *, sees_all: bool) -> str:
    """Why the deployment's work is delayed, for its tenant, or for an operator, who `sees_all`: a
    tenant reads no names of other tenants' deployments, nor of those that are forgotten."""
    reason = deployment.wpg.backoff.reason
    if sees_all:
        return reason
    tenant = state.job(deployment.job).tenant
    for name in deployment.wpg.backoff.named:
        other = state.deployments.get(name)
        if other is None or state.job(other.job).tenant != tenant:
            reason = reason.replace(repr(str(name)), "another tenant's deployment")
    return reason


def keepers(state: State, group: Group, error: PlexRLError) -> list[tuple[Deployment, str]]:
    """The members of the group that kept memory, if a load was refused for want of it, and why each
    is to be restarted."""
    holders = _read(error).holders
    found: list[tuple[Deployment, str]] = []
    for name in [*group.members, *group.fillers]:
        member = state.deployment(name)
        if (
            member.wpg.state is not WpgState.READY
            or member.wpg.residency is not Residency.OFFLOADED
        ):
            continue
        kept = max(
            [holder.process_bytes for holder in holders if holder.deployment == name], default=0
        )
        if kept > KEPT_FACTOR * _kept_bytes(member):
            reason = f"it is offloaded, but its process still holds {kept} bytes of device memory"
            found.append((member, reason))
    return found


def _kept_bytes(deployment: Deployment) -> int:
    memory = deployment.demand.memory
    return CONTEXT_BYTES if memory is None else max(CONTEXT_BYTES, memory.kept_bytes)


def _read(error: PlexRLError) -> _Refusal:
    """The details of a refusal; of another error, or where they cannot be read, none."""
    if error.code != DeviceMemoryFullError.code:
        return _Refusal()
    try:
        return msgspec.convert(error.details, _Refusal, str_keys=True)
    except msgspec.ValidationError:
        return _Refusal()
