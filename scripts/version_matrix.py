"""Tries PlexRL with the oldest and newest versions that it supports, in environments of their own.

    python -m scripts.version_matrix [--folder DIR] [NAME ...]

Without names all environments are made and tried, one after another. What this machine lacks, such
as a Python, is reported as missing and fails the run. `core` environments run the tests of
`make test-core`, `models` those of models, training and rollouts, `import` environments load every
module of the worker: their builds of torch compute on GPUs only.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
"""The one version whose build for CPUs is on package indexes."""
MODEL_TESTS = (
    *("tests/model", "tests/worker/models", "tests/worker/forward", "tests/worker/state"),
    *("tests/worker/rollout/engine", "tests/worker/training/fsdp"),
)
IMPORT = """
import importlib, pkgutil, plexrl.worker
OPTIONAL = ("vllm", "deepspeed", "megatron")
names = [each.name for each in pkgutil.walk_packages(plexrl.worker.__path__, "plexrl.worker.")]
for name in names:
    if not any(part.startswith(OPTIONAL) for part in name.split(".")) and "__main__" not in name:
        importlib.import_module(name)
print(f"{len(names)} modules")
"""


@dataclass(frozen=True)
class Environment:
    """Versions that are tried together."""

    name: str
    python: str
    packages: tuple[str, ...]
    """Installed beside PlexRL, torch first and alone."""
    extras: str
    check: str
    """`core`, `models` or `import`."""


ENVIRONMENTS = (
    Environment("core-3.11", "3.11", (), "server,simulator,test", "core"),
    Environment("core-3.12", "3.12", (), "server,simulator,test", "core"),
    Environment("core-3.13", "3.13", (), "server,simulator,test", "core"),
    Environment(
        "transformers-oldest", "3.11", (TORCH, "transformers==5.10.4"), "all,test", "models"
    ),
    Environment("transformers-newest", "3.11", (TORCH, "transformers<6"), "all,test", "models"),
    Environment("torch-2.11", "3.11", ("torch==2.11.0",), "worker", "import"),
    Environment("torch-2.12", "3.11", ("torch==2.12.1",), "worker", "import"),
)


def main() -> int:
    """Returns the exit status: 0 if everything that was asked for passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "matrix")
    parser.add_argument("names", nargs="*", metavar="NAME", help="environments; default: all")
    options = parser.parse_args()
    unknown = set(options.names) - {each.name for each in ENVIRONMENTS}
    if unknown:
        parser.error(f"no environment {', '.join(sorted(unknown))}")
    chosen = [each for each in ENVIRONMENTS if not options.names or each.name in options.names]
    failed = 0
    for environment in chosen:
        began = time.monotonic()
        outcome = try_environment(environment, options.folder / environment.name)
        failed += outcome != "passed"
        versions = f"Python {environment.python} {' '.join(environment.packages)}"
        minutes = (time.monotonic() - began) / 60
        row = f"{environment.name:20} {outcome:10} {minutes:5.1f} min  {versions}"
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
    return min(failed, 1)


def try_environment(environment: Environment, folder: Path) -> str:
    """Make and try it: `passed`, `failed` (its log says why) or `missing`."""
    python = shutil.which(f"python{environment.python}")
    if python is None:
        return "missing"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("wb") as log:
        for command in _commands(environment, python, folder / "venv"):
            done = subprocess.run(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PLEXRL_EXAMPLES": "0.25"},
                check=False,
            )
            if done.returncode != 0:
                return "failed"
    return "passed"


def _commands(environment: Environment, python: str, venv: Path) -> list[list[str]]:
    inside = str(venv / "bin" / "python")
    pip = [inside, "-m", "pip", "install", "--quiet"]
    commands = [[python, "-m", "venv", "--clear", str(venv)], [*pip, "--upgrade", "pip>=23"]]
    commands += [[*pip, package] for package in environment.packages[:1]]
    wanted = [*environment.packages, f".[{environment.extras}]"]
    commands.append([*pip, "--editable", wanted[-1], *wanted[:-1]])
    tests = [inside, "-m", "pytest", "-q", "-n", "2", "-m", "not slow and not gpu"]
    if environment.check == "core":
        commands.append([*tests, "--core", "--dist", "loadfile"])
    elif environment.check == "models":
        commands.append([*tests, "--dist", "loadfile", *MODEL_TESTS])
    else:
        commands.append([inside, "-c", IMPORT])
    return commands


if __name__ == "__main__":
    sys.exit(main())
