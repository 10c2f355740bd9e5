"""Runs the GPU tests and the GPU benchmark with time limits, and stores the results.

    python -m benchmarks.gpu.check FOLDER [PART…]

`FOLDER/gpu_check.json` is rewritten after each part, so that results remain if a part hangs or the
machine is taken away. With parts named, the results of the others stay as they are. Exit status: 0
all passed, 1 a part failed or timed out, 3 there is no GPU.
The module needs only the standard library, so that it can report missing packages.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.bars import bars_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "cuda-bindings", "numpy", "msgspec", "pytest")
TAIL = 12_000
"""Characters of a part's output that are kept."""

PROBE = """
from plexrl.statemanager.device.cuda.bindings import BoundDriver
driver = BoundDriver()
driver.enter(0)
print(driver.memory_info()[1])
"""
TORCH = """
import torch
print(torch.cuda.get_device_name(0), torch.version.cuda)
"""
PYTEST = [
    *("-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"),
    # Libraries of other versions may warn, and a test that hangs leaves time for the others.
    *("-W", "default", "--timeout", "45", "--continue-on-collection-errors"),
]
SWITCHES = ("--state-gib", "4", "--switches", "40")
PARTS: dict[str, tuple[int, list[str]]] = {
    "device": (90, [*PYTEST, "tests/statemanager/device"]),
    "workers": (70, [*PYTEST, "tests/gpu/test_gpu_workers.py", "tests/gpu/test_gpu_experts.py"]),
    "engines": (60, [*PYTEST, "tests/gpu/test_gpu_engines.py", "tests/gpu/test_gpu_vllm.py"]),
    "up": (60, [*PYTEST, "--timeout", "55", "tests/gpu/test_gpu_cluster.py"]),
    "switches": (80, [*PYTEST, "--timeout", "75", "tests/gpu/test_gpu_switches.py"]),
    "benchmark": (110, ["-m", "benchmarks.gpu.switch", *SWITCHES, "--json"]),
    "rl": (160, ["-m", "benchmarks.gpu.rl", "--json"]),
    "generation": (100, ["-m", "benchmarks.gpu.generation", "--json"]),
    "cluster": (130, ["-m", "benchmarks.gpu.cluster", "--json"]),
}
"""(seconds at most, arguments of Python), in the order in which they run."""
TOTAL_S = 530
"""All parts and probes together; with the installation of the wheels (60 s at most) under ten
minutes. A part that has no time left is timed out."""
NO_GPU = 3

Plain = dict[str, Any]


def run(words: list[str], seconds: float) -> Plain:
    """Run Python in a session of its own; all of that ends with the time limit."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    outcome = "timed out"
    try:
        output, _ = process.communicate(timeout=seconds)
        outcome = "failed" if process.returncode else "passed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return {
        "outcome": outcome,
        "exit_status": process.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "output": output,
    }


def versions() -> dict[str, str | None]:
    """Versions of installed packages; None if missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def part(name: str, left_s: float) -> Plain:
    """The result of one part, with its figures or counts."""
    seconds, words = PARTS[name]
    found = run(words, max(0.0, min(seconds, left_s)))
    if counts := re.findall(r"(\d+) (passed|failed|skipped|error)", found["output"]):
        found["counts"] = {what: int(count) for count, what in counts}
        if found["outcome"] == "passed" and not found["counts"].get("passed"):
            found["outcome"] = "skipped"
    figures: dict[str, float] = {}
    for line in found["output"].splitlines():
        if line.startswith('{"figures"'):
            figures |= json.loads(line)["figures"]
    module = next((word for word in words if word.startswith("benchmarks.")), "")
    if figures:
        found["figures"] = figures
        found["bars"] = {
            each.figure: f"{each.bar}: {each.verdict(figures.get(each.figure))}"
            for each in bars_of(f"{module.removeprefix('benchmarks.').replace('.', '/')}.py")
        }
    if "no GPU here" in found["output"]:
        found["outcome"] = "skipped"
    found["output"] = found["output"][-TAIL:]
    return found


def main() -> None:
    """Run all parts and write the file."""
    if len(sys.argv) < 2 or sys.argv[1] in PARTS:
        sys.exit("name the folder of the results first, then the parts")
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(PARTS)
    if unknown := sorted(set(names) - set(PARTS)):
        sys.exit(f"no part {', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "gpu_check.json"
    ends_at = time.monotonic() + TOTAL_S
    probe, torch = run(["-c", PROBE], 30), run(["-c", TORCH], 45)
    has_gpu = probe["outcome"] == "passed"
    body: Plain = {
        "gpu": has_gpu,
        "device": torch["output"].strip() if torch["outcome"] == "passed" else None,
        "probe": probe,
        "versions": versions(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "parts": {name: {"outcome": "not run yet"} for name in PARTS},
        "ok": False,
    }
    if file.exists():
        body["parts"] |= json.loads(file.read_text())["parts"]
    file.write_text(json.dumps(body, indent=1))
    for name in names:
        body["parts"][name] = found = part(name, ends_at - time.monotonic())
        body["ok"] = has_gpu and all(each["outcome"] == "passed" for each in body["parts"].values())
        file.write_text(json.dumps(body, indent=1))
        sys.stdout.write(f"{name}: {found['outcome']} in {found['seconds']} s\n")
        for figure, verdict in found.get("bars", {}).items():
            sys.stdout.write(f"  {figure} {found['figures'].get(figure)}: bar {verdict}\n")
        if found["outcome"] in ("failed", "timed out"):
            sys.stdout.write(found["output"] + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{'' if has_gpu else 'no GPU. '}Results: {file}\n")
    if not has_gpu:
        sys.exit(NO_GPU)
    sys.exit(0 if all(body["parts"][name]["outcome"] == "passed" for name in names) else 1)


if __name__ == "__main__":
    main()
