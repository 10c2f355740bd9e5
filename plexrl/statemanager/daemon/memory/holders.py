"""The holders of a device's memory when a load finds too little of it free. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plexrl.errors import DeviceMemoryFullError

SHOWN_MAX = 8
"""Holders that a message names; the details have all."""


class DeviceHolder(NamedTuple):
    """A registered rank on the device."""

    deployment: str
    rank: int
    pid: int
    """Id of its process; 0: unknown."""
    lent_bytes: int
    """Memory lent to its arena; 0: it is offloaded."""


class DeviceNeed(NamedTuple):
    """The device memory that a rank needs."""

    who: str
    rank: int
    device: int
    state_bytes: int
    """Its arena, and shared frozen weights that are not on the device."""
    working_bytes: int
    """Bytes that its framework will allocate besides; 0: not measured yet."""

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.state_bytes + self.working_bytes


def held_error(
    need: DeviceNeed,
    free_bytes: int,
    residents: Sequence[DeviceHolder],
    process_bytes: Mapping[int, int] | None,
    shared_bytes: int,
) -> DeviceMemoryFullError:
    """The refusal of a load, which names all that hold memory of the device, largest first.

    `free_bytes` is measured. `process_bytes`: memory of each process on the device, as the driver's
    tools report it, without the daemon's own; None: unknown. `shared_bytes`: frozen weights in use.
    """
    measured_bytes = process_bytes or {}
    found: list[tuple[int, str]] = []
    holders: list[dict[str, object]] = []
    for resident in residents:
        measured = measured_bytes.get(resident.pid, 0)
        if not resident.lent_bytes and not measured:
            continue
        holders.append(
            {
                "deployment": resident.deployment,
                "rank": resident.rank,
                "lent_bytes": resident.lent_bytes,
                "process_bytes": measured,
            }
        )
        who = f"rank {resident.rank} of {resident.deployment!r}"
        if resident.lent_bytes:
            found.append(
                (resident.lent_bytes, f"{who} has not offloaded {resident.lent_bytes} bytes")
            )
        else:
            text = (
                f"{who} has offloaded, but its process {resident.pid} still holds {measured} bytes"
            )
            found.append((measured, text))
    known = {resident.pid for resident in residents}
    strangers = {pid: nbytes for pid, nbytes in measured_bytes.items() if pid not in known}
    found += [
        (nbytes, f"process {pid}, which is no worker here, holds {nbytes} bytes")
        for pid, nbytes in strangers.items()
    ]
    if shared_bytes:
        found.append((shared_bytes, f"frozen weights in use have {shared_bytes} bytes"))
    texts = [text for _, text in sorted(found, key=lambda item: (-item[0], item[1]))]
    if process_bytes is None:
        texts.append("what processes hold besides is unknown, because nvidia-smi does not tell")
    reasons = "; ".join(texts[:SHOWN_MAX]) or "nothing else holds any"
    return DeviceMemoryFullError(
        f"{need.who} needs {need.nbytes} bytes of device {need.device} ({need.state_bytes} of "
        f"state, {need.working_bytes} to work), and {free_bytes} are free: {reasons}: offload "
        "another job, or end what holds the memory",
        needed_bytes=need.nbytes,
        free_bytes=free_bytes,
        device=need.device,
        rank=need.rank,
        holders=holders,
        strangers={str(pid): nbytes for pid, nbytes in strangers.items()},
    )
