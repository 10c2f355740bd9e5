"""Downloads the wheels that a machine with a GPU and without internet lacks for its checks.

    python -m benchmarks.gpu.kit [--python 3.12] [--out out/gpu-kit]

The machine has torch, transformers (with tokenizers, safetensors and numpy) and cuda-bindings; what
else the tests and benchmarks for GPUs import is packed. `scripts/gpu_check.sh` installs it.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
THERE = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "cuda-bindings"}
"""What the machine has. Another version beside it might not fit the rest of what it has."""
EXTRAS = ("server", "worker", "cuda")
NEEDED = ("einops", "hjson", "msgpack", "ninja", "py-cpuinfo", "tqdm")
"""What the training backends need beside torch, which their own requirements would fetch."""
TESTING = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
BYTES_MAX = 60 << 20
"""Of the wheels and of the files that git tracks, together."""


def project() -> dict[str, Any]:
    """The table of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def extra_of(name: str) -> list[str]:
    """The requirements of an extra."""
    found: list[str] = project()["optional-dependencies"][name]
    return found


def requirements() -> list[str]:
    """What plexrl needs on such a machine, but for what is there."""
    extras = project()["optional-dependencies"]
    found = [*project()["dependencies"], *(each for extra in EXTRAS for each in extras[extra])]
    found += [each for each in extras["dev"] if name_of(each) in TESTING]
    return sorted({each for each in found if name_of(each) not in THERE})


def name_of(requirement: str) -> str:
    """The package that a requirement, or a wheel's file name, is of."""
    found = re.match(r"[A-Za-z0-9_.]+(?:-[A-Za-z_.][A-Za-z0-9_.]*)*", requirement)
    assert found is not None, requirement
    return found[0].lower().replace("_", "-")


def tracked_bytes() -> int:
    """Of the tree, as it travels to the machine."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> None:
    """Fill the folder and print its size."""
    parser = argparse.ArgumentParser(description="Pack the wheels for scripts/gpu_check.sh.")
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-kit", help="folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("*.whl"):
        old.unlink()
    command = [*(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:")]
    command += ["--python-version", options.python, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    command += ["--dest", str(options.out)]
    subprocess.run([*command, *requirements()], check=True)
    subprocess.run([*command, "--no-deps", *NEEDED, *extra_of("megatron")], check=True)
    # DeepSpeed is published as source. Its wheel is built with this machine's torch, and is pure
    # Python.
    build = [*(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps")]
    build += ["--no-build-isolation", "--wheel-dir", str(options.out)]
    subprocess.run([*build, *extra_of("deepspeed")], check=True)
    for wheel in options.out.glob("*.whl"):
        if name_of(wheel.name) in THERE:
            wheel.unlink()
    (options.out / "python").write_text(f"{options.python}\n")
    wheels = list(options.out.glob("*.whl"))
    kit_bytes, tree_bytes = sum(wheel.stat().st_size for wheel in wheels), tracked_bytes()
    sys.stdout.write(
        f"{len(wheels)} wheels for Python {options.python} in {options.out}: "
        f"{kit_bytes / 2**20:.1f} MiB, with the tree {(kit_bytes + tree_bytes) / 2**20:.1f} MiB\n"
    )
    if kit_bytes + tree_bytes > BYTES_MAX:
        sys.exit(f"more than {BYTES_MAX >> 20} MiB: drop a requirement")


if __name__ == "__main__":
    main()
