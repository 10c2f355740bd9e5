"""Workers that kept device memory over their offload are restarted, when a load lacks it.

A load measures the device's free memory before it is let in; the error of its refusal names what
holds the rest. A member of the group whose state is offloaded needs no more than its context. If
its process has kept much more, the process is restarted: its state is stored, so nothing is lost.
Until it is loaded again it is not restarted for this reason again.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from plexrl.errors import DeviceMemoryFullError, PlexRLError
from plexrl.model.memory.device_memory import CONTEXT_BYTES
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


def keepers(state: State, group: Group, error: PlexRLError) -> list[tuple[Deployment, str]]:
    """The members of the group that kept memory, if a load was refused for want of it, and why each
    is to be restarted."""
    if error.code != DeviceMemoryFullError.code:
        return []
    holders = _holders(error)
    found: list[tuple[Deployment, str]] = []
    for name in [*group.members, *group.fillers]:
        member = state.deployment(name)
        if member.state is not WpgState.READY or member.residency is not Residency.OFFLOADED:
            continue
        kept = max([each.process_bytes for each in holders if each.deployment == name], default=0)
        if kept > KEPT_FACTOR * _kept_bytes(member):
            reason = f"it is offloaded, but its process still holds {kept} bytes of device memory"
            found.append((member, reason))
    return found


def _kept_bytes(deployment: Deployment) -> int:
    memory = deployment.memory
    return CONTEXT_BYTES if memory is None else max(CONTEXT_BYTES, memory.kept_bytes)


def _holders(error: PlexRLError) -> Sequence[_Holder]:
    try:
        return msgspec.convert(error.details.get("holders", ()), tuple[_Holder, ...])
    except msgspec.ValidationError:
        return ()
