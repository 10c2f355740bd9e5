"""A thread that copies layers never touches memory that is gone. Each case runs in a process of its
own, because a failure is a segmentation fault: a fork of one that has loaded torch."""

import faulthandler
import multiprocessing

import pytest

IMPORTS = """
import gc, threading
from dataclasses import replace
from pathlib import Path
import numpy as np
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import tiny_qwen2
from plexrl.statemanager.device.backend import DeviceSegment
from plexrl.statemanager.device.cpu.device import CpuDevice
from plexrl.statemanager.device.cuda.device import CudaDevices
from plexrl.worker.forward.backend import ForwardBackend
from plexrl.worker.state.device import CPU
from tests.statemanager.emulated_cuda import EmulatedCuda
from tests.statemanager.emulated_gpu import EmulatedGpu
"""

CASE = """
def lend(devices, arena):
    found = devices.allocate(arena.nbytes, device=0, uid=0)
    sizes = zip(found.descriptors(), found.segment_bytes, strict=True)
    arena.attach([DeviceSegment(fd=fd, nbytes=n) for fd, n in sizes], keep_contents=True)

model = tiny_qwen2("0123456789abcdefghi", hidden=32, layers=3)
spec = DeploymentSpec(
    model=model, kind="forward", backend="torch", workers=1, layers_on_device=1
)
if kind == "gpu":
    driver = EmulatedCuda("memory-lifetime", device_bytes=16 << 20)
    driver.enter(0)
    devices, device = CudaDevices(driver), EmulatedGpu(driver)
else:
    devices, device = CpuDevice(), CPU
backend = ForwardBackend(spec, 0, 1, Path("/nowhere"), device)
backend.lay_out()
lend(devices, backend.arena)
backend.materialise()
stream = backend._memory.stream
# The thread is busy, so the copy of a layer begins when `late` is set: after the memory is gone,
# unless its owner waits for the copy.
late = threading.Event()
stream._thread.submit(late.wait)
stream._fetch(0)
copy = stream._copies[0]
assert copy is not None
threading.Timer(0.2, late.set).start()
"""

ENDS = {
    "dropped": "del backend, stream; gc.collect()",
    "detached": "backend.arena.detach(); assert copy.done()",
    "closed": "backend.arena.close(); assert copy.done()",
    "host memory detached": "backend.host_arena.detach(); assert copy.done()",
}


def run_case(kind: str, end: str) -> None:
    """Run the case on this kind of device in this process, and wait for the copy."""
    faulthandler.enable()
    exec(f"{IMPORTS}{CASE}{end}; copy.result(60)", {"kind": kind})


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_copy_that_begins_late_finds_its_memory(kind: str, end: str) -> None:
    process = multiprocessing.get_context("forkserver").Process(
        target=run_case, args=(kind, ENDS[end])
    )
    process.start()
    process.join()
    assert process.exitcode == 0
