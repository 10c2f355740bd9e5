"""The NVIDIA GPUs of this machine.

They are counted in a process of their own, because initialising the CUDA driver cannot be undone
and its context would be inherited.
"""

import logging
import re
import subprocess
import sys
from typing import Any, Final

import msgspec

from plexrl.errors import CapacityError
from plexrl.process.children.startup import visible_parts
from plexrl.statemanager.device.cuda.bindings import device_names

LOG = logging.getLogger(__name__)

TIMEOUT_S = 60.0
MIB = 1 << 20
PART_NAME: Final = re.compile(r" MIG \d+g\.")
"""In the name that the driver gives a part of a GPU, such as `NVIDIA H200 MIG 1g.18gb`."""


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that processes of this user may use."""

    count: int
    memory_bytes: int
    """Memory of the smallest."""
    uuids: tuple[str, ...] = ()
    """UUID of each, as `GPU-…` or `MIG-…`; empty: they are virtual, and workers compute on the CPU.
    """
    kind: str = ""
    """Name of the smallest, such as `NVIDIA H200`; empty: they are virtual."""

    def __str__(self) -> str:
        if self.uuids:
            return f"{self.count} x {self.kind}"
        return f"{self.count} virtual, whose workers compute on the CPU"


class _Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as the driver or `nvidia-smi` lists it."""

    memory_bytes: int
    uuid: str
    """Empty: it is a part of a GPU (MIG) or divided into parts, and CUDA cannot find it by a name.
    """
    name: str


VIRTUAL_GPUS: Final = 4
"""Virtual GPUs of a node, if the operator gives no number."""
NO_DRIVER: Final = (
    "install its driver and plexrl[cuda], or give the number of workers that share the CPU with "
    "--virtual-gpus"
)


def find_gpus() -> Gpus:
    """The GPUs of this machine, by the CUDA driver or, without `cuda-bindings`, by `nvidia-smi`.
    None of them is used.

    Raises:
        CapacityError: some are divided (MIG), and `CUDA_VISIBLE_DEVICES` does not name one part.
    """
    return _usable(_devices())


def chosen_gpus(gpus: int | None, virtual_gpus: int | None) -> Gpus:
    """The GPUs of a node on this machine.

    Args:
        gpus: the first so many of the machine; 0: none of them. Absent: all of them, unless
            `virtual_gpus` is given.
        virtual_gpus: so many virtual ones, which need none of the machine. Absent: `VIRTUAL_GPUS`
            if `gpus` is 0 or the machine has none.

    Raises:
        CapacityError: the machine has fewer than `gpus`; or as `find_gpus`.
    """
    if virtual_gpus is not None or gpus == 0:
        return Gpus(count=virtual_gpus or VIRTUAL_GPUS, memory_bytes=0)
    found = _devices()
    if gpus is not None and len(found) < gpus:
        raise CapacityError(
            f"this machine has {_counted(len(found))}, and --gpus asks for {gpus}: "
            + (f"ask for at most {len(found)}" if found else NO_DRIVER),
            gpus=len(found),
        )
    if not found:
        return Gpus(count=VIRTUAL_GPUS, memory_bytes=0)
    return _usable(found[:gpus])


def required_gpus(gpus: int | None, virtual_gpus: int | None) -> Gpus:
    """As `chosen_gpus`, for a machine that joins to serve its GPUs: none becomes virtual unasked.

    Raises:
        CapacityError: the machine has no GPU, and no virtual ones were asked for; or as
            `chosen_gpus`.
    """
    found = chosen_gpus(gpus, virtual_gpus)
    if not found.uuids and gpus is None and virtual_gpus is None:
        raise CapacityError(f"no NVIDIA GPU was found on this machine: {NO_DRIVER}")
    return found


def first_gpus(count: int) -> Gpus:
    """The first `count` GPUs of this machine, or as many virtual ones if it has none: what Ray
    counts are real GPUs unless the operator told Ray otherwise.

    Args:
        count: GPUs of the Ray node.

    Raises:
        CapacityError: the machine has GPUs, but fewer; or as `find_gpus`.
    """
    found = _devices()
    if not found:
        return Gpus(count=count, memory_bytes=0)
    if len(found) < count:
        raise CapacityError(
            f"Ray counts {count} GPUs on this machine, and its driver shows {len(found)}: start "
            f"the Ray node with --num-gpus {len(found)}, or let its CUDA_VISIBLE_DEVICES name all",
            workers=count,
            gpus=len(found),
        )
    return _usable(found[:count])


def _usable(found: list[_Device]) -> Gpus:
    if not all(each.uuid for each in found):
        raise CapacityError(
            "GPUs of this machine are divided into parts (MIG), of which CUDA gives a process one: "
            "start the node with CUDA_VISIBLE_DEVICES=MIG-… (`nvidia-smi -L` lists them; plexrl "
            "needs cuda-bindings to use one), with one node, --data-dir and --ports for each part; "
            "or end the division with `nvidia-smi -mig 0`"
        )
    return Gpus(
        count=len(found),
        memory_bytes=_least(found),
        uuids=tuple([each.uuid for each in found]),
        kind=min([(each.memory_bytes, each.name) for each in found], default=(0, ""))[1],
    )


def _counted(count: int) -> str:
    return {0: "no NVIDIA GPU", 1: "1 GPU"}.get(count, f"{count} GPUs")


def _least(found: list[_Device]) -> int:
    return min([each.memory_bytes for each in found], default=0)


def _devices() -> list[_Device]:
    query = "--query-gpu=memory.total,mig.mode.current,uuid,name"
    return _by_process([sys.executable, "-m", "plexrl.cluster.node.gpus"]) or _by_process(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    )


def _by_process(command: list[str]) -> list[_Device]:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
        if command[0] == sys.executable:
            return msgspec.json.decode(done.stdout, type=list[_Device])
        return [_from_row(line) for line in done.stdout.splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, subprocess.SubprocessError, ValueError, msgspec.MsgspecError) as error:
        LOG.warning("%s does not list the GPUs: %s", " ".join(command), error)
        return []


def _from_row(line: str) -> _Device:
    """A GPU as `nvidia-smi` prints it, which lists no parts."""
    size, mode, uuid, name = line.split(", ", 3)
    shown = "" if mode == "Enabled" else uuid.strip()
    return _Device(memory_bytes=int(size) * MIB, uuid=shown, name=name.strip())


def _by_driver() -> list[_Device]:
    """List with the CUDA driver; nothing if there is none."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return []
    try:
        _check(driver.cuInit(0))
        count = _check(driver.cuDeviceGetCount())
        devices = [_check(driver.cuDeviceGet(index)) for index in range(count)]
        sizes = [int(_check(driver.cuDeviceTotalMem(device))) for device in devices]
        names = [_check(driver.cuDeviceGetName(256, device)) for device in devices]
        uuids = [_check(driver.cuDeviceGetUuid(device)).bytes for device in devices]
    except (RuntimeError, OSError):
        return []
    parts = visible_parts()
    shown = device_names(uuids) if len(parts) <= count else ("",) * count
    texts = [name.split(b"\0")[0].decode() for name in names]
    return [
        _Device(
            memory_bytes=size,
            uuid=uuid if parts or not PART_NAME.search(name) else "",
            name=name,
        )
        for size, uuid, name in zip(sizes, shown, texts, strict=True)
    ]


def _check(answer: tuple[Any, ...]) -> Any:
    code, *rest = answer
    if int(code) != 0:
        raise RuntimeError(f"CUDA driver: {code}")
    return rest[0] if rest else None


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_by_driver()))
