"""Compares the start of `import plexrl` and of commands with an empty Python start.

    python benchmarks/import_time.py [--quick] [--json]

Every round starts each of them once, so that a busy machine delays all alike. `plexrl status` and
`plexrl jobs` ask a router on this machine. Seconds are medians; those of the processor are of the
new process alone.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field

from benchmarks.report import percentile, report
from benchmarks.sizes import sized
from tests.router.live_router import OPERATOR_KEY, live_router

ROUNDS = sized(15, quick=1)
BARE = "python -c pass"
STARTS = {
    BARE: ("-c", "pass"),
    "import plexrl": ("-c", "import plexrl; plexrl.connect"),
    "plexrl": ("-m", "plexrl.cli.app"),
    "plexrl --help": ("-m", "plexrl.cli.app", "--help"),
    "plexrl status": ("-m", "plexrl.cli.app", "status"),
    "plexrl jobs": ("-m", "plexrl.cli.app", "jobs"),
}


@dataclass(frozen=True, slots=True)
class Samples:
    """Of one start, in seconds."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def take(self, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        """Start it once."""
        before, began = os.times(), time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True
        )
        self.wall.append(time.perf_counter() - began)
        after = os.times()
        user = after.children_user - before.children_user
        self.processor.append(user + after.children_system - before.children_system)


def measure() -> dict[str, Samples]:
    """All starts, in turns."""
    found = {name: Samples() for name in STARTS}
    with live_router() as router:
        address = {"PLEXRL_URL": router.url, "PLEXRL_API_KEY": OPERATOR_KEY}
        for _ in range(ROUNDS):
            for name, arguments in STARTS.items():
                found[name].take(arguments, {**os.environ, **address})
    return found


def main() -> None:
    """Measure all and print the figures."""
    found = measure()
    wall = {name: percentile(samples.wall, 50) for name, samples in found.items()}
    processor = {name: percentile(samples.processor, 50) for name, samples in found.items()}
    rows = [
        (name, f"{wall[name]:.3f}", f"{processor[name]:.2f}", f"{wall[name] / wall[BARE]:.1f}")
        for name in STARTS
    ]
    figures = {
        "import_seconds": wall["import plexrl"] - wall[BARE],
        "bare_python_seconds": wall[BARE],
        "help_seconds": wall["plexrl --help"],
        "status_seconds": wall["plexrl status"],
        "help_over_bare": wall["plexrl --help"] / wall[BARE],
        "status_over_bare": wall["plexrl status"] / wall[BARE],
    }
    columns = ("what", "median s", "of the processor", "times an empty start")
    report("Start of the SDK and of commands", columns, rows, figures)


if __name__ == "__main__":
    main()
