"""NVIDIA's `cuda-checkpoint`, which suspends any process's CUDA state to host memory, as a baseline
of a context switch.

The utility comes with the driver or from https://github.com/NVIDIA/cuda-checkpoint; without it
nothing is compared.
"""

import shutil
import statistics
import subprocess
import sys
import time

REPEATS = 3
LIMIT_S = 60.0
HOLDER = """
import sys, torch
state = torch.full(({nbytes},), 7, dtype=torch.uint8, device="{device}")
for _ in sys.stdin:
    print(int(state.sum(dtype=torch.int64)), flush=True)
"""


def switch_s(nbytes: int, *, device: str = "cuda") -> float | None:
    """Seconds of a switch between two processes with `nbytes` on the device each: one is suspended,
    then the other resumed. Each is the median of some. None: the utility is not installed, or
    refuses this driver."""
    utility = shutil.which("cuda-checkpoint")
    if utility is None:
        return None
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(nbytes=nbytes, device=device)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _check(holder, nbytes)
        command = [utility, "--toggle", "--pid", str(holder.pid)]
        suspended, resumed = [], []
        for _ in range(REPEATS):
            suspended.append(_seconds(command))
            resumed.append(_seconds(command))
            _check(holder, nbytes)
    except subprocess.SubprocessError as error:
        sys.stderr.write(f"no comparison with cuda-checkpoint: {error}\n")
        return None
    finally:
        holder.kill()
        holder.communicate()
    return statistics.median(suspended) + statistics.median(resumed)


def _check(holder: subprocess.Popen[str], nbytes: int) -> None:
    """Raises `RuntimeError` unless the process has its whole state on the device."""
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    found = holder.stdout.readline()
    if found.strip() != str(7 * nbytes):
        raise RuntimeError(f"the suspended process has {found!r} instead of its state")


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started
