"""The NVIDIA GPUs of this machine.

They are counted in a process of their own, because initialising the CUDA driver cannot be undone
and its context would be inherited.
"""

import json
import subprocess
import sys
from typing import Any

import msgspec

from plexrl.errors import CapacityError
from plexrl.statemanager.device.cuda.bindings import uuid_text

TIMEOUT_S = 60.0
MIB = 1 << 20


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that processes of this user may use."""

    count: int
    memory_bytes: int
    """Memory of the smallest."""
    uuids: tuple[str, ...] = ()
    """UUID of each, as `GPU-…`; empty: they are virtual, and workers compute on the CPU."""
    kind: str = ""
    """Name of the smallest, such as `NVIDIA H200`; empty: they are virtual."""


NONE = Gpus(count=0, memory_bytes=0)


def find_gpus() -> Gpus:
    """The GPUs of this machine, by the CUDA driver or, without `cuda-bindings`, by `nvidia-smi`.
    None of them is used."""
    for command in (
        [sys.executable, "-m", "plexrl.cluster.node.gpus"],
        ["nvidia-smi", "--query-gpu=memory.total,uuid,name", "--format=csv,noheader,nounits"],
    ):
        found = _counted(command)
        if found.count:
            return found
    return NONE


def required_gpus(given: int | None) -> Gpus:
    """The machine's GPUs or, with a number that the operator gave, as many virtual ones.

    Raises:
        CapacityError: the machine has none, and no number was given.
    """
    found = find_gpus()
    if given is not None:
        return Gpus(count=given, memory_bytes=found.memory_bytes if given <= found.count else 0)
    if not found.count:
        raise CapacityError(
            "no NVIDIA GPU was found on this machine: install its driver and plexrl[cuda], or give "
            "the number of workers that share the CPU with --gpus"
        )
    return found


def _counted(command: list[str]) -> Gpus:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
        if command[0] == sys.executable:
            return msgspec.json.decode(done.stdout, type=Gpus)
        rows = [line.split(", ", 2) for line in done.stdout.splitlines()]
        sizes = [int(size) * MIB for size, _, _ in rows]
    except (OSError, subprocess.SubprocessError, ValueError, msgspec.MsgspecError):
        return NONE
    uuids = tuple(uuid.strip() for _, uuid, _ in rows)
    names = [name.strip() for _, _, name in rows]
    return Gpus(
        count=len(sizes),
        memory_bytes=min(sizes, default=0),
        uuids=uuids,
        kind=_smallest(sizes, names),
    )


def _smallest(sizes: list[int], names: list[str]) -> str:
    """The name of the GPU with the least memory."""
    return min(zip(sizes, names, strict=True), default=(0, ""))[1]


def _by_driver() -> dict[str, Any]:
    """Count with the CUDA driver; nothing if there is none."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return {"count": 0, "memory_bytes": 0}
    try:
        _check(driver.cuInit(0))
        count = _check(driver.cuDeviceGetCount())
        devices = [_check(driver.cuDeviceGet(index)) for index in range(count)]
        sizes = [int(_check(driver.cuDeviceTotalMem(device))) for device in devices]
        names = [_check(driver.cuDeviceGetName(256, device)) for device in devices]
        uuids = [uuid_text(_check(driver.cuDeviceGetUuid(device)).bytes) for device in devices]
    except (RuntimeError, OSError):
        return {"count": 0, "memory_bytes": 0}
    kind = _smallest(sizes, [name.split(b"\0")[0].decode() for name in names])
    return {
        "count": len(sizes),
        "memory_bytes": min(sizes, default=0),
        "uuids": uuids,
        "kind": kind,
    }


def _check(answer: tuple[Any, ...]) -> Any:
    code, *rest = answer
    if int(code) != 0:
        raise RuntimeError(f"CUDA driver: {code}")
    return rest[0] if rest else None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_by_driver()))
